"""Small cores, closed without a solver by all ways to change a few choices, by rising loss.

Let every job have its best column at the shadow prices. A choice that changes some of these falls
short of the bound by its loss. The loss is ``best - margin`` for each change, plus the price of
what it leaves of each row. In a row whose price exceeds the allowed loss, nothing is left at all.
So all choices that lose no more than some amount can be found: list the changes of either half of
the jobs, and join those that fill such rows exactly (Horowitz and Sahni, 1974, for knapsacks).

Of the ways of a half with the same usage, only the one of least loss is kept. This leaves few,
since GPU counts are round numbers. If there are any such choices, the best is optimal; if there are
none, the bound falls. The amount is raised until there is one, the gap is met, or there are too
many ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.problem import Problem
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.fixing import column_losses
from tessera.solvers.kernels.core import enumerate_changes, join_halves, usage_keys
from tessera.solvers.prices import PricedProblem

MOST_WAYS: Final = 50_000
"""Maximum number of ways of a half; together with joining them, that takes some 20 ms."""
MOST_CHANGES: Final = 400
"""Maximum number of changes; with more changes, there are too many ways."""
MOST_PAIRS: Final = 200_000
LOSS_GROWTH_FACTOR: Final = 1.5
_FACTOR: Final = 0x9E3779B97F4A7C15
"""An odd number whose multiples spread over 64 bits; the factors of rows are its powers."""


def close_gap(
    problem: Problem, priced: PricedProblem, value: float, gap: float
) -> tuple[Ints | None, float]:
    """Return a choice of a higher value than ``value``, int64[jobs], or None, and a bound.

    If there is a choice, it is optimal, and the bound is its value.
    """
    total, slack = priced.total, priced.slack
    short = total - value
    enough = gap * max(abs(priced.bound), 1.0)
    most, bound = max(0.5 * enough, short / 16.0, 1.0), priced.bound
    if len(problem.idle_row) or not math.isfinite(short):
        return None, bound
    every = _changes(problem, priced, short + 4.0 * slack)
    while True:
        most = min(most, short)
        least = _least(problem, priced, every, most + 4.0 * slack)
        if least is None:
            return None, bound
        choice, loss = least
        if choice is not None:
            return choice, float(math.floor(total - loss + 4.0 * slack))
        bound = max(float(math.floor(total - most + 4.0 * slack)), value)
        if bound - value <= enough or most >= short:
            return None, bound
        most *= LOSS_GROWTH_FACTOR


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Changes:
    """The alternatives to the best choices, sorted by job.

    They have int64 job and column, which is -1 for waiting, and float64 loss.
    """

    job: Ints
    column: Ints
    loss: Floats

    def those(self, which: Bools) -> _Changes:
        return _Changes(job=self.job[which], column=self.column[which], loss=self.loss[which])


def _changes(problem: Problem, priced: PricedProblem, allowed: float) -> _Changes:
    """Return all changes that lose at most ``allowed``."""
    lost, job = column_losses(problem, priced), problem.column_job
    own = np.flatnonzero((lost <= allowed) & (np.arange(len(job)) != priced.choice[job]))
    idle = np.flatnonzero((priced.choice >= 0) & ~problem.must_run & (priced.best <= allowed))
    jobs = np.append(job[own], idle)
    order = np.argsort(jobs, kind="stable")
    return _Changes(
        job=jobs[order],
        column=np.append(own, np.full(len(idle), -1))[order],
        loss=np.append(lost[own], priced.best[idle])[order],
    )


def _least(
    problem: Problem, priced: PricedProblem, every: _Changes, allowed: float
) -> tuple[Ints | None, float] | None:
    """Return the choice of least loss, or None if none loses at most ``allowed``, and its loss.

    Return None instead of the pair if there are too many ways.
    """
    few = every.those(every.loss <= allowed)
    if len(few.job) > MOST_CHANGES:
        return None
    more = _use(problem, few.column) - _use(problem, priced.choice[few.job])
    free = problem.capacity - problem.used(priced.choice)
    half = np.unique(few.job, return_inverse=True)[1] % 2 == 0
    factor = np.array([pow(_FACTOR, r + 1, 2**64) for r in range(len(free))], dtype=np.uint64)
    left = _ways(few.those(half), more[half], factor.view(np.int64), allowed)
    right = _ways(few.those(~half), more[~half], factor.view(np.int64), allowed)
    if left is None or right is None:
        return None
    tight = np.where(priced.prices > allowed, factor.view(np.int64), 0)
    key, rest = usage_keys(left.used, tight), usage_keys(right.used, tight)
    rank = np.lexsort((right.loss, rest))
    with np.errstate(over="ignore"):
        wanted = int((free * tight).sum())
    least, first, second = join_halves(
        (key, left.loss, left.used),
        (rest[rank], right.loss[rank], right.used[rank]),
        free,
        wanted,
        priced.prices,
        allowed,
        MOST_PAIRS,
    )
    if first == -2:
        return None
    if first < 0:
        return None, 0.0
    choice = priced.choice.copy()
    for ways, at, side in ((left, first, half), (right, int(rank[second]), ~half)):
        picked = ways.picked(at)
        side_changes = few.those(side)
        choice[side_changes.job[picked]] = side_changes.column[picked]
    return choice, least


def _use(problem: Problem, column: Ints) -> Ints:
    """Return the use of each row by each of ``column``, int64[columns, rows]. -1 is waiting."""
    out = np.zeros((len(column), len(problem.rows)), np.int64)
    some = np.flatnonzero(column >= 0)
    first = problem.usage_start[column[some]]
    count = problem.usage_start[column[some] + 1] - first
    for k in range(int(count.max(initial=0))):
        has = count > k
        entry = first[has] + k
        out[some[has], problem.row[entry]] = problem.amount[entry]
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ways:
    """Ways to change choices: the loss of each and its additional usage of rows.

    The last three arrays lead to the changes of a way.
    """

    loss: Floats
    used: Ints
    alive: Ints
    parent: Ints
    column: Ints

    def picked(self, way: int) -> list[int]:
        columns: list[int] = []
        at = int(self.alive[way])
        while at > 0:
            columns.append(int(self.column[at]))
            at = int(self.parent[at])
        return columns


def _ways(few: _Changes, more: Ints, factor: Ints, allowed: float) -> _Ways | None:
    """Return the least loss of all ways to take some changes, one for each usage.

    Return None if there are too many ways.
    """
    start = np.append(np.flatnonzero(np.diff(few.job, prepend=-1)), len(few.job))
    total, used = np.empty(MOST_WAYS), np.empty((MOST_WAYS, more.shape[1]), np.int64)
    parent, column = np.empty(MOST_WAYS, np.int64), np.empty(MOST_WAYS, np.int64)
    alive = np.empty(MOST_WAYS, np.int64)
    table = np.full(1 << (2 * MOST_WAYS - 1).bit_length(), -1)
    count, living = enumerate_changes(
        start, few.loss, more, factor, allowed, total, used, parent, column, alive, table
    )
    if count < 0:
        return None
    kept = alive[:living]
    return _Ways(loss=total[kept], used=used[kept], alive=kept, parent=parent, column=column)
