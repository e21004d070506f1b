"""The CP-SAT solver: its model, its limits, and the meaning of its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.answers import (
    is_within,
    make_result,
    objective_of,
    trivial_bound,
    usable_hint,
)
from tessera.solvers.exact.cpsat import constraints, objective, variables
from tessera.solvers.exact.cpsat.solver import STATUS, solve_while_wanted, solver_of
from tessera.solvers.exact.fixing import Core, column_losses, core_of
from tessera.solvers.exact.prices import PricedProblem, price_problem
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns

WORK_PER_S: Final = 0.5
"""Deterministic seconds planned for a wall second.

Rates of 0.4 to 0.8 were measured, so the planned work ends at about the end of the time."""
BUILD_S: Final = 1e-5
"""Wall seconds planned for building a column of the model, or one of its entries.

Half of it was measured."""
MOST_WORK: Final = 1e6
"""Deterministic seconds if nothing else limits them: a number that can be recorded."""
FIRST_CORE_COLUMNS: Final = 60
"""Columns of the first core that are worse than their job's best.

Such a core is solved in tens of milliseconds."""
FIRST_WORK: Final = 0.1
"""Deterministic seconds for the first core; a core that takes longer is widened instead."""
POLISHING_WORK: Final = 0.02
"""Deterministic seconds for a round whose wanted gap is met, to prove it to the last unit."""
LEAST_WORKERS: Final = 4
"""Workers below which one is used: two share the work of one, with other searches and fewer cuts."""
CORE_GROWTH_FACTOR: Final = 2
"""Factor by which each next core, and its allowed work, is larger."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _NativeResult:
    """The result of one run of CP-SAT; ``repeatable`` means that no wall clock cut it short."""

    status: SolveStatus
    choice: Ints | None
    bound: float
    work: float
    repeatable: bool


class CpSat:
    """An exact solver of (1) to (4).

    If the hint has shadow prices, it solves a small core first and widens it until what was left
    out cannot matter (``tessera.solvers.exact.fixing``). Otherwise it solves the whole problem. Its work
    is the limit of deterministic seconds that it ran under, which is the same for every repetition.
    It is 0 if a wall clock cut the run short, since such a run cannot be repeated. The solution is
    never worse than a usable hint.
    """

    name = "cp-sat"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``; INFEASIBLE is proven in integers."""
        known = usable_hint(problem, hint)
        priceless = known is None or hint is None or len(hint.prices) != len(problem.rows)
        built = max(len(problem.cell), len(problem.row)) if priceless else 0
        limit = _work_limit(budget, built)
        bound = trivial_bound(problem)
        if budget.expired() or limit <= 0:
            return self._solution(problem, budget, SolveStatus.UNKNOWN, known, bound, 0.0)
        if known is None or hint is None or priceless:
            core = _whole(problem)
            native = _run(core, budget, limit, known)
            choice, status = native.choice, native.status
            bound, repeatable = min(bound, native.bound), native.repeatable
        else:
            priced = price_problem(problem, hint.prices)
            choice, best, repeatable = _widen(problem, priced, known, budget, limit)
            bound, status = min(bound, best), SolveStatus.FEASIBLE
        if choice is None or (known is not None and _less(problem, choice, known)):
            choice = known
        work = limit if repeatable else 0.0
        return self._solution(problem, budget, status, choice, bound, work)

    def _solution(
        self,
        problem: Problem,
        budget: Budget,
        status: SolveStatus,
        choice: Ints | None,
        bound: float,
        work: float,
    ) -> Solution:
        return make_result(
            problem,
            choice,
            status=status,
            bound=bound,
            solver=self.name,
            seed=budget.seed,
            work=((self.name, work),),
            proved_by=self.name,
        )


def _less(problem: Problem, choice: Ints, known: Ints) -> bool:
    return objective_of(problem, choice) < objective_of(problem, known)


def _work_limit(budget: Budget, built: int) -> float:
    """Return the deterministic seconds to work: as recorded, or the most that surely fit.

    ``built`` is the number of columns, or of their uses of rows if that is larger, of a model that
    is built as a whole. It is 0 for cores, which start small.
    """
    given = budget.work.get(CpSat.name, MOST_WORK)
    left_s = budget.remaining_s() - BUILD_S * built
    return min(given, max(0.0, left_s) * WORK_PER_S, MOST_WORK)


def _whole(problem: Problem) -> Core:
    return Core(
        problem=problem,
        jobs=np.arange(len(problem.jobs)),
        columns=np.arange(len(problem.cell)),
        fixed=np.full(len(problem.jobs), -1),
        offset=0,
        outside=-math.inf,
    )


def _widen(
    problem: Problem, priced: PricedProblem, known: Ints, budget: Budget, limit: float
) -> tuple[Ints, float, bool]:
    """Return (best choice, bound, whether repeatable) from ever wider cores around ``priced``.

    It ends when the gap is met, when the core held everything that could be better, or when the
    work is spent.
    """
    needed = priced.total + priced.slack - objective_of(problem, known)
    loss = column_losses(problem, priced)
    loss = np.sort(loss[loss <= needed])  # no other column can be part of a better answer
    size = FIRST_CORE_COLUMNS + int(np.searchsorted(loss, 1.0))
    bound, done, allowed = priced.bound, 0.0, FIRST_WORK
    while True:
        budget.check()
        needed = priced.total + priced.slack - objective_of(problem, known)
        reach = min(needed, float(loss[size])) if size < len(loss) else needed
        core = core_of(problem, priced, known, reach)
        native = _run(core, budget, min(allowed, limit - done), core.lower(known))
        done += native.work
        if native.choice is not None and not _less(problem, native.choice, known):
            known = native.choice
        value = objective_of(problem, known)
        bound = max(value, min(bound, max(native.bound, core.outside)))
        met = is_within(budget.gap, bound, value)
        proven = reach >= needed and native.status is SolveStatus.OPTIMAL
        if met or proven or done >= limit:
            return known, bound, native.repeatable
        if not native.repeatable or budget.expired():
            # The clock ended the run, so it cannot be repeated.
            return known, bound, False
        size, allowed = size * CORE_GROWTH_FACTOR, allowed * CORE_GROWTH_FACTOR


def _run(core: Core, budget: Budget, limit: float, known: Ints | None) -> _NativeResult:
    """Run CP-SAT on ``core``; the resulting choice and bound are those of the whole problem.

    Raises:
        SolverFailed: what it says cannot be true, by its own answer or by ``known`` (int64[core jobs]).
    """
    model = cp_model.CpModel()
    x = variables.add_columns(model, core.problem)
    budget.check()
    constraints.require_one_column(model, x, core.problem)
    budget.check()
    constraints.require_must_run(model, x, core.problem)
    budget.check()
    constraints.limit_rows(model, x, core.problem)
    budget.check()
    objective.maximize_value(model, x, core.problem, core.offset)
    if known is not None:
        variables.hint_choice(model, x, known, budget.check)
    solver = _solver(budget, limit)
    native = solve_while_wanted(solver, model, budget)
    status = STATUS.get(native)
    if status is None:
        raise SolverFailed(CpSat.name, f"status {solver.status_name(native)}")
    work = float(solver.response_proto.deterministic_time)
    ended = status in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE) or work >= limit
    choice, own, bound = None, None, math.inf
    if status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
        picked = np.flatnonzero([solver.boolean_value(v) for v in x])
        own = np.full(len(core.problem.jobs), -1, dtype=np.int64)
        own[core.problem.column_job[picked]] = picked
        choice = core.lift(own)
        bound = float(round(solver.best_objective_bound))
    best = max(
        (objective_of(core.problem, one) for one in (known, own) if one is not None),
        default=-math.inf,
    )
    if status is SolveStatus.INFEASIBLE and known is not None:
        raise SolverFailed(CpSat.name, "it called a problem infeasible that has a known answer")
    if bound < best + core.offset:
        raise SolverFailed(
            CpSat.name, f"its bound {bound:.0f} is below an answer of {best + core.offset:.0f}"
        )
    return _NativeResult(status=status, choice=choice, bound=bound, work=work, repeatable=ended)


def _solver(budget: Budget, limit: float) -> cp_model.CpSolver:
    solver = solver_of(budget)
    solver.parameters.linearization_level = 2  # without all cuts, cores of 500 columns take seconds
    solver.parameters.relative_gap_limit = budget.gap
    solver.parameters.max_deterministic_time = limit
    if budget.workers < LEAST_WORKERS:
        solver.parameters.num_workers = 1
    return solver
