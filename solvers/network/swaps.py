"""Better orders and levels of small link groups, found by trying them on the fluid engine.

This is not in Crux. A link group is a set of jobs that contend, directly or through others, on
links that they can fill. Groups do not affect each other, so each is searched separately. All
neighbors of the best solution so far are played in one batch. The best of them is the next
solution, until none is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.base import require_wanted
from tessera.solvers.network.fluid import contending_groups, flop_under_levels

MIN_GAIN: Final = 1e-6
"""The least share of the work that a change must gain."""
PERIODS: Final = 40.0
"""Iterations of a group's slowest job over which an order is judged.

A quarter of that number is played before they are counted.
"""
MAX_STEPS: Final = 20
"""Maximum number of changes of a group."""
MAX_JUDGED_ITERATIONS: Final = 5e6
"""Maximum number of iterations, of all jobs together, over which one order is judged.

If some jobs are far faster than the slowest, the window ends before the slowest has done
``PERIODS``."""
MAX_PLAYED_ITERATIONS: Final = 3e7
"""Iterations that may be played for all groups together: some seconds."""


class Moves(StrEnum):
    """The sets of neighbors of an order."""

    ADJACENT = "adjacent"  # two adjacent jobs change places
    INSERTION = "insertion"  # a job goes to another place


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayWindow:
    """The time over which orders are judged.

    If ``horizon_s`` is None, it is ``PERIODS`` iterations of the group's slowest job.
    """

    horizon_s: float | None = None
    warm_s: float = 0.0

    def of(self, demand: LinkDemand, least_s: Floats | None = None) -> tuple[float, float]:
        """Return horizon_s and warm_s.

        ``least_s`` (J,) has the jobs' least iteration times alone, if they can be shorter than in
        ``demand``.
        """
        if self.horizon_s is not None:
            return self.horizon_s, self.warm_s
        slowest_s, alone_s = float(demand.alone_s.max()), _or(least_s, demand)
        whole = 1.25 * PERIODS * float((slowest_s / alone_s).sum())
        part = min(1.0, MAX_JUDGED_ITERATIONS / whole)
        return PERIODS * slowest_s * part, PERIODS / 4 * slowest_s * part

    def played(self, demand: LinkDemand, least_s: Floats | None = None) -> float:
        """Return the cost of playing the window: the iterations of all jobs in it, each alone."""
        horizon_s, warm_s = self.of(demand, least_s)
        return float(((horizon_s + warm_s) / _or(least_s, demand)).sum())


def _or(least_s: Floats | None, demand: LinkDemand) -> Floats:
    return demand.alone_s if least_s is None else least_s


class PlayEffort:
    """The effort that is left for groups that are searched one after another, the cheapest first.

    Each group may use an equal share of the rest, so later groups get the rest of the cheap ones.
    """

    def __init__(
        self,
        groups: int,
        played: float = MAX_PLAYED_ITERATIONS,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> None:
        self._left, self._groups, self._cancelled = played, groups, cancelled

    def check(self) -> None:
        """Raise DeadlineTooShort if nobody waits for the plan any more."""
        require_wanted(self._cancelled)

    def share(self) -> float:
        """Return the effort that the next group may use. Call this once for each group."""
        self.check()
        share = self._left / max(self._groups, 1)
        self._groups -= 1
        return share

    def spend(self, played: float) -> None:
        """Subtract the effort that was used."""
        self.check()
        self._left -= played


def cheapest_first(groups: list[Ints], demand: LinkDemand) -> list[Ints]:
    """Return the groups by the cost of playing their windows."""
    alone_s = demand.alone_s

    def cost(group: Ints) -> tuple[float, int]:
        return float(alone_s[group].max() * (1 / alone_s[group]).sum()), int(group[0])

    return sorted(groups, key=cost)


def swap_orders(
    demand: LinkDemand,
    order: Ints,
    *,
    most_jobs: int = 8,
    moves: Moves = Moves.INSERTION,
    window: PlayWindow | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Ints:
    """Return ``order``, (J,), with the jobs of each small group in the best order found.

    A group is small if it has at most ``most_jobs`` jobs. Its jobs exchange the places that they
    have between them, so jobs of other groups stay where they are.

    Raises:
        InvalidInput: ``order`` does not name each job once.
    """
    if sorted(order.tolist()) != list(range(demand.jobs)):
        raise InvalidInput("order", f"must name each of the {demand.jobs} jobs once")
    rank = np.empty(demand.jobs, dtype=np.int64)
    rank[order] = np.arange(demand.jobs)
    better, window = order.copy(), window or PlayWindow()
    groups = [group for group in contending_groups(demand) if len(group) <= most_jobs]
    effort = PlayEffort(len(groups), cancelled=cancelled)
    for group in cheapest_first(groups, demand):
        places = np.sort(rank[group])
        jobs = order[places]
        better[places] = jobs[_best_order(compact_demand(demand, jobs), moves, window, effort)]
    return better


def change_levels(
    demand: LinkDemand,
    level: Ints,
    levels: int,
    *,
    least_jobs: int = 2,
    most_jobs: int = 8,
    window: PlayWindow | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Ints:
    """Return levels, (J,), changed in small groups until no change gains.

    A group is changed if it has ``least_jobs`` to ``most_jobs`` jobs. In a change, one job goes to
    any other level, or two jobs exchange theirs. It is meant for groups with more jobs than levels.
    There, ``swap_orders`` judged orders whose places compression then merged. Callers must derive
    the order from the returned levels (``by_level``).
    """
    better, window = level.copy(), window or PlayWindow()
    groups = [group for group in contending_groups(demand) if least_jobs <= len(group) <= most_jobs]
    effort = PlayEffort(len(groups), cancelled=cancelled)
    for group in cheapest_first(groups, demand):
        better[group] = _climbed(
            compact_demand(demand, group),
            level[group],
            lambda now: level_moves(now, levels),
            window,
            effort.share(),
            effort,
        )
    return better


def by_level(level: Ints, order: Ints) -> Ints:
    """Return the jobs by falling level, (J,). Jobs of one level are in the order of ``order``."""
    by_falling_level: Ints = order[np.argsort(-level[order], kind="stable")]
    return by_falling_level


def compact_demand(demand: LinkDemand, jobs: Ints) -> LinkDemand:
    """Return the demand of these jobs alone, with links renumbered without gaps."""
    part = demand.among(jobs)
    used, link = np.unique(part.link, return_inverse=True)
    return LinkDemand(
        work_flop=part.work_flop,
        compute_s=part.compute_s,
        start_s=part.start_s,
        delay_s=part.delay_s,
        link_start=part.link_start,
        link=link.astype(np.int64),
        busy_s=part.busy_s,
        links=len(used),
    )


def _best_order(demand: LinkDemand, moves: Moves, window: PlayWindow, effort: PlayEffort) -> Ints:
    """Return the jobs, which are given most urgent first, in the best order found."""
    count, left = demand.jobs, effort.share()
    start = np.arange(count - 1, -1, -1)
    level = _climbed(demand, start, lambda now: order_moves(now, moves), window, left, effort)
    return np.argsort(-level, kind="stable")


def _climbed(
    demand: LinkDemand,
    level: Ints,
    neighbors: Callable[[Ints], Ints],
    window: PlayWindow,
    left: float,
    effort: PlayEffort,
) -> Ints:
    """Return levels that none of their neighbors improves on, reached from ``level``.

    The search ends earlier if the share ``left`` of the effort is used up. Among equal neighbors,
    the first is taken.
    """
    horizon_s, warm_s = window.of(demand)
    each = window.played(demand)
    now, rows = level, neighbors(level)
    if not len(rows) or each * (1 + len(rows)) > left:
        return now
    left -= each
    effort.spend(each)
    work = float(flop_under_levels(demand, now[None], horizon_s=horizon_s, warm_s=warm_s)[0])
    for _ in range(MAX_STEPS):
        left -= each * len(rows)
        if left < 0:
            break
        effort.spend(each * len(rows))
        work_of_row = flop_under_levels(demand, rows, horizon_s=horizon_s, warm_s=warm_s)
        best = int(np.argmax(work_of_row))
        if work_of_row[best] <= work * (1 + MIN_GAIN):
            break
        now, work = rows[best], float(work_of_row[best])
        rows = neighbors(now)
    return now


def order_moves(level: Ints, moves: Moves) -> Ints:
    """Return the neighbors of distinct levels, as levels."""
    order = np.argsort(-level, kind="stable").tolist()
    count = len(order)
    orders = []
    for source in range(count):
        for target in range(count):
            near = abs(source - target) == 1
            if source == target or (near and target < source):  # adjacent jobs change places once
                continue
            if near or moves is Moves.INSERTION:
                rest = order[:source] + order[source + 1 :]
                orders.append([*rest[:target], order[source], *rest[target:]])
    return _levels_of(np.array(orders, dtype=np.int64).reshape(-1, count))


def level_moves(level: Ints, levels: int) -> Ints:
    """Return all levels with one job on another level, or two jobs' levels exchanged."""
    rows = []
    for job in range(len(level)):
        for other in range(levels):
            if other != level[job]:
                row = level.copy()
                row[job] = other
                rows.append(row)
        for second in range(job):
            if level[second] != level[job]:
                row = level.copy()
                row[[job, second]] = level[[second, job]]
                rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(-1, len(level))


def _levels_of(orders: Ints) -> Ints:
    """Return a separate level for each job of each order, (R, J)."""
    count = orders.shape[1]
    levels = np.empty_like(orders)
    np.put_along_axis(levels, orders, np.arange(count - 1, -1, -1)[None], axis=1)
    return levels
