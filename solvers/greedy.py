"""Greedy: again and again the step that gains most per unit of what it takes. The loops are compiled."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.problem import MAX_TOTAL, Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.answers import (
    answer,
    cannot_run,
    objective_of,
    trivial_bound,
    usable_hint,
    without_answer,
)
from tessera.solvers.base import Budget
from tessera.solvers.kernels import greedy as loops
from tessera.solvers.kernels.jit import fixed
from tessera.solvers.prices import Shown
from tessera.solvers.waiting import spells_out_waiting

_UNWATCHED: Final = (
    fixed(np.zeros(0)),
    fixed(np.zeros(0, np.bool_)),
    fixed(np.zeros(0, np.int64)),
    math.inf,
)


class Greedy:
    """Starts, upgrades and retypes by marginal gain per share of the cluster's capacity.

    A column's size is the sum over rows of amount / capacity. Each step takes the largest
    (gain in value) / (gain in size) among all steps that fit, over starting a waiting job and
    changing a placed one to a better column: the greedy of the multiple-choice knapsack, whose steps
    climb each job's efficient frontier. Of equal steps that of the lower job, then of the lower column, is
    taken. It is run from the must-run jobs alone, from what runs now, and from the hint; the best answer
    is kept, of equals the first. The budget does not bind it: it always ends.
    """

    name = "greedy"

    @spells_out_waiting
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Answer ``problem``; INFEASIBLE only where a must-run job fits nowhere even alone."""
        work = ((self.name, 1.0),)
        if problem.must_run.any() and len(cannot_run(problem)):
            return without_answer(
                problem, SolveStatus.INFEASIBLE, solver=self.name, seed=budget.seed, work=work
            )
        columns = _columns(problem, shares(problem))
        best: Ints | None = None
        for start in _starts(problem, hint, columns):
            choice = _climbed(problem, start, columns)
            if best is None or objective_of(problem, choice) > objective_of(problem, best):
                best = choice
        if best is None:
            return without_answer(
                problem, SolveStatus.UNKNOWN, solver=self.name, seed=budget.seed, work=work
            )
        return answer(
            problem,
            best,
            bound=trivial_bound(problem),
            solver=self.name,
            seed=budget.seed,
            work=work,
        )


def outdoing(
    problem: Problem, known: Ints, shown: Shown, hint: Solution | None = None
) -> Ints | None:
    """Return greedy's choice for ``problem`` if it is worth more than the answer ``known``, else None.

    Greedy never stops a job nor takes a column of less value for it. So once it has taken a column, the
    job ends on that one or on one of more value, and what the best of these falls short of the job's best
    margin at prices is lost to greedy for good. Whatever it ends with is worth at most their bound less
    what all jobs have lost (``tessera.solvers.fixing``): it is given up as soon as that is less than
    ``known``.
    """
    columns = _columns(problem, shares(problem))
    worth, better = objective_of(problem, known), None
    for start in _starts(problem, hint, columns):
        choice = np.array(start, dtype=np.int64)
        watch = (
            fixed(shown.prices),
            fixed(problem.must_run),
            fixed(shown.choice),
            shown.bound + 1.0 - worth,
        )
        free = _free(problem, choice, columns)
        ended = loops.climb(columns, choice, free, _all_jobs(problem), watch)
        if ended and objective_of(problem, choice) > worth:
            worth, better = objective_of(problem, choice), choice
    return better


def shares(problem: Problem) -> Floats:
    """Return the share of its row that one unit is, float64[rows]; 0 where the row has no capacity."""
    capacity = problem.capacity.astype(np.float64)
    return np.divide(1.0, capacity, out=np.zeros_like(capacity), where=capacity > 0)


def improve(problem: Problem, start: Ints, weight: Floats) -> Ints:
    """Return ``start`` after every step that gains, best gain per size first, int64[jobs].

    ``start`` must be an answer; ``weight`` (float64[rows]) is what a unit of a row counts: its share of
    the capacity, or its price. No step lowers the objective, and no job stops.
    """
    _require_own(problem, start)
    return _climbed(problem, start, _columns(problem, weight))


def pack_must_run(problem: Problem, weight: Floats, *, stay: bool = False) -> Ints | None:
    """Return a choice that runs just the must-run jobs, largest first; None if this finds none.

    Each takes its current column if ``stay`` and it fits, else its smallest column that fits. Where
    that fails, each takes the column that uses the smallest share of what is still free.
    """
    return _packed(problem, _columns(problem, weight), stay=stay)


def repaired(
    problem: Problem, choice: Ints, prices: Floats, among: Ints | None = None
) -> Ints | None:
    """Return an answer near ``choice``, int64[jobs]; None: no room was found for the must-run jobs.

    ``choice`` (a column of its own or -1 for each job) may overfill rows, as the best columns at ``prices``
    (float64[rows]; negative and non-finite ones count as 0) do. A must-run job without a column takes
    its best one at the prices. As long as a row is overfull, the job moves or stops that loses least
    (value less cost at the prices) per share of the overfull rows that it gives up; must-run jobs only
    move, and make room among themselves first. Then every step that gains is taken, by gain per cost.
    Waiting must use nothing (``tessera.solvers.waiting`` sees to that). It always ends. With ``among``
    (rising jobs) only these move or step in the end; None then also means that they could not make enough
    room.
    """
    _require_own(problem, choice)
    prices = np.clip(np.where(np.isfinite(prices), prices, 0.0), 0.0, MAX_TOTAL)
    out = np.array(choice, dtype=np.int64)
    must = fixed(problem.must_run)
    columns = _columns(problem, prices, None if must.any() else among)
    if must.any():
        found = _must_run_repaired(problem, np.where(must, out, -1), columns)
        if found is None:
            return None
        out = np.where(must, found, out)
    free = _free(problem, out, columns)
    movers = _all_jobs(problem) if among is None else fixed(among)
    if not loops.relieve(columns, _shares_or_units(problem), must, out, free, movers):
        return None
    if not prices.any():
        columns = _columns(problem, shares(problem))
    loops.climb(columns, out, free, movers, _UNWATCHED)
    return out


def _must_run_repaired(problem: Problem, choice: Ints, columns: loops.Columns) -> Ints | None:
    """Return a column for each must-run job such that they fit by themselves; None: found none."""
    must = fixed(problem.must_run)
    loops.start_missing(columns, must, choice)
    if np.any(must & (choice < 0)):
        return None
    free = _free(problem, choice, columns)
    if loops.relieve(columns, _shares_or_units(problem), must, choice, free, _all_jobs(problem)):
        return choice
    return pack_must_run(problem, shares(problem))


def _shares_or_units(problem: Problem) -> Floats:
    """Return the share of its row that a unit is, or 1 where the row has no capacity: never 0."""
    return fixed(1.0 / np.maximum(problem.capacity, 1))


def _require_own(problem: Problem, choice: Ints) -> None:
    """Refuse what would make compiled loops, which check no index, read and write outside their arrays."""
    if len(choice) != len(problem.jobs):
        raise InvalidInput("choice", f"has {len(choice)} entries, not {len(problem.jobs)}")
    own = (choice >= problem.job_start[:-1]) & (choice < problem.job_start[1:])
    if not np.all(own | (choice == -1)):
        raise InvalidInput("choice", "must name a column of its own for each job, or -1")


def _columns(problem: Problem, weight: Floats, among: Ints | None = None) -> loops.Columns:
    """Return the columns of ``problem`` as the loops read them, their sizes by ``weight``.

    With ``among`` only the columns of these jobs have a size.
    """
    if len(weight) != len(problem.rows):
        raise InvalidInput("weight", f"has {len(weight)} entries, not {len(problem.rows)}")
    job_start, usage_start, row, amount = (
        fixed(array)
        for array in (problem.job_start, problem.usage_start, problem.row, problem.amount)
    )
    jobs = _all_jobs(problem) if among is None else fixed(among)
    weight = fixed(weight.astype(np.float64))
    size = loops.sizes(job_start, usage_start, row, amount, weight, jobs)
    return job_start, fixed(problem.value), usage_start, row, amount, fixed(size)


def _free(problem: Problem, choice: Ints, columns: loops.Columns) -> Ints:
    """Return what ``choice`` leaves of each row, int64[rows]; negative where it is overfull."""
    free = problem.capacity
    loops.occupy(columns, choice, free)
    waits = (choice < 0)[problem.idle_job] if len(problem.idle_row) else np.zeros(0, np.bool_)
    np.subtract.at(free, problem.idle_row[waits], problem.idle_amount[waits])
    return free


def _climbed(problem: Problem, start: Ints, columns: loops.Columns) -> Ints:
    choice = np.array(start, dtype=np.int64)
    free = _free(problem, choice, columns)
    loops.climb(columns, choice, free, _all_jobs(problem), _UNWATCHED)
    return choice


def _all_jobs(problem: Problem) -> Ints:
    return fixed(np.arange(len(problem.jobs)))


def _starts(problem: Problem, hint: Solution | None, columns: loops.Columns) -> list[Ints]:
    """Return the answers to improve on: must-run jobs alone, what runs now, the hint; none twice."""
    packed = _packed(problem, columns, stay=False)
    staying = _packed(problem, columns, stay=True)
    found = [packed, _kept(problem, staying, columns), usable_hint(problem, hint)]
    if packed is None:
        found.append(staying)
    starts: list[Ints] = []
    for start in found:
        if start is not None and not any(np.array_equal(start, other) for other in starts):
            starts.append(start)
    return starts


def _packed(problem: Problem, columns: loops.Columns, *, stay: bool) -> Ints | None:
    must = np.flatnonzero(problem.must_run)
    if not len(must):
        return np.full(len(problem.jobs), -1)
    size = loops.smallest(columns[0], columns[-1])[must]
    order = must[np.argsort(-size, kind="stable")]
    current = problem.current if stay else np.full(len(problem.jobs), -1)
    for balance in (False, True):
        choice = np.full(len(problem.jobs), -1)
        free = _free(problem, choice, columns)
        if loops.pack(columns, fixed(order), fixed(current), balance, choice, free):
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
    loops.keep(columns, fixed(order), fixed(problem.current), choice, free)
    return choice
