"""Muri (SIGCOMM'22): jobs whose stages use different resources share GPUs, interleaved.

It is applied to whole GPUs. The members of a group hold the same GPUs and run their iterations in
step, and each stage of a job runs at the same time as other stages of the others. Only jobs with
the same GPU count are grouped.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.jobs.matching import match_pairs

EFFICIENCY_THRESHOLD: Final = 0.5
"""Share of a perfect interleaving (efficiency p / R) that a group must exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingGroup:
    """Jobs that hold the same GPUs; a single job is a group, too."""

    jobs: tuple[int, ...]  # the most urgent job first
    gpus: int
    iteration_s: float  # iteration time of every member, seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharingGroups:
    """The groups, the one with the most urgent job first.

    Jobs that are in no group had to be left out.
    """

    groups: tuple[SharingGroup, ...]
    multiplier: Floats  # (J,) iteration time in the group over that alone; 1 without a group


def stages_s(demand: LinkDemand) -> Floats:
    """Return the stages that matter to networks: seconds on the GPU and on the network, (J, 2)."""
    return np.stack([demand.compute_s, demand.comm_s], axis=1)


def interleaved_s(stage_s: Floats) -> Floats:
    """Return the iteration time of each group, seconds, (N,).

    ``stage_s`` (N, R, R) has, for each group, the stages of R jobs on R resources; absent jobs are
    rows of zeros. In slot i the job at position p runs stage (i - p) mod R, and the slot lasts as
    long as the longest of these stages. The best order of positions counts.
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


def group_efficiency(stage_s: Floats) -> Floats:
    """Return the mean share of time in which a group's resources are used, (N,).

    ``stage_s`` is as in ``interleaved_s``.
    """
    share: Floats = stage_s.sum(axis=(1, 2)) / (stage_s.shape[-1] * interleaved_s(stage_s))
    return share


def group_jobs(
    stage_s: Floats,
    gpus: Ints,
    urgency: Floats,
    capacity_gpus: int,
    *,
    alone_s: Floats | None = None,
    threshold: float = EFFICIENCY_THRESHOLD,
) -> SharingGroups:
    """Return the groups that share GPUs.

    They fit ``capacity_gpus`` if pairing can achieve that. Jobs enter by ``urgency`` (J,), the
    lowest first, as many as R to a GPU could hold. Rounds of maximum-weight matching then join
    groups in pairs; the weight is the pair's efficiency. Of the matched pairs, the most efficient
    are joined until the rest fits.

    Args:
        stage_s: (J, R) seconds of each job on each resource; their sum must be above 0.
        gpus: (J,) GPUs of each job.
        urgency: remaining time x GPUs if lengths are known (SRSF), else the GPU time received
            (2D-LAS).
        capacity_gpus: the number of GPUs.
        alone_s: (J,) an iteration alone, for the multipliers; if None, the sum of the stages.
        threshold: lambda; a pair with p jobs in all must have an efficiency above lambda p / R.

    Raises:
        InvalidInput: the stages or counts have no meaning.
    """
    if stage_s.ndim != 2 or not ((stage_s >= 0).all() and (stage_s.sum(axis=1) > 0).all()):
        raise InvalidInput(
            "stage_s", "must be [jobs, resources], at least 0, and above 0 in one of each job's"
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
    members_of = []
    for group in groups:
        members = list(group)
        iteration_s = float(alone_s[members[0]])
        if len(group) > 1:
            iteration_s = float(interleaved_s(_padded([group], stage_s))[0])
            multiplier[members] = iteration_s / alone_s[members]
        members_of.append(
            SharingGroup(jobs=group, gpus=int(gpus[group[0]]), iteration_s=iteration_s)
        )
    return SharingGroups(groups=tuple(members_of), multiplier=multiplier)


def _padded(groups: list[tuple[int, ...]], stage_s: Floats) -> Floats:
    """Return the stages of each group's jobs, padded with zeros, (groups, R, R)."""
    padded = np.zeros((len(groups), stage_s.shape[1], stage_s.shape[1]))
    for at, group in enumerate(groups):
        padded[at, : len(group)] = stage_s[list(group)]
    return padded


def _pairs(
    groups: list[tuple[int, ...]], stage_s: Floats, gpus: Ints, threshold: float
) -> list[tuple[float, int, int]]:
    """Return the matched pairs of groups with equal GPU counts: efficiency and two indices."""
    buckets: dict[int, dict[Hashable, list[int]]] = {}
    for at, group in enumerate(groups):
        looks = tuple(sorted(map(tuple, stage_s[list(group)].tolist())))
        kinds = buckets.setdefault(int(gpus[group[0]]), {})
        kinds.setdefault(looks, []).append(at)
    matched = []
    for kinds in buckets.values():
        members = list(kinds.values())
        value = _pair_values([groups[m[0]] for m in members], stage_s, threshold)
        made = match_pairs(np.array([len(m) for m in members], dtype=np.int64), value)
        left = [iter(m) for m in members]
        for a, b in zip(*(axis.tolist() for axis in np.nonzero(made)), strict=True):
            for _ in range(int(made[a, b])):
                matched.append((float(value[a, b]), next(left[a]), next(left[b])))
    return matched


def _pair_values(groups: list[tuple[int, ...]], stage_s: Floats, threshold: float) -> Floats:
    """Return the efficiency of each two groups together.

    It is 0 if they have too many jobs or are not above the threshold.
    """
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
    value_of_pair = group_efficiency(merged)
    value_of_pair[value_of_pair <= threshold * together / resources * (1 + 1e-9)] = 0.0
    value = np.zeros((len(groups), len(groups)))
    value[a, b] = value[b, a] = value_of_pair
    return value


def _joined(
    groups: list[tuple[int, ...]],
    pairs: list[tuple[float, int, int]],
    gpus: Ints,
    rank: Ints,
    surplus: int,
) -> list[tuple[int, ...]]:
    """Return the groups after joining pairs, the most efficient first.

    Pairs are joined until ``surplus`` GPUs are saved.
    """
    gone: set[int] = set()
    joined = []
    for _, a, b in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        if surplus <= 0:
            break
        surplus -= int(gpus[groups[a][0]])
        gone |= {a, b}
        joined.append(tuple(sorted(groups[a] + groups[b], key=lambda job: int(rank[job]))))
    return [group for at, group in enumerate(groups) if at not in gone] + joined
