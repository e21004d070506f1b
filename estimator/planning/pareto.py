"""Arena's planner (section 3.3): the frontier of computation bias and communication load.

Before anything is run, computation and communication have no common unit. The planner therefore
keeps the plans that no other plan dominates. The proxy plan is the one of least bias and, among
equals, of least communication load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.estimator.planning.chain import suffix_tables, walk_plan
from tessera.estimator.planning.labels import Criteria, RestBounds, complete_labels, rest_of
from tessera.estimator.planning.options import NoPlan, StageOptions, least_in_each
from tessera.estimator.planning.stages import stage_shares
from tessera.estimator.plans import StageCosts
from tessera.formulation.base.tables import Bools, Floats, Ints

MAX_FRONTIER_PLANS = 32
"""Number of plans kept on the frontier (from the Arena artifact; the paper says "a threshold")."""
_WEIGHTS = np.array([0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.6, 0.9, 1.0])
"""Weights of communication relative to bias, for the first plans, which bound the search."""
_WIDTH = 4096
"""Number of partial plans kept after each stage."""
_TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan with the planner's two measures. ``rows`` are rows of the options' original table."""

    rows: tuple[int, ...]
    ends: tuple[int, ...]  # the layer after each stage's last
    bias: float
    comm_load_s: float  # of an iteration; in bytes if the costs are bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The undominated plans by ascending bias."""

    plans: tuple[RankedPlan, ...]
    proxy: RankedPlan
    found: int  # number of plans before the limit was applied
    exact: bool  # whether all partial plans were kept, so that the frontier is complete


def comm_each(costs: StageCosts, micro_batches: int) -> Floats:
    """Return the seconds of each candidate's collectives per micro-batch, shape (K,).

    They include the micro-batch's part of the gradient exchange.
    """
    return costs.comm_s + costs.sync_s / micro_batches


def comm_load(comm: Floats, micro_batches: int) -> Floats:
    """Return the communication load of plans of stages (..., S).

    One micro-batch passes all stages, and the others follow at the pace of the slowest (Arena,
    equation 4). Transfers between stages are left out.
    """
    load: Floats = comm.sum(axis=-1) + (micro_batches - 1) * comm.max(axis=-1)
    return load


def find_undominated_plans(bias: Floats, load: Floats) -> Bools:
    """Return which plans no other plan dominates, shape (P,). Of equal plans, the first remains."""
    order = np.lexsort((load, bias))
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], load[order][:-1]]))
    out = np.zeros(len(bias), dtype=np.bool_)
    out[order] = load[order] < lowest
    return out


def proxy_of(bias: Floats, load: Floats) -> int:
    """Return the plan of least bias, then of least communication load (Arena, section 3.3).

    Biases whose relative difference is at most 1e-9 count as equal, because they are sums in
    different orders.
    """
    level = np.flatnonzero(bias <= bias.min() * (1 + _TIE) + _TIE)
    return int(level[int(load[level].argmin())])


def thin_plans(ends: Ints, load: Floats, limit: int, kept: int) -> Ints:
    """Return at most ``limit`` plans, ascending (Arena, section 3.3).

    While there are more plans, the two with the most similar partitions, shape (P, S), are compared,
    and the one with the higher communication load is removed. Partitions differ by the number of
    layers that are in another stage. Plan ``kept`` is never removed. It is the proxy, which has the
    least bias and therefore the highest load of the frontier, and would be removed early.
    """
    layers = np.arange(int(ends.max()))
    stage = (layers[None, :, None] >= ends[:, None, :]).sum(axis=2)
    apart = (stage[:, None, :] != stage[None, :, :]).sum(axis=2).astype(np.float64)
    np.fill_diagonal(apart, np.inf)
    left = np.arange(len(ends))
    while len(left) > limit:
        a, b = np.unravel_index(int(apart[np.ix_(left, left)].argmin()), (len(left), len(left)))
        pair = sorted(map(int, (a, b)), key=lambda i: (left[i] == kept, -load[left[i]]))
        left = np.delete(left, pair[0])
    return left


def find_frontier(
    options: StageOptions,
    load: Floats,
    comm: Floats,
    gpus: int,
    stages: int,
    micro_batches: int,
    limit: int = MAX_FRONTIER_PLANS,
) -> Frontier:
    """Return the Pareto frontier over partitions, GPUs and shapes of stages.

    ``load`` (L,) is the load of each layer. ``comm`` (K,) is as in :func:`comm_each`, for the rows
    of the options' source. Among the shapes of a stage that fit into memory, the one with the least
    communication is used.

    Raises:
        NoPlan: no chain of options covers the layers within memory.
    """
    options = options.only(_least_comm(options, comm))
    share = stage_shares(load, gpus, options.start, options.end)
    c = comm[options.source]
    criteria = Criteria(added=np.array([(share - options.gpus) ** 2, c]), worst=c[None])
    rest = rest_of(options, criteria, stages, gpus)
    if not np.isfinite(rest.added[0, stages, 0, gpus]):
        raise NoPlan(
            f"no plan with {stages} stages fits on {gpus} GPUs; use more layers, more memory, or other"
            " numbers of stages and GPUs"
        )
    known = _first_plans(options, criteria, stages, gpus)
    rows, exact = _improved(options, criteria, rest, known, stages, gpus, micro_batches)
    bias, total = _measures(criteria, rows, micro_batches)
    whole = find_undominated_plans(bias, total)
    rows, bias, total = rows[:, whole], bias[whole], total[whole]
    return _ranked(options, rows, bias, total, limit, exact)


def _improved(
    options: StageOptions,
    criteria: Criteria,
    rest: RestBounds,
    known: Ints,
    stages: int,
    gpus: int,
    micro_batches: int,
) -> tuple[Ints, bool]:
    """Return plans, as rows (S, P), and whether they include the whole frontier."""
    for _ in range(3):
        bias, total = _measures(criteria, known, micro_batches)
        best = find_undominated_plans(bias, total)
        order = np.flatnonzero(best)[np.argsort(bias[best])]
        known, bias, total = known[:, order], bias[order], total[order]

        def judge(
            added: Floats, worst: Floats, bias: Floats = bias, total: Floats = total
        ) -> Floats:
            least_bias = np.sqrt(added[0])
            least = added[1] + (micro_batches - 1) * worst[0]
            beside = np.searchsorted(bias, least_bias * (1 + _TIE) + _TIE, side="right") - 1
            beaten = (beside >= 0) & (total[beside] <= least * (1 + _TIE))
            score = least_bias / max(bias[-1], _TIE) + least / max(total[0], _TIE)
            return np.where(beaten, np.inf, score)

        labels, exact = complete_labels(options, criteria, rest, stages, gpus, judge, _WIDTH)
        known = np.concatenate([known, labels.rows], axis=1)
        if exact:
            break
    return known, exact


def _first_plans(options: StageOptions, criteria: Criteria, stages: int, gpus: int) -> Ints:
    """Return the plans with the least weighted sums of bias and communication, as rows (S, P)."""
    bias, comm = criteria.added
    scale = bias.max() or 1.0, comm.max() or 1.0
    value = (1 - _WEIGHTS)[:, None] * bias / scale[0] + _WEIGHTS[:, None] * comm / scale[1]
    rest = suffix_tables(options, value, np.add, stages, gpus)
    plans = [walk_plan(options, v, r, stages, gpus) for v, r in zip(value, rest, strict=True)]
    return np.unique(np.array(plans), axis=0).T


def _measures(criteria: Criteria, rows: Ints, micro_batches: int) -> tuple[Floats, Floats]:
    """Return the bias and communication load of plans, rows (S, P)."""
    bias: Floats = np.sqrt(criteria.added[0, rows].sum(axis=0))
    return bias, comm_load(criteria.added[1, rows].T, micro_batches)


def _least_comm(options: StageOptions, comm: Floats) -> Ints:
    """Return the options of least communication for each segment of layers and GPUs.

    Options that fit at places where the least one does not fit are included.
    """
    most = int(options.gpus.max(initial=0)) + 1
    group = (options.start * (options.layers + 1) + options.end) * most + options.gpus
    value = comm[options.source]
    left = np.flatnonzero(np.isfinite(value))
    kept, best = [left[:0]], np.zeros(int(group.max(initial=0)) + 1, dtype=np.int64)
    while len(left):
        lead = left[least_in_each(group[left], value[left])]
        kept.append(lead)
        best[group[lead]] = lead
        left = left[options.depth[left] > options.depth[best[group[left]]]]
    return np.sort(np.concatenate(kept))


def _ranked(
    options: StageOptions, rows: Ints, bias: Floats, load: Floats, limit: int, exact: bool
) -> Frontier:
    """Return the frontier of these undominated plans, rows (S, P), reduced to the limit."""
    ends = options.end[rows].T
    proxy = proxy_of(bias, load)
    few = thin_plans(ends, load, limit, proxy) if len(bias) > limit else np.arange(len(bias))
    plans = {
        int(i): RankedPlan(
            rows=tuple(options.source[rows[:, i]].tolist()),
            ends=tuple(ends[i].tolist()),
            bias=float(bias[i]),
            comm_load_s=float(load[i]),
        )
        for i in few[np.argsort(bias[few])]
    }
    return Frontier(plans=tuple(plans.values()), proxy=plans[proxy], found=len(bias), exact=exact)
