"""Crius' estimate of a Cell (section 5.1): the best of 2^stages mixtures of two profiled plans.

Every stage was profiled under data parallelism alone and under tensor parallelism alone. Any mixture
of the two is a plan whose stages are joined by send/recv, all-gather or both. A joint depends on
neighbours only, and latency is a sum plus maxima. Dynamic programming along the chain of stages,
with two states per stage, therefore finds the best mixture exactly for each pair of maxima. The
mixtures are not enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.estimator.planning.options import NoPlan
from tessera.estimator.planning.pareto import comm_each
from tessera.estimator.planning.search import PlanSearchResult
from tessera.estimator.planning.stages import Stages
from tessera.estimator.plans import Candidates, Groups, Network, Primitive, StageCosts
from tessera.formulation.base.tables import Floats, Ints

DATA, TENSOR = 0, 1
"""The two ways to run a stage, as columns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledStages:
    """The seconds of S stages, each run in W ways (two in the paper: ``DATA`` and ``TENSOR``).

    ``busy_s`` is ``inf`` if a stage does not fit.
    """

    busy_s: Floats  # (S, W) for a micro-batch, both passes, with collectives inside the stage
    join_s: Floats  # (S - 1, W, W) from stage s in one way to stage s + 1 in another
    # (S, W) once per iteration: gradients and optimizer, in all stages at the same time.
    once_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledStages:
    """The best mixture: the way of each stage, and the latency of an iteration."""

    ways: tuple[int, ...]
    latency_s: float


def assemble_plan(profiled: ProfiledStages, micro_batches: int) -> AssembledStages:
    """Return the mixture of least latency (Crius, section 5.1).

    The latency is the sum of three terms: all stages and joints, for the first micro-batch; B - 1
    times the slowest stage, without its joint, which overlaps; and the longest of the
    once-per-iteration times. Limits on the slowest stage and on the longest once-per-iteration time
    are taken from the stages. For each pair of limits, the least sum within them is found. The best
    of all pairs is the optimum.

    Raises:
        NoPlan: a stage fits in neither way.
    """
    busy, once = profiled.busy_s, profiled.once_s
    if not np.isfinite(busy).any(axis=1).all():
        stage = int(np.flatnonzero(~np.isfinite(busy).any(axis=1))[0])
        raise NoPlan(
            f"stage {stage} fits neither with data nor with tensor parallelism; use more GPUs or"
            " more memory"
        )
    pace = np.unique(busy[np.isfinite(busy)])
    last = np.unique(once[np.isfinite(busy)])
    pace = pace[pace >= busy.min(axis=1).max()]
    allowed = (busy[:, :, None, None] <= pace[:, None]) & (once[:, :, None, None] <= last)
    cost = np.where(allowed, busy[:, :, None, None], np.inf)  # (S, W, paces, lasts)
    total, came = cost[0], []
    for s in range(1, len(busy)):
        through = total[:, None] + profiled.join_s[s - 1][:, :, None, None]
        came.append(through.argmin(axis=0))
        total = through.min(axis=0) + cost[s]
    latency = total + (micro_batches - 1) * pace[:, None] + last
    way, p, u = np.unravel_index(int(latency.argmin()), latency.shape)
    ways = [int(way)]
    for back in reversed(came):
        ways.append(int(back[ways[-1], p, u]))
    return AssembledStages(ways=tuple(ways[::-1]), latency_s=float(latency[way, p, u]))


def pure_candidates(candidates: Candidates, stages: Stages, cost: Floats | None = None) -> Ints:
    """Return the candidates of each stage under data and tensor parallelism alone, shape (S, 2).

    An entry is -1 if there is no such candidate (a degree is above the limit of the layers). Among
    expert degrees, the one of least ``cost``, shape (S, K), is chosen. A candidate of cost ``inf``
    is excluded. If ``cost`` is None, experts are not divided.
    """
    c = candidates
    if cost is None:
        cost = np.broadcast_to(np.where(c.ep == 1, 0.0, np.inf), (len(stages.ends), len(c)))
    ways = np.full((len(stages.ends), 2), -1, dtype=np.int64)
    for s, place in enumerate(zip(stages.starts, stages.ends, stages.gpus, strict=True)):
        start, end, gpus = place
        here = ~c.sp & (c.start == start) & (c.end == end) & np.isfinite(cost[s])
        for way, degree in ((DATA, c.dp), (TENSOR, c.tp)):
            matching = np.flatnonzero(here & (degree == gpus) & (c.gpus == gpus))
            ways[s, way] = matching[cost[s, matching].argmin()] if len(matching) else -1
    return ways


def assembled_plan(
    costs: StageCosts,
    depth: Ints,
    stages: Stages,
    boundary_bytes: Floats,
    network: Network,
    gpus_per_node: int,
    micro_batches: int,
) -> PlanSearchResult:
    """Return Crius' estimate of a Cell with these stages: the best mixture, as rows of the costs.

    ``depth`` (K,) says where each candidate fits, as in :mod:`tessera.estimator.planning.options`. A
    way that does not fit a stage is dropped. Among the expert degrees that fit, the one with the
    least communication is chosen (the paper does not specify this). ``boundary_bytes`` (L,) has the
    bytes that each layer hands on for a micro-batch.

    Raises:
        NoPlan: a stage fits in neither way.
    """
    left = np.arange(len(stages.ends), 0, -1)[:, None]
    comm_s = np.where(depth >= left, comm_each(costs, micro_batches), np.inf)
    rows = pure_candidates(costs.candidates, stages, comm_s)
    runs = rows >= 0
    gpus = np.array(stages.gpus, dtype=np.int64)
    alone = np.stack(
        [np.stack([gpus, np.ones_like(gpus)], 1), np.stack([np.ones_like(gpus), gpus], 1)], 1
    )
    sent = boundary_bytes[np.array(stages.ends[:-1], dtype=np.int64) - 1]
    best = assemble_plan(
        ProfiledStages(
            busy_s=np.where(runs, costs.busy_s[rows], np.inf),
            once_s=np.where(runs, (costs.sync_s + costs.update_s)[rows], 0.0),
            join_s=joint_seconds(sent, alone, network, gpus_per_node),
        ),
        micro_batches,
    )
    chosen = rows[np.arange(len(rows)), np.array(best.ways)]
    return PlanSearchResult(rows=tuple(chosen.tolist()), latency_s=best.latency_s)


def joint_seconds(
    boundary_bytes: Floats, degrees: Ints, network: Network, gpus_per_node: int
) -> Floats:
    """Return the seconds for joining neighbours, forward and back, shape (S - 1, W, W).

    ``boundary_bytes`` (S - 1,) are a micro-batch's activations between stages. ``degrees`` (S, W,
    2) are the dp and tp of each way. The number of parts of the tensor is the number of GPUs of the
    smaller stage. A tensor-parallel receiver then gathers the parts of its replica's samples.
    Data-parallel stages are therefore joined by send/recv alone, the others by send/recv and
    all-gather. On the way back, sender and receiver are exchanged.
    """
    dp, tp = degrees[..., 0], degrees[..., 1]
    ways = degrees.shape[1]
    shape = (len(boundary_bytes), ways, ways)
    size = np.broadcast_to(boundary_bytes[:, None, None], shape)
    front = [np.broadcast_to(x[:-1, :, None], shape).ravel() for x in (dp, tp)]
    behind = [np.broadcast_to(x[1:, None, :], shape).ravel() for x in (dp, tp)]
    size = size.ravel()
    one_way = _joint_s(size, front, behind, network, gpus_per_node)
    back = _joint_s(size, behind, front, network, gpus_per_node)
    return (one_way + back).reshape(shape)


def _joint_s(
    size: Floats, sender: list[Ints], receiver: list[Ints], network: Network, gpus_per_node: int
) -> Floats:
    """Return the seconds to move activations to the next stage, one row per pair of ways."""
    (dp_a, tp_a), (dp_b, tp_b) = sender, receiver
    parts = np.minimum(dp_a * tp_a, dp_b * tp_b)
    nodes = 1 + (dp_a * tp_a + dp_b * tp_b > gpus_per_node).astype(np.int64)
    pairs = Groups(
        size=np.full(len(parts), 2, dtype=np.int64),
        nodes=nodes,
        node_groups=np.minimum(parts, gpus_per_node),
    )
    sent = network.seconds(Primitive.SEND, size / parts, pairs)
    within = Groups(
        size=tp_b,
        nodes=-(-tp_b // gpus_per_node),
        node_groups=np.maximum(
            1, np.minimum(dp_b * tp_b, gpus_per_node) // np.minimum(tp_b, gpus_per_node)
        ),
    )
    gathered = network.seconds(Primitive.ALL_GATHER, size / dp_b, within)
    joined: Floats = sent + gathered
    return joined
