"""Reasons for jobs that had columns and were not chosen.

They compare the value of a job's best offer with its cost at the round's shadow prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.base.texts import Name, Text, fill, join
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.goals import WEIGHTED_SUM
from tessera.formulation.round.problem import CouplingRow, Problem, RowKind, reduce_by_job

_NO_WEIGHT: Final = Reason(
    code=ReasonCode.NO_WEIGHT,
    message="the job's weight, times its tenant's and its priority's, is 0, so it has no value",
    next_step="give the job, its tenant and its priority a positive weight",
)
_NOT_WORTH_RESTART: Final = Reason(
    code=ReasonCode.NOT_WORTH_RESTART,
    message="starting the job would cost as much as it could gain before it ends",
    next_step="lower the job's restart seconds",  # its weight counts for both
)
_NO_PRICES: Final = Reason(
    code=ReasonCode.BUDGET_SPENT,
    message="the round ran out of time before shadow prices were known; other jobs had higher values",
    next_step="give the round a longer deadline",
)

_LIMITS: Final[dict[RowKind, tuple[ReasonCode, str, str, str]]] = {
    RowKind.QUOTA: (
        ReasonCode.QUOTA_SPENT,
        "the quota of {what} for guaranteed jobs is {capacity} GPUs, of which {free} are left, but the"
        " job would be charged {amount}",
        "wait for a guaranteed job of the tenant to end, ",
        "raise the quota, or submit the job as best effort",
    ),
    RowKind.HELD: (
        ReasonCode.QUOTA_SPENT,
        "{what} may hold {capacity} GPUs (its quota and what it may borrow), of which {free} are left,"
        " but the job needs {amount}",
        "wait for a job of the tenant to end, or ",
        "let the tenant borrow more",
    ),
    RowKind.KEPT: (
        ReasonCode.QUOTA_SPENT,
        "{what} does not lend its quota: other tenants may hold {capacity} GPUs, of which {free} are left,"
        " but the job needs {amount}",
        "wait for a job of another tenant to end, or ",
        "let the quota be lent",
    ),
    RowKind.WINDOW: (
        ReasonCode.HELD_FOR_RESERVATION,
        "the reservation {what} leaves {capacity} GPUs to other jobs, of which {free} are left, but the"
        " job needs {amount}",
        "wait for another job to end, ",
        "wait for the reservation to end, or entitle the job to it",
    ),
    RowKind.RESERVED: (
        ReasonCode.RESERVED,
        "the planned starts of other jobs leave {capacity} x {what}, of which {free} are left, but the job"
        " needs {amount}",
        "wait for another job to end, or ",
        "add Cells on which the job ends before these starts",
    ),
}
"""Kind of row -> the reason if that row is what holds a job back: code, message and two next steps.

The first step frees what others have of the row. It helps only a job that the whole row has room for.
"""


def explain_unchosen(problem: Problem, solution: Solution, jobs: Ints) -> dict[int, Reason]:
    """Return a reason for each of ``jobs`` (int64[jobs], rising).

    These are jobs that have columns but were not chosen.
    """
    if not len(jobs):
        return {}
    offers = _best_offers(problem, solution, jobs)
    market = _Market(problem, solution)
    limits = _limits(problem, solution, market.free)
    gross = problem.value[offers.column] + problem.restart_price[offers.column]
    reasons: dict[int, Reason] = {}
    for job, column, weight, value, cost, costs_only in zip(
        jobs.tolist(),
        offers.column.tolist(),
        problem.weight[jobs].tolist(),
        offers.value.tolist(),
        offers.cost.tolist(),
        (gross < 0).tolist(),
        strict=True,
    ):
        limited = limits and weight > 0 and limits.reason(job, column, pays=value > cost)
        if weight <= 0:
            reasons[job] = _NO_WEIGHT
        elif limited:
            reasons[job] = limited
        elif costs_only:
            reasons[job] = _only_costs(problem, market.use(column), value)
        elif value <= 0:
            reasons[job] = _NOT_WORTH_RESTART
        elif not len(solution.prices):
            reasons[job] = _NO_PRICES
        else:
            reasons[job] = _by_prices(market.use(column), market.spent, value, cost)
    return reasons


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Offers:
    """The best offers of some jobs: for each, the column with the most value for its cost.

    If no column of a job has a positive value, it is the one that loses least. Among equal columns,
    it is the first.
    """

    column: Ints  # int64[some jobs]
    value: Floats  # float64[some jobs], units of the objective
    cost: Floats  # float64[some jobs], units of the objective


def _best_offers(problem: Problem, solution: Solution, jobs: Ints) -> _Offers:
    known = len(solution.prices) > 0
    cost = problem.cost(solution.prices) if known else np.zeros(len(problem.cell))
    first = problem.job_start[jobs]
    count = problem.job_start[jobs + 1] - first
    own = concatenate_ranges(first, count)
    value = problem.value[own]
    ratio = np.where(value > 0, value / np.maximum(cost[own], 1e-9), value)
    owner = np.repeat(np.arange(len(jobs)), count)
    best = reduce_by_job(np.maximum, ratio, np.append(0, np.cumsum(count)))
    top = np.flatnonzero(ratio == best[owner])[::-1]
    column = np.zeros(len(jobs), dtype=np.int64)
    column[owner[top]] = own[top]  # the first of each job is written last
    return _Offers(
        column=column,
        value=problem.value[column] / problem.scale,
        cost=cost[column] / problem.scale,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """The use of rows by an offer, in words."""

    amount: Text  # e.g. "2 x a40"
    short: Text  # the rows with too little left; empty if the offer would fit
    free: tuple[tuple[Text, str], ...]  # evidence: the free amount of each row that it uses


_AMOUNTS: Final[dict[RowKind, str]] = {
    RowKind.GPUS: "{amount} x {what}",
    RowKind.CPUS: "{amount} CPU cores of {what} nodes",
    RowKind.HOST_MEMORY: "{amount} MiB of host memory of {what} nodes",
    RowKind.SELECTED: "{amount} x {what}",
    RowKind.CHANGES: "{amount} of the changes that the round may make",
    RowKind.PACKING: "{amount} of the room on nodes ({what})",
}
"""Kind of row -> an amount of it in words. Other kinds are called by the row's name."""


def _subject_of(row: CouplingRow) -> Text:
    """Return the subject of a row, which is a name if it is a tenant."""
    return Name(row.subject, row.tenant) if row.tenant else row.subject


def _name_of(row: CouplingRow) -> Text:
    """Return the name of a row, e.g. ``quota/research``."""
    return join("/", (row.kind, _subject_of(row))) if row.tenant else row.name


def _amount_of(row: CouplingRow, amount: int) -> Text:
    """Return the use of a row in words, e.g. ``2 x a40``."""
    if row.kind not in _AMOUNTS:
        return fill("{amount} of {row}", amount=amount, row=_name_of(row))
    return _AMOUNTS[row.kind].format(amount=amount, what=row.subject)


def _shortage_of(row: CouplingRow, left: int) -> Text:
    """Return in words how much of a row the chosen jobs have left."""
    if row.kind in (RowKind.GPUS, RowKind.SELECTED):
        name, _, selected = row.subject.partition(" ")
        gpus = f"{name} GPUs {selected}".rstrip()
        taken = "are taken by jobs of higher value"
        if left <= 0:
            return f"all {gpus} {taken}"
        return f"all but {left} of the {row.capacity} {gpus} {taken}"
    return fill("only {amount} are left", amount=_amount_of(row, max(left, 0)))


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
                f"the round has made all {row.capacity} changes of running jobs that it may make"
                for row, free in zip(problem.rows, self.free, strict=True)
                if row.kind is RowKind.CHANGES and free <= 0
            ),
            "",
        )

    def use(self, column: int) -> _Use:
        """Return the use of rows by ``column``."""
        first, end = self._start[column], self._start[column + 1]
        key = tuple(self._row[first:end]), tuple(self._amount[first:end])
        use = self._uses.get(key)
        if use is None:
            taken = [
                (self._problem.rows[r], amount, self.free[r])
                for r, amount in zip(*key, strict=True)
            ]
            use = self._uses[key] = _Use(
                amount=join(" + ", [_amount_of(row, amount) for row, amount, _ in taken]),
                short=join(
                    " and ",
                    [_shortage_of(row, left) for row, amount, left in taken if amount > left],
                ),
                free=tuple(
                    (fill("free {row}", row=_name_of(row)), str(left)) for row, _, left in taken
                ),
            )
        return use


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

        It does so if no column of the job finds room in such a row. It also does so if the best
        offer, ``column``, is not worth its price, and such a row is the largest part of that price.
        """
        problem, prices = self.problem, self.prices
        entry = int(self.stopped[job])
        if entry >= 0:
            return self._by(job, int(problem.row[entry]), int(problem.amount[entry]))
        if not len(prices) or pays:
            return None
        use = problem.usage_of(column)
        row = max(use, key=lambda r: (prices[r] * use[r], -r))
        return self._by(job, row, use[row]) if prices[row] > 0 and self.is_limit[row] else None

    def _by(self, job: int, row: int, amount: int) -> Reason:
        limit, free = self.problem.rows[row], self.free[row]
        code, message, once_free, next_step = _LIMITS[limit.kind]
        least = min(
            self.problem.usage_of(column).get(row, 0) for column in self.problem.columns_of(job)
        )
        subject = _subject_of(limit)
        if limit.kind is RowKind.RESERVED:  # planned starts of a type have several rows
            subject = limit.subject.partition("/")[0]
        return Reason(
            code=code,
            next_step=(once_free if least <= limit.capacity else "") + next_step,
            message=fill(
                message,
                what=subject,
                capacity=limit.capacity,
                free=free,
                amount=amount,
            ),
            evidence=(
                ("row", _name_of(limit)),
                ("capacity", str(limit.capacity)),
                ("free", str(free)),
                ("needs", str(amount)),
            ),
        )


def _limits(problem: Problem, solution: Solution, free: list[int]) -> _Limits | None:
    """Return the limits of the round, or None if it has no limits."""
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
    first_entry = np.full(len(problem.jobs), -1, dtype=np.int64)
    entry = np.flatnonzero(limit[problem.row] & (problem.amount > free[problem.row]))
    column = problem.usage_column[entry]
    stopped = np.zeros(len(problem.cell))
    stopped[column] = 1.0
    first_entry[problem.column_job[column[::-1]]] = entry[::-1]  # the first of each job
    return np.where(reduce_by_job(np.minimum, stopped, problem.job_start) > 0, first_entry, -1)


def _by_prices(use: _Use, spent: str, value: float, cost: float) -> Reason:
    """Explain a job whose best offer has a positive value, by its cost at the shadow prices."""
    prices = {"offer": use.amount, "value": value, "price": cost}
    evidence = (
        ("offer", use.amount),
        ("value", f"{value:.6f}"),
        ("price", f"{cost:.6f}"),
        *use.free,
    )
    if value <= cost:
        return Reason(
            code=ReasonCode.OUTPRICED,
            message=fill(
                "the job's best offer, {offer}, is worth {value:.3f}, but its price in this round is"
                " {price:.3f}",
                **prices,
            ),
            next_step="wait for demand to fall, raise the job's weight, or add Cells that use GPUs better",
            evidence=evidence,
        )
    if not use.short:
        return Reason(
            code=ReasonCode.BUDGET_SPENT,
            message=fill(
                "{offer} is worth more ({value:.3f}) than its price ({price:.3f}), but the round reached"
                " its gap or its time limit before it chose the job",
                **prices,
            ),
            next_step="give the round a longer deadline or a smaller gap",
            evidence=evidence,
        )
    return Reason(
        code=ReasonCode.NO_CAPACITY,
        message=fill(
            "{offer} is worth more ({value:.3f}) than its price ({price:.3f}), but {short}",
            **prices,
            short=join(", and ", (use.short, spent) if spent else (use.short,)),
        ),
        next_step="wait for a job to end, or add Cells with fewer GPUs",
        evidence=evidence,
    )


def _only_costs(problem: Problem, use: _Use, value: float) -> Reason:
    """Explain a job that the last goal counts as a loss.

    Either GPUs were short, or the job is not worth its cost.
    """
    evidence = (("offer", use.amount), ("value", f"{value:.6f}"), ("unit", problem.unit))
    if use.short and problem.unit != WEIGHTED_SUM:
        return Reason(
            code=ReasonCode.NO_CAPACITY,
            message=fill(
                "the job's cheapest offer, {offer}, does not fit next to the jobs that run: {short}",
                offer=use.amount,
                short=use.short,
            ),
            next_step="wait for a job to end, raise the job's weight, or add Cells with fewer GPUs",
            evidence=evidence,
        )
    return Reason(
        code=ReasonCode.OUTPRICED,
        message=fill(
            "the job's best offer, {offer}, costs more than its value in the objective",
            offer=use.amount,
        ),
        next_step="raise the job's weight, or give cost less weight in the objective",
        evidence=evidence,
    )
