"""Muri (SIGCOMM'22): jobs whose stages use different resources share GPUs, interleaved.

Read for whole GPUs: the members of a group hold the same GPUs and run their iterations in step, each stage of
one beside other stages of the others. Only jobs of the same GPU count are grouped.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Demand
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.network.jobs.matching import matched

IN_TURN: Final = 0.5
"""Share of a perfect interleaving (efficiency p / R) that a group must exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs that hold the same GPUs; one alone is a group, too."""

    jobs: tuple[int, ...]  # the most urgent first
    gpus: int
    iteration_s: float  # of every member


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """Groups, that with the most urgent job first; jobs that are in none had to stay out of the choice."""

    groups: tuple[Group, ...]
    multiplier: (
        Floats  # (J,) an iteration's length in its group over that alone; 1: alone or in no group
    )


def stages_s(demand: Demand) -> Floats:
    """Return the stages that networks care for: seconds on the GPU and on the network, (J, 2)."""
    return np.stack([demand.compute_s, demand.comm_s], axis=1)


def interleaved_s(stage_s: Floats) -> Floats:
    """Return the iteration's length of each group, (N,).

    ``stage_s`` (N, R, R): of each group R jobs' stages on R resources; absent jobs are rows of zeros. In
    slot i the job at position p does stage (i - p) mod R, and the slot lasts as long as the longest of these;
    the best of all orders counts.
    """
    size = stage_s.shape[-1]
    best = np.full(len(stage_s), np.inf)
    slot = np.arange(size)
    for rest in permutations(range(1, size)):
        position = np.array([0, *rest])
        at = (slot[None, :] - position[:, None]) % size
        lasts = np.take_along_axis(stage_s, np.broadcast_to(at, stage_s.shape), axis=2).max(axis=1)
        best = np.minimum(best, lasts.sum(axis=1))
    return best


def efficiency(stage_s: Floats) -> Floats:
    """Return the mean share of time that resources are used in each group, (N,); groups as above."""
    found: Floats = stage_s.sum(axis=(1, 2)) / (stage_s.shape[-1] * interleaved_s(stage_s))
    return found


def grouped(
    stage_s: Floats,
    gpus: Ints,
    urgency: Floats,
    capacity_gpus: int,
    *,
    alone_s: Floats | None = None,
    threshold: float = IN_TURN,
) -> Sharing:
    """Return who shares, so that the groups fit ``capacity_gpus`` where pairing can bring that about.

    Jobs enter by ``urgency`` (J,), the least first, as many as R to a GPU could hold. Rounds of
    maximum-weight matching then join groups in pairs, the weight being the pair's efficiency; of what is
    matched the most efficient are joined until the rest fits.

    Args:
        stage_s: (J, R) seconds of each job on each resource; their sum must be above 0.
        gpus: (J,)
        urgency: remaining time x GPUs where lengths are known (SRSF), else the GPU time had (2D-LAS).
        capacity_gpus: that there are.
        alone_s: (J,) an iteration alone, for the multipliers; the sum of the stages where not given.
        threshold: lambda; a pair of together p jobs must have an efficiency above lambda p / R.

    Raises:
        InvalidInput: stages or counts that mean nothing.
    """
    if stage_s.ndim != 2 or not ((stage_s >= 0).all() and (stage_s.sum(axis=1) > 0).all()):
        raise InvalidInput(
            "stage_s", "must be [jobs, resources], at least 0 and not 0 in all of a job's"
        )
    if len(gpus) and gpus.min() < 1:
        raise InvalidInput("gpus", "must be at least 1 for each job")
    resources = stage_s.shape[1]
    alone_s = stage_s.sum(axis=1) if alone_s is None else alone_s
    order = np.argsort(urgency, kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    entered = order[np.cumsum(gpus[order]) <= resources * capacity_gpus]
    groups: list[tuple[int, ...]] = [(job,) for job in entered.tolist()]
    for _ in range((resources - 1).bit_length()):
        surplus = sum(int(gpus[g[0]]) for g in groups) - capacity_gpus
        if surplus <= 0:
            break
        groups = _joined(groups, _pairs(groups, stage_s, gpus, threshold), gpus, rank, surplus)
    groups.sort(key=lambda group: int(rank[group[0]]))
    multiplier = np.ones(len(gpus))
    found = []
    for group in groups:
        members = list(group)
        iteration_s = float(alone_s[members[0]])
        if len(group) > 1:
            iteration_s = float(interleaved_s(_padded([group], stage_s))[0])
            multiplier[members] = iteration_s / alone_s[members]
        found.append(Group(jobs=group, gpus=int(gpus[group[0]]), iteration_s=iteration_s))
    return Sharing(groups=tuple(found), multiplier=multiplier)


def _padded(groups: list[tuple[int, ...]], stage_s: Floats) -> Floats:
    """Return the stages of each group's jobs, filled up with zeros, (groups, R, R)."""
    found = np.zeros((len(groups), stage_s.shape[1], stage_s.shape[1]))
    for at, group in enumerate(groups):
        found[at, : len(group)] = stage_s[list(group)]
    return found


def _pairs(
    groups: list[tuple[int, ...]], stage_s: Floats, gpus: Ints, threshold: float
) -> list[tuple[float, int, int]]:
    """Return what is matched among groups of equal GPU counts: efficiency and the two indices."""
    buckets: dict[int, dict[Hashable, list[int]]] = {}
    for at, group in enumerate(groups):
        looks = tuple(sorted(map(tuple, stage_s[list(group)].tolist())))
        kinds = buckets.setdefault(int(gpus[group[0]]), {})
        kinds.setdefault(looks, []).append(at)
    found = []
    for kinds in buckets.values():
        members = list(kinds.values())
        value = _pair_values([groups[m[0]] for m in members], stage_s, threshold)
        made = matched(np.array([len(m) for m in members], dtype=np.int64), value)
        left = [iter(m) for m in members]
        for a, b in zip(*(axis.tolist() for axis in np.nonzero(made)), strict=True):
            for _ in range(int(made[a, b])):
                found.append((float(value[a, b]), next(left[a]), next(left[b])))
    return found


def _pair_values(groups: list[tuple[int, ...]], stage_s: Floats, threshold: float) -> Floats:
    """Return the efficiency of each two groups together; 0: too many jobs, or not above the threshold."""
    resources = stage_s.shape[1]
    padded = _padded(groups, stage_s)
    size = np.array([len(group) for group in groups])
    a, b = np.triu_indices(len(groups))
    together = size[a] + size[b]
    a, b, together = (x[together <= resources] for x in (a, b, together))
    row = np.arange(resources)[None, :]
    own = row < size[a][:, None]
    other = np.maximum(row - size[a][:, None], 0)
    merged = np.where(own[:, :, None], padded[a], padded[b[:, None], other])
    worth = efficiency(merged)
    worth[worth <= threshold * together / resources * (1 + 1e-9)] = 0.0
    value = np.zeros((len(groups), len(groups)))
    value[a, b] = value[b, a] = worth
    return value


def _joined(
    groups: list[tuple[int, ...]],
    pairs: list[tuple[float, int, int]],
    gpus: Ints,
    rank: Ints,
    surplus: int,
) -> list[tuple[int, ...]]:
    """Return the groups with pairs joined, the most efficient first, until ``surplus`` GPUs are saved."""
    gone: set[int] = set()
    joined = []
    for _, a, b in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        if surplus <= 0:
            break
        surplus -= int(gpus[groups[a][0]])
        gone |= {a, b}
        joined.append(tuple(sorted(groups[a] + groups[b], key=lambda job: int(rank[job]))))
    return [group for at, group in enumerate(groups) if at not in gone] + joined
