"""Better paths of small groups, found by trying them on the fluid engine with their order.

This is not in Crux. Jobs that could share a link under some choice of paths form a group. If a
group is small, its bundles are tried one after another on each of their other candidates. Each
choice is played under the present order, and under those in which two adjacent jobs have changed
places. The first choice that gains is the next solution, until a whole turn gains nothing. Then the
candidates of a few bundles are drawn again, and the search is repeated, as long as trials are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from tessera.formulation.answer.network.contention import Contention, demand_of
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.tables import Ints, concatenate_ranges, run_starts
from tessera.solvers.network.fluid import flop_under_levels
from tessera.solvers.network.paths import least_comm_s
from tessera.solvers.network.swaps import (
    MIN_GAIN,
    Moves,
    PlayEffort,
    PlayWindow,
    cheapest_first,
    compact_demand,
    order_moves,
)

TRIALS: Final = 240
"""Choices of paths that are tried for a group."""
MAX_CHOICES: Final = 12_000
"""Maximum number of choices that are tried for all groups together: some seconds.

The number of iterations played for them is limited to the same time (``swaps.MAX_PLAYED_ITERATIONS``). Fewer
choices are tried if the jobs of a group have very different lengths."""
KICKED_BUNDLES: Final = 3
"""Bundles that are drawn again when no single one should move."""


def try_paths(
    contention: Contention,
    chosen: Ints,
    order: Ints,
    *,
    most_jobs: int = 8,
    trials: int = TRIALS,
    window: PlayWindow | None = None,
    seed: int = 0,
    cancelled: Callable[[], bool] = never_cancelled,
) -> tuple[Ints, Ints]:
    """Return the candidates of bundles, (B,), and the order, (J,), after trials in small groups."""
    chosen, order = chosen.copy(), order.copy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    groups = [g for g in possible_groups(contention) if 2 <= len(g) <= most_jobs]
    trials = min(trials, MAX_CHOICES // max(len(groups), 1))
    effort = PlayEffort(len(groups), cancelled=cancelled)
    for group in cheapest_first(groups, demand_of(contention, chosen)):
        places = np.sort(rank[group])
        jobs = order[places]
        part, bundles = contention_among(contention, jobs)
        search = _PathSearch(part, trials, effort, window or PlayWindow())
        if search.left > 0:
            chosen[bundles], by_rank = _best(search, chosen[bundles], seed)
            order[places] = jobs[by_rank]
            effort.spend(search.played)
    return chosen, order


def possible_groups(contention: Contention) -> list[Ints]:
    """Return groups of jobs that could share links, directly or through others, for some paths.

    They are sorted by their first job.
    """
    c = contention
    jobs, links = len(c.jobs), len(c.link_bytes_per_s)
    hops = np.diff(c.path_start)[c.candidate]
    owner = np.repeat(np.repeat(c.bundle_job, np.diff(c.candidate_start)), hops)
    link = np.concatenate(
        [c.fixed_link, c.path_link[concatenate_ranges(c.path_start[c.candidate], hops)]]
    )
    owner = np.concatenate([c.fixed_job, owner])
    graph = coo_matrix((np.ones(len(link)), (owner, jobs + link)), (jobs + links, jobs + links))
    _, label = connected_components(graph, directed=False)
    by_label = np.argsort(label[:jobs], kind="stable")
    parts = np.split(by_label, np.flatnonzero(np.diff(label[by_label])) + 1)
    return sorted((part for part in parts if len(part)), key=lambda part: int(part[0]))


def contention_among(contention: Contention, jobs: Ints) -> tuple[Contention, Ints]:
    """Return the contention of these jobs alone, in this order, and their bundles."""
    c = contention
    fixed_counts, bundle_counts = np.diff(c.fixed_start)[jobs], np.diff(c.bundle_start)[jobs]
    fixed = concatenate_ranges(c.fixed_start[jobs], fixed_counts)
    bundles = concatenate_ranges(c.bundle_start[jobs], bundle_counts)
    counts = np.diff(c.candidate_start)[bundles]
    part = Contention(
        jobs=tuple(c.jobs[job] for job in jobs.tolist()),
        work_flop=c.work_flop[jobs],
        compute_s=c.compute_s[jobs],
        start_s=c.start_s[jobs],
        gpus=c.gpus[jobs],
        fixed_start=run_starts(fixed_counts),
        fixed_link=c.fixed_link[fixed],
        fixed_bytes=c.fixed_bytes[fixed],
        fixed_delay_s=c.fixed_delay_s[jobs],
        bundle_start=run_starts(bundle_counts),
        bundle_bytes=c.bundle_bytes[bundles],
        bundle_messages=c.bundle_messages[bundles],
        candidate_start=run_starts(counts),
        candidate=c.candidate[concatenate_ranges(c.candidate_start[bundles], counts)],
        path_start=c.path_start,
        path_link=c.path_link,
        path_delay_s=c.path_delay_s,
        link_bytes_per_s=c.link_bytes_per_s,
    )
    return part, bundles


@dataclass(frozen=True, slots=True, eq=False)
class _PathChoice:
    """The paths of some jobs (most urgent first), the levels that order them, and their work."""

    chosen: Ints
    level: Ints
    work: float


class _PathSearch:
    """A search that tries paths of a few jobs, and counts the trials."""

    def __init__(
        self, part: Contention, trials: int, effort: PlayEffort, window: PlayWindow
    ) -> None:
        self.part, self.played, share = part, 0.0, effort.share()
        self._check = effort.check
        demand = demand_of(part, np.zeros(len(part.bundle_bytes), dtype=np.int64))
        least_s = np.maximum(part.compute_s, part.start_s + least_comm_s(part))  # on the best paths
        self.span = window.of(demand, least_s)
        # the cost of a trial, which plays as many orders as there are jobs
        self.each = window.played(demand, least_s) * demand.jobs
        self.left = int(min(trials, share / self.each))
        most = np.diff(part.candidate_start)
        largest_first = np.argsort(-part.bundle_bytes, kind="stable").tolist()
        self.open = [bundle for bundle in largest_first if most[bundle] > 1]
        self.moves = [(bundle, place) for bundle in self.open for place in range(most[bundle])]
        self.most = most

    def tried(self, chosen: Ints, level: Ints) -> _PathChoice:
        """Return the best of these levels and those with two adjacent jobs exchanged."""
        self._check()
        self.left -= 1
        self.played += self.each
        rows = np.concatenate([level[None], order_moves(level, Moves.ADJACENT)])
        demand = compact_demand(demand_of(self.part, chosen), np.arange(len(level)))
        work = flop_under_levels(demand, rows, horizon_s=self.span[0], warm_s=self.span[1])
        best = int(np.argmax(work > work.max() * (1 - MIN_GAIN)))
        return _PathChoice(chosen, rows[best], float(work[best]))

    def climbed(self, now: _PathChoice) -> _PathChoice:
        """Move bundle after bundle where that gains, until no move gains or no trial is left."""
        idle = 0
        for bundle, place in cycle(self.moves):
            idle += 1
            if idle > len(self.moves) or self.left <= 0:
                break
            if now.chosen[bundle] == place:
                continue
            other = now.chosen.copy()
            other[bundle] = place
            trial = self.tried(other, now.level)
            if trial.work > now.work * (1 + MIN_GAIN):
                now, idle = trial, 0
        return now

    def kicked(self, chosen: Ints, rng: np.random.Generator) -> Ints:
        """Return paths of which a few are drawn again."""
        redrawn = chosen.copy()
        for bundle in rng.choice(
            self.open, size=min(KICKED_BUNDLES, len(self.open)), replace=False
        ).tolist():
            redrawn[bundle] = rng.integers(self.most[bundle])
        return redrawn


def _best(search: _PathSearch, chosen: Ints, seed: int) -> tuple[Ints, Ints]:
    """Return the paths of these jobs, which are given most urgent first, and their order."""
    rng = np.random.default_rng(seed)
    level = np.arange(len(search.part.jobs) - 1, -1, -1)
    best = search.climbed(search.tried(chosen, level))
    while search.left > 0 and len(search.open) > 1:
        start = search.tried(search.kicked(best.chosen, rng), best.level)
        trial = search.climbed(start)
        if trial.work > best.work * (1 + MIN_GAIN):
            best = trial
    return best.chosen, np.argsort(-best.level, kind="stable")
