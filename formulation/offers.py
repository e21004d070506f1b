"""Reasons for jobs that had columns and were not chosen.

They compare the value of a job's best offer with its cost at the round's shadow prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.goals import WEIGHTED_SUM
from tessera.formulation.problem import Problem, RowKind, jobwise
from tessera.formulation.reasons import Reason, ReasonCode
from tessera.formulation.solution import Solution
from tessera.formulation.tables import Bools, Floats, Ints, ranges

_NO_WEIGHT: Final = Reason(
    code=ReasonCode.NO_WEIGHT,
    message="its weight, with its tenant's and its queue's, is 0, so running it is worth nothing",
    next_step="give the job, its tenant and its queue a positive weight",
)
_NOT_WORTH_RESTART: Final = Reason(
    code=ReasonCode.NOT_WORTH_RESTART,
    message="starting it would cost as much as it could win before it ends",
    next_step="lower its restart seconds, or raise its weight",
)
_NO_PRICES: Final = Reason(
    code=ReasonCode.BUDGET_SPENT,
    message="the round's time ran out before prices were known; others were worth more",
    next_step="give the round a longer deadline",
)

_LIMITS: Final[dict[RowKind, tuple[ReasonCode, str, str]]] = {
    RowKind.QUOTA: (
        ReasonCode.QUOTA_SPENT,
        "the quota of {what} for guaranteed jobs is {capacity} GPUs; {free} are left, and it is charged"
        " {amount}",
        "wait for a guaranteed job of the tenant to end, raise the quota, or run it as best effort",
    ),
    RowKind.HELD: (
        ReasonCode.QUOTA_SPENT,
        "{what} may hold {capacity} GPUs, its quota and what it may borrow; {free} are left, and it needs"
        " {amount}",
        "wait for a job of the tenant to end, or let the tenant borrow more",
    ),
    RowKind.KEPT: (
        ReasonCode.QUOTA_SPENT,
        "the quota of {what} is not lent: others may hold {capacity} GPUs; {free} are left, and it needs"
        " {amount}",
        "wait for a job of another tenant to end, or let the quota be lent",
    ),
    RowKind.RESERVED: (
        ReasonCode.RESERVED,
        "GPUs are reserved for {what}, which has waited long: others may hold {capacity} beyond its start;"
        " {free} are left, and it needs {amount}",
        "wait for that job to start, or add Cells on which this one ends before",
    ),
}
"""Kind of row -> the reason if that row is what holds a job back."""


def lost_out(problem: Problem, solution: Solution, jobs: Ints) -> dict[int, Reason]:
    """Return a reason for each of ``jobs`` (int64[jobs], rising).

    These are jobs that have columns but were not chosen.
    """
    if not len(jobs):
        return {}
    offers = _best_offers(problem, solution, jobs)
    market = _Market(problem, solution)
    limits = _limits(problem, solution, market.free)
    gross = problem.value[offers.column] + problem.restart_price[offers.column]
    found: dict[int, Reason] = {}
    for job, column, weight, worth, cost, costs_only in zip(
        jobs.tolist(),
        offers.column.tolist(),
        problem.weight[jobs].tolist(),
        offers.worth.tolist(),
        offers.cost.tolist(),
        (gross < 0).tolist(),
        strict=True,
    ):
        limited = limits and weight > 0 and limits.reason(job, column, pays=worth > cost)
        if weight <= 0:
            found[job] = _NO_WEIGHT
        elif limited:
            found[job] = limited
        elif costs_only:
            found[job] = _only_costs(problem, market.use(column), worth)
        elif worth <= 0:
            found[job] = _NOT_WORTH_RESTART
        elif not len(solution.prices):
            found[job] = _NO_PRICES
        else:
            found[job] = _by_prices(market.use(column), market.spent, worth, cost)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Offers:
    """The best offers of some jobs: for each, the column with the most value for its cost.

    If no column of a job has a positive value, it is the one that loses least. Of equals it is the
    first.
    """

    column: Ints  # int64[some jobs]
    worth: Floats  # float64[some jobs], units of the objective
    cost: Floats  # float64[some jobs], units of the objective


def _best_offers(problem: Problem, solution: Solution, jobs: Ints) -> _Offers:
    known = len(solution.prices) > 0
    cost = problem.cost(solution.prices) if known else np.zeros(len(problem.cell))
    first = problem.job_start[jobs]
    count = problem.job_start[jobs + 1] - first
    mine = ranges(first, count)
    value = problem.value[mine]
    ratio = np.where(value > 0, value / np.maximum(cost[mine], 1e-9), value)
    owner = np.repeat(np.arange(len(jobs)), count)
    best = jobwise(np.maximum, ratio, np.append(0, np.cumsum(count)))
    top = np.flatnonzero(ratio == best[owner])[::-1]
    column = np.zeros(len(jobs), dtype=np.int64)
    column[owner[top]] = mine[top]  # the first of each job is written last
    return _Offers(
        column=column,
        worth=problem.value[column] / problem.scale,
        cost=cost[column] / problem.scale,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """The use of rows by an offer, in words."""

    what: str
    short: str  # the rows with too little free; empty if there are none
    free: tuple[tuple[str, str], ...]  # evidence: the free amount of each row that it uses


class _Market:
    """The rows once the round is decided. Offers with the same use of them share their texts."""

    def __init__(self, problem: Problem, solution: Solution) -> None:
        self._problem = problem
        self.free: list[int] = (problem.capacity - problem.used(solution.choice)).tolist()
        self._uses: dict[tuple[tuple[int, ...], tuple[int, ...]], _Use] = {}
        self._start, self._row = problem.usage_start.data, problem.row.data
        self._amount = problem.amount.data
        self.spent = next(
            (
                f"all {row.capacity} changes of running jobs that the round may make are spent"
                for row, free in zip(problem.rows, self.free, strict=True)
                if row.kind is RowKind.CHANGES and free <= 0
            ),
            "",
        )

    def use(self, column: int) -> _Use:
        """Return the use of rows by ``column``."""
        first, end = self._start[column], self._start[column + 1]
        key = tuple(self._row[first:end]), tuple(self._amount[first:end])
        found = self._uses.get(key)
        if found is None:
            taken = [
                (self._problem.rows[r].name, amount, self.free[r])
                for r, amount in zip(*key, strict=True)
            ]
            found = self._uses[key] = _Use(
                what=" + ".join(f"{amount} of {name}" for name, amount, _ in taken),
                short="; ".join(
                    f"{name} has {left} free" for name, amount, left in taken if amount > left
                ),
                free=tuple((f"free {name}", str(left)) for name, _, left in taken),
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Limits:
    """The rows of quotas and reservations, and the jobs that they hold back."""

    problem: Problem
    prices: Floats
    free: list[int]
    is_limit: Bools  # bool[rows]
    stopped: Ints  # int64[jobs], see _stopped

    def reason(self, job: int, column: int, *, pays: bool) -> Reason | None:
        """Return the reason if a quota or a reservation holds the job back, else None.

        It does if no column of the job finds room in such a row. It also does if the best offer,
        ``column``, does not pay, and such a row is the largest part of its cost.
        """
        problem, prices = self.problem, self.prices
        entry = int(self.stopped[job])
        if entry >= 0:
            return self._by(int(problem.row[entry]), int(problem.amount[entry]))
        if not len(prices) or pays:
            return None
        use = problem.usage_of(column)
        row = max(use, key=lambda r: (prices[r] * use[r], -r))
        return self._by(row, use[row]) if prices[row] > 0 and self.is_limit[row] else None

    def _by(self, row: int, amount: int) -> Reason:
        limit, free = self.problem.rows[row], self.free[row]
        code, message, next_step = _LIMITS[limit.kind]
        return Reason(
            code=code,
            next_step=next_step,
            message=message.format(
                what=limit.subject, capacity=limit.capacity, free=free, amount=amount
            ),
            evidence=(
                ("row", limit.name),
                ("capacity", str(limit.capacity)),
                ("free", str(free)),
                ("needs", str(amount)),
            ),
        )


def _limits(problem: Problem, solution: Solution, free: list[int]) -> _Limits | None:
    """Return the limits of the round, or None if there are none."""
    limit = np.array([row.kind in _LIMITS for row in problem.rows], dtype=np.bool_)
    if not limit.any():
        return None
    return _Limits(
        problem=problem,
        prices=solution.prices,
        free=free,
        is_limit=limit,
        stopped=_stopped(problem, limit, np.array(free)),
    )


def _stopped(problem: Problem, limit: Bools, free: Ints) -> Ints:
    """Return the first usage entry by which limits stop all columns of a job, int64[jobs].

    It is -1 if limits do not stop them all.
    """
    found = np.full(len(problem.jobs), -1, dtype=np.int64)
    entry = np.flatnonzero(limit[problem.row] & (problem.amount > free[problem.row]))
    column = problem.usage_column[entry]
    stopped = np.zeros(len(problem.cell))
    stopped[column] = 1.0
    found[problem.column_job[column[::-1]]] = entry[::-1]  # the first of each job
    return np.where(jobwise(np.minimum, stopped, problem.job_start) > 0, found, -1)


def _by_prices(use: _Use, spent: str, worth: float, cost: float) -> Reason:
    """Explain a job whose best offer has a value, by its cost at the round's shadow prices."""
    what = use.what
    evidence = (
        ("offer", what),
        ("value", f"{worth:.6f}"),
        ("price", f"{cost:.6f}"),
        *use.free,
    )
    if worth <= cost:
        return Reason(
            code=ReasonCode.OUTPRICED,
            message=f"its best offer, {what}, is worth {worth:.3f}; at this round's prices it costs"
            f" {cost:.3f}",
            next_step="wait for demand to fall, raise its weight, or add Cells that use GPUs better",
            evidence=evidence,
        )
    if not use.short:
        return Reason(
            code=ReasonCode.BUDGET_SPENT,
            message=f"{what} would pay, but the round stopped at its gap or its time before it got there",
            next_step="give the round a longer deadline or a smaller gap",
            evidence=evidence,
        )
    short = f"{use.short}; {spent}" if spent else use.short
    return Reason(
        code=ReasonCode.NO_CAPACITY,
        message=f"{what} would pay ({worth:.3f} for {cost:.3f}), but does not fit beside better jobs:"
        f" {short}",
        next_step="wait for a job to end, or add Cells with fewer GPUs",
        evidence=evidence,
    )


def _only_costs(problem: Problem, use: _Use, worth: float) -> Reason:
    """Explain a job that the last goal counts as a loss.

    Either room was short, or the job is not worth its cost.
    """
    evidence = (("offer", use.what), ("value", f"{worth:.6f}"), ("unit", problem.unit))
    if use.short and problem.unit != WEIGHTED_SUM:
        return Reason(
            code=ReasonCode.NO_CAPACITY,
            message=f"its cheapest offer, {use.what}, does not fit beside the jobs that run: {use.short}",
            next_step="wait for a job to end, raise its weight, or add Cells with fewer GPUs",
            evidence=evidence,
        )
    return Reason(
        code=ReasonCode.OUTPRICED,
        message=f"its best offer, {use.what}, costs more than the objective counts it worth",
        next_step="raise its weight, or give cost less weight in the objective",
        evidence=evidence,
    )
