"""The linear relaxation by column generation: a true bound, shadow prices, and a rounded answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.problem import Problem, reduce_by_job
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.answers import (
    fits_alone,
    make_result,
    objective_of,
    trivial_bound,
    usable_hint,
)
from tessera.solvers.exact.greedy import Greedy, improve_choice, repair_choice, unit_shares
from tessera.solvers.exact.prices import PROVED_BY_PRICES, PricedProblem, price_problem
from tessera.solvers.exact.usage import usage_matrix, value_unit
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns
from tessera.solvers.sums import dot

_TOLERANCE = 1e-6
"""Margins that differ by less than this, in the LP's units, are equal (HiGHS works to 1e-7)."""
_MOST_ENTERING = 1000
"""Maximum number of jobs that may enter a column in one round, ties excepted.

The first prices are too low for most jobs."""
_MOST_MUST_RUN = 5000
"""Above this number, columns of must-run jobs enter on demand if an answer is known.

Up to it, all of them are present from the first round on."""
_CLOSE = 0.01
"""Column generation stops once the bound is this share of the wanted gap above the LP's optimum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RelaxationResult:
    """The result of the LP; ``x`` is float64[columns], 0 for columns that never entered."""

    status: SolveStatus  # OPTIMAL: solved; INFEASIBLE; UNKNOWN: no round was finished
    rounds: int
    x: Floats
    best: PricedProblem | None = None

    @property
    def prices(self) -> Floats:
        """Return the shadow prices of the best bound, float64[rows]; empty if there is no bound."""
        return np.zeros(0) if self.best is None else self.best.prices


class Relaxation:
    """A solver that solves (1) to (3) with 0 <= x <= 1 and rounds the result.

    The bound is recomputed from the duals (``tessera.solvers.exact.prices``), and never taken from the
    LP's floating-point optimum. The recorded work is the number of finished rounds of column
    generation.
    """

    name = "lp"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``, with shadow prices; without a usable hint, start from greedy's answer.

        If the time is over before the first round, the answer is the hint's, with the trivial bound
        and work 0.
        """
        start = usable_hint(problem, hint)
        if start is None:
            start = usable_hint(problem, Greedy().solve(problem, budget))
        relaxed = solve_relaxation(problem, budget, start)
        bound = trivial_bound(problem)
        if relaxed.best is not None:
            bound = min(bound, relaxed.best.bound)
        work = ((self.name, float(relaxed.rounds)),)
        choice = start
        if relaxed.status is SolveStatus.OPTIMAL:
            choice = round_solution(problem, relaxed, start)
        missing = relaxed.status is SolveStatus.INFEASIBLE
        return make_result(
            problem,
            choice,
            status=SolveStatus.INFEASIBLE if missing else SolveStatus.UNKNOWN,
            bound=bound,
            solver=self.name,
            prices=relaxed.prices,
            seed=budget.seed,
            work=work,
            proved_by="" if relaxed.best is None else PROVED_BY_PRICES,
        )


def solve_relaxation(problem: Problem, budget: Budget, start: Ints | None) -> RelaxationResult:
    """Solve the LP over a growing set of columns until no column's margin justifies its entry.

    Each round solves the LP over the columns so far and prices all columns with its duals. It then
    adds each job's best column if that beats what the job has. The Lagrangian bound is valid after
    any round, so if the loop is cut short, the bound is looser but still true. A round that is
    itself cut short does not count.
    """
    chosen = _first_columns(problem, start)
    unit = value_unit(problem)
    usage = usage_matrix(problem)
    best: PricedProblem | None = None
    x, rounds, most = np.zeros(len(problem.cell)), 0, budget.work.get(Relaxation.name, math.inf)
    while rounds < most and not budget.expired():
        budget.check()
        columns = np.flatnonzero(chosen)
        solved = _solve_over(problem, usage, columns, unit, budget.time_limit_s())
        if solved is SolveStatus.UNKNOWN:
            break
        rounds += 1
        if isinstance(solved, SolveStatus):
            return RelaxationResult(status=solved, rounds=rounds, x=x)
        part, prices = solved
        x = np.zeros(len(problem.cell))
        x[columns] = part
        priced = price_problem(problem, prices)
        if best is None or priced.total < best.total:
            best = priced
        entering = _entering(problem, priced, chosen, _TOLERANCE * unit)
        left = best.total - dot(part, problem.value[columns])
        if not entering.any() or left <= _CLOSE * budget.gap * abs(best.total):
            break
        chosen |= entering
    status = SolveStatus.OPTIMAL if rounds else SolveStatus.UNKNOWN
    return RelaxationResult(status=status, rounds=rounds, x=x, best=best)


def _first_columns(problem: Problem, start: Ints | None) -> Bools:
    """Return the columns of the first round, bool[columns].

    These are the start's columns, all columns of must-run jobs, and the densest columns that fill
    the cluster twice. Density is value per share of capacity, with one column for each job.

    With all columns of the must-run jobs present, an infeasible LP proves that these jobs do not
    fit. If ``start`` shows that they do and there are very many such columns, they enter on demand.
    (Rows that count waiting jobs make almost every job a must-run job.)
    """
    possible = fits_alone(problem)
    chosen = problem.must_run[problem.column_job] & possible
    if start is not None:
        if chosen.sum() > _MOST_MUST_RUN:
            chosen[:] = False
        chosen[start[start >= 0]] = True
    size = unit_shares(problem) @ usage_matrix(problem)
    density = np.where(possible, problem.value / np.maximum(size, 1e-9), -np.inf)
    top = reduce_by_job(np.maximum, density, problem.job_start)[problem.column_job]
    dense = np.flatnonzero(possible & (problem.value > 0) & (density == top))
    dense = dense[np.argsort(-density[dense], kind="stable")]
    chosen[dense[np.cumsum(size[dense]) <= 2 * len(problem.rows)]] = True
    return chosen


def _solve_over(
    problem: Problem, usage: sparse.csc_array, columns: Ints, unit: float, time_s: float
) -> tuple[Floats, Floats] | SolveStatus:
    """Return x over ``columns`` and the shadow prices of all rows, or a status without them."""
    jobs, position = np.unique(problem.column_job[columns], return_inverse=True)
    some = np.arange(len(columns))
    member = sparse.csr_array(
        (np.ones(len(columns)), (position, some)), shape=(len(jobs), len(columns))
    )
    must = problem.must_run[jobs]
    if problem.must_run.sum() > must.sum():
        return SolveStatus.INFEASIBLE  # a must-run job has no column that fits
    if not len(columns):
        return np.zeros(0), np.zeros(len(problem.rows))
    rows: Any = sparse.vstack([usage[:, columns].astype(np.float64), member[~must]], format="csr")
    equal: Any = member[must] if must.any() else None  # the stubs know dense matrices only
    result = linprog(
        -problem.value[columns] / unit,
        A_ub=rows,
        b_ub=np.concatenate([problem.capacity, np.ones(int((~must).sum()))]),
        A_eq=equal,
        b_eq=np.ones(int(must.sum())) if must.any() else None,
        bounds=(0, None),
        method="highs-ds",
        options={"time_limit": max(time_s, 0.0)} if math.isfinite(time_s) else {},
    )
    if result.status == 0:
        duals = -np.asarray(result.ineqlin.marginals)[: len(problem.rows)] * unit
        return np.asarray(result.x), np.maximum(duals, 0.0)
    if result.status in (1, 2):
        return SolveStatus.UNKNOWN if result.status == 1 else SolveStatus.INFEASIBLE
    raise SolverFailed(Relaxation.name, f"HiGHS status {result.status}: {result.message}")


def _entering(problem: Problem, priced: PricedProblem, chosen: Bools, tolerance: float) -> Bools:
    """Return the best columns of the jobs that gain most by a new column, bool[columns]."""
    margin = np.where(chosen, priced.margin, -np.inf)
    has = reduce_by_job(np.maximum, margin, problem.job_start)
    has = np.where(problem.must_run, has, np.maximum(has, 0.0))
    gain = priced.best - has
    cut = max(tolerance, float(np.sort(gain)[-_MOST_ENTERING:][0]) if len(gain) else 0.0)
    job = problem.column_job
    return (gain[job] > tolerance) & (gain[job] >= cut) & (priced.margin >= priced.best[job])


def round_solution(problem: Problem, relaxed: RelaxationResult, start: Ints | None) -> Ints | None:
    """Return the better of ``start`` and the rounded LP solution, or None if neither is feasible.

    A job takes the column whose x exceeds one half. Few jobs have none, since an LP vertex has at
    most as many fractional jobs as coupling rows. Where this overfills rows, columns are given up
    where that loses least. The rest is filled by steps, the best gain per price first.
    """
    choice = np.full(len(problem.jobs), -1, dtype=np.int64)
    likely = np.flatnonzero(relaxed.x > 0.5)
    choice[problem.column_job[likely]] = likely
    candidates = [] if start is None else [start]
    weight = relaxed.prices if relaxed.prices.any() else unit_shares(problem)
    whole = repair_choice(problem, choice, relaxed.prices)
    if whole is not None:
        candidates.append(whole)
    candidates += [improve_choice(problem, c, weight) for c in candidates[:1] if start is not None]
    return max(candidates, key=lambda c: objective_of(problem, c), default=None)
