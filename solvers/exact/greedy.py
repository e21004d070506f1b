"""Greedy multiple-choice knapsack; its loops are compiled.

It repeatedly takes the step with the highest gain in value per unit of capacity.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import MAX_TOTAL, Problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import (
    find_unrunnable,
    make_solution,
    objective_of,
    trivial_bound,
    usable_hint,
    without_answer,
)
from tessera.solvers.exact.prices import PriceResult
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns
from tessera.solvers.kernels import greedy as loops
from tessera.solvers.kernels.jit import as_fixed_array

_NO_WATCH: Final = (
    as_fixed_array(np.zeros(0)),
    as_fixed_array(np.zeros(0, np.bool_)),
    as_fixed_array(np.zeros(0, np.int64)),
    math.inf,
)


class Greedy:
    """A solver that starts, upgrades and retypes jobs by marginal gain per share of the capacity.

    The size of a column is the sum over rows of amount / capacity. Each step starts a waiting job
    or moves a placed job to a better column. Of all steps that fit, the one with the largest (gain
    in value) / (gain in size) is taken. This is the greedy algorithm of the multiple-choice
    knapsack, whose steps climb the efficient frontier of each job. Ties go to the lower job, then
    to the lower column.

    The algorithm runs from three starts: the must-run jobs alone, what runs now, and the hint. The
    best answer is kept; of equal answers, the first. The budget does not limit it: it always
    terminates.
    """

    name = "greedy"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``; INFEASIBLE means that a must-run job fits nowhere even alone."""
        work = ((self.name, 1.0),)
        if problem.must_run.any() and len(find_unrunnable(problem)):
            return without_answer(
                problem, SolveStatus.INFEASIBLE, solver=self.name, seed=budget.seed, work=work
            )
        columns = _columns(problem, unit_shares(problem))
        best: Ints | None = None
        for start in _starts(problem, hint, columns):
            choice = _climbed(problem, start, columns)
            if best is None or objective_of(problem, choice) > objective_of(problem, best):
                best = choice
        if best is None:
            return without_answer(
                problem, SolveStatus.UNKNOWN, solver=self.name, seed=budget.seed, work=work
            )
        return make_solution(
            problem,
            best,
            bound=trivial_bound(problem),
            solver=self.name,
            seed=budget.seed,
            work=work,
        )


def find_better_choice(
    problem: Problem, known: Ints, shown: PriceResult, hint: Solution | None = None
) -> Ints | None:
    """Return greedy's choice if its value is higher than that of the answer ``known``, else None.

    Greedy never stops a job and never moves it to a column of less value. So once a job has a
    column, it ends on that column or on one of more value. If the best margin of these columns is
    below the job's best margin at the shadow prices, greedy has lost the difference for good. Its
    final answer is worth at most the Lagrangian bound less what all jobs have lost
    (``tessera.solvers.exact.fixing``). The run is given up as soon as that is less than the value of
    ``known``.
    """
    columns = _columns(problem, unit_shares(problem))
    value, better = objective_of(problem, known), None
    for start in _starts(problem, hint, columns):
        choice = np.array(start, dtype=np.int64)
        watch = (
            as_fixed_array(shown.prices),
            as_fixed_array(problem.must_run),
            as_fixed_array(shown.choice),
            shown.bound + 1.0 - value,
        )
        free = _free(problem, choice, columns)
        ended = loops.take_gaining_steps(columns, choice, free, _all_jobs(problem), watch)
        if ended and objective_of(problem, choice) > value:
            value, better = objective_of(problem, choice), choice
    return better


def unit_shares(problem: Problem) -> Floats:
    """Return the share of its row that one unit is, float64[rows]; 0 if the row has no capacity."""
    capacity = problem.capacity.astype(np.float64)
    return np.divide(1.0, capacity, out=np.zeros_like(capacity), where=capacity > 0)


def improve_choice(problem: Problem, start: Ints, weight: Floats) -> Ints:
    """Return ``start`` after every step that gains, the best gain per size first, int64[jobs].

    ``start`` must be feasible. ``weight`` (float64[rows]) is the size of a unit of each row: its
    share of the capacity, or its shadow price. No step lowers the objective, and no job stops.
    """
    _require_own(problem, start)
    return _climbed(problem, start, _columns(problem, weight))


def pack_must_run(problem: Problem, weight: Floats, *, stay: bool = False) -> Ints | None:
    """Return a choice that runs just the must-run jobs, largest first, or None if none is found.

    With ``stay``, each job takes its current column if that fits. Otherwise it takes its smallest
    column that fits. If this fails, each job takes the column that uses the smallest share of what
    is still free.
    """
    return _packed(problem, _columns(problem, weight), stay=stay)


def repair_choice(
    problem: Problem, choice: Ints, prices: Floats, among: Ints | None = None
) -> Ints | None:
    """Return a feasible choice near ``choice``, int64[jobs], or None if must-run jobs find no room.

    ``choice`` has a column of its own or -1 for each job, and may overfill rows, for example with
    the best columns at ``prices``. ``prices`` is float64[rows]; negative and non-finite ones count
    as 0. A must-run job without a column takes its best one at the prices.

    As long as a row is overfull, one job moves or stops: the one that loses least (value less cost
    at the prices) per share of the overfull rows that it gives up. Must-run jobs are never stopped,
    and make room among themselves first. Then every step that gains is taken, by gain per cost. The
    function always terminates.

    Waiting must use no row; ``tessera.solvers.exact.waiting_columns`` ensures that. If ``among``
    (rising jobs) is given, only these jobs move or step at the end. None is then also returned if
    they could not make enough room.
    """
    _require_own(problem, choice)
    prices = np.clip(np.where(np.isfinite(prices), prices, 0.0), 0.0, MAX_TOTAL)
    out = np.array(choice, dtype=np.int64)
    must = as_fixed_array(problem.must_run)
    columns = _columns(problem, prices, None if must.any() else among)
    if must.any():
        packed = _must_run_repaired(problem, np.where(must, out, -1), columns)
        if packed is None:
            return None
        out = np.where(must, packed, out)
    free = _free(problem, out, columns)
    movers = _all_jobs(problem) if among is None else as_fixed_array(among)
    if not loops.relieve_rows(columns, _shares_or_units(problem), must, out, free, movers):
        return None
    if not prices.any():
        columns = _columns(problem, unit_shares(problem))
    loops.take_gaining_steps(columns, out, free, movers, _NO_WATCH)
    return out


def _must_run_repaired(problem: Problem, choice: Ints, columns: loops.Columns) -> Ints | None:
    """Return a column for each must-run job such that all fit, or None if none are found."""
    must = as_fixed_array(problem.must_run)
    loops.start_missing(columns, must, choice)
    if np.any(must & (choice < 0)):
        return None
    free = _free(problem, choice, columns)
    if loops.relieve_rows(
        columns, _shares_or_units(problem), must, choice, free, _all_jobs(problem)
    ):
        return choice
    return pack_must_run(problem, unit_shares(problem))


def _shares_or_units(problem: Problem) -> Floats:
    """Return the share of its row that a unit is, or 1 if the row has no capacity: never 0."""
    return as_fixed_array(1.0 / np.maximum(problem.capacity, 1))


def _require_own(problem: Problem, choice: Ints) -> None:
    """Refuse indices with which the compiled loops, which check none, would leave their arrays."""
    if len(choice) != len(problem.jobs):
        raise InvalidInput("choice", f"has {len(choice)} entries, not {len(problem.jobs)}")
    own = (choice >= problem.job_start[:-1]) & (choice < problem.job_start[1:])
    if not np.all(own | (choice == -1)):
        raise InvalidInput("choice", "must name a column of its own for each job, or -1")


def _columns(problem: Problem, weight: Floats, among: Ints | None = None) -> loops.Columns:
    """Return the columns of ``problem`` as the loops read them, with sizes by ``weight``.

    If ``among`` is given, only the columns of these jobs have a size.
    """
    if len(weight) != len(problem.rows):
        raise InvalidInput("weight", f"has {len(weight)} entries, not {len(problem.rows)}")
    job_start, usage_start, row, amount = (
        as_fixed_array(array)
        for array in (problem.job_start, problem.usage_start, problem.row, problem.amount)
    )
    jobs = _all_jobs(problem) if among is None else as_fixed_array(among)
    weight = as_fixed_array(weight.astype(np.float64))
    size = loops.column_sizes(job_start, usage_start, row, amount, weight, jobs)
    return job_start, as_fixed_array(problem.value), usage_start, row, amount, as_fixed_array(size)


def _free(problem: Problem, choice: Ints, columns: loops.Columns) -> Ints:
    """Return the free part of each row under ``choice``, int64[rows]; negative if it is overfull."""
    free = problem.capacity
    loops.occupy_rows(columns, choice, free)
    waits = (choice < 0)[problem.idle_job] if len(problem.idle_row) else np.zeros(0, np.bool_)
    np.subtract.at(free, problem.idle_row[waits], problem.idle_amount[waits])
    return free


def _climbed(problem: Problem, start: Ints, columns: loops.Columns) -> Ints:
    choice = np.array(start, dtype=np.int64)
    free = _free(problem, choice, columns)
    loops.take_gaining_steps(columns, choice, free, _all_jobs(problem), _NO_WATCH)
    return choice


def _all_jobs(problem: Problem) -> Ints:
    return as_fixed_array(np.arange(len(problem.jobs)))


def _starts(problem: Problem, hint: Solution | None, columns: loops.Columns) -> list[Ints]:
    """Return the distinct starts: the must-run jobs alone, what runs now, and the hint."""
    packed = _packed(problem, columns, stay=False)
    staying = _packed(problem, columns, stay=True)
    candidates = [packed, _kept(problem, staying, columns), usable_hint(problem, hint)]
    if packed is None:
        candidates.append(staying)
    starts: list[Ints] = []
    for start in candidates:
        if start is not None and not any(np.array_equal(start, other) for other in starts):
            starts.append(start)
    return starts


def _packed(problem: Problem, columns: loops.Columns, *, stay: bool) -> Ints | None:
    must = np.flatnonzero(problem.must_run)
    if not len(must):
        return np.full(len(problem.jobs), -1)
    size = loops.smallest_sizes(columns[0], columns[-1])[must]
    order = must[np.argsort(-size, kind="stable")]
    current = problem.current if stay else np.full(len(problem.jobs), -1)
    for balance in (False, True):
        choice = np.full(len(problem.jobs), -1)
        free = _free(problem, choice, columns)
        if loops.pack_jobs(
            columns, as_fixed_array(order), as_fixed_array(current), balance, choice, free
        ):
            return choice
    return None


def _kept(problem: Problem, staying: Ints | None, columns: loops.Columns) -> Ints | None:
    """Return ``staying`` with as many of the other running jobs as fit, densest first."""
    if staying is None:
        return None
    whole = np.where(staying >= 0, staying, problem.current)
    if not np.any(_free(problem, whole, columns) < 0):
        return whole
    running = np.flatnonzero((problem.current >= 0) & ~problem.must_run)
    column = problem.current[running]
    size = columns[-1]
    density = problem.value[column] / np.maximum(size[column], loops.FREE_STEP)
    order = running[np.argsort(-density, kind="stable")]
    choice = staying.copy()
    free = _free(problem, choice, columns)
    loops.keep_columns(
        columns, as_fixed_array(order), as_fixed_array(problem.current), choice, free
    )
    return choice
