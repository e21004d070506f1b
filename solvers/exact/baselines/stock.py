"""CP-SAT unmodified: the whole problem, with its own defaults and all of the time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from ortools.sat.python import cp_model

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.answers import after_one_run, is_answer
from tessera.solvers.exact.cpsat import constraints, objective, variables
from tessera.solvers.exact.cpsat.solver import STATUS, solve_while_wanted, solver_of
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns


def _ignore(_objective: float) -> None:
    return None


class StockCpSat:
    """A solver of (1) to (4) without shadow prices, a core or a hint.

    Only gap, time, seed and workers are set. ``tessera.solvers.exact.cpsat`` plans deterministic work
    well below the time limit, which would be unfair to a stock solver. ``on_answer`` is called with
    the objective of each better answer as it is found.
    """

    name = "stock-cp-sat"

    def __init__(self, on_answer: Callable[[float], None] = _ignore) -> None:
        self._on_answer = on_answer

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``, with CP-SAT's own bound; the hint is not used, on purpose."""
        del hint
        status, choice, bound = SolveStatus.UNKNOWN, None, math.inf
        if not budget.expired():
            status, choice, bound = self._run(problem, budget)
        return after_one_run(problem, status, choice, bound, solver=self.name, seed=budget.seed)

    def _run(self, problem: Problem, budget: Budget) -> tuple[SolveStatus, Ints | None, float]:
        model = cp_model.CpModel()
        x = variables.add_columns(model, problem)
        budget.check()
        constraints.require_one_column(model, x, problem)
        budget.check()
        constraints.require_must_run(model, x, problem)
        budget.check()
        constraints.limit_rows(model, x, problem)
        budget.check()
        objective.maximize_value(model, x, problem, 0)
        solver = solver_of(budget)
        solver.parameters.relative_gap_limit = budget.gap
        status = STATUS.get(
            solve_while_wanted(solver, model, budget, _AnswerCallback(self._on_answer))
        )
        if status is None:
            raise SolverFailed(self.name, f"status {solver.status_name()}")
        if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
            return status, None, math.inf
        picked = np.flatnonzero([solver.boolean_value(v) for v in x])
        choice = np.full(len(problem.jobs), -1, dtype=np.int64)
        choice[problem.column_job[picked]] = picked
        if not is_answer(problem, choice):
            raise SolverFailed(self.name, "its answer breaks a rule of the problem")
        return status, choice, float(round(solver.best_objective_bound))


class _AnswerCallback(cp_model.CpSolverSolutionCallback):
    """A callback that passes on the objective of each better answer."""

    def __init__(self, on_answer: Callable[[float], None]) -> None:
        super().__init__()
        self._on_answer = on_answer

    def on_solution_callback(self) -> None:
        """Report the answer that was just found."""
        self._on_answer(self.objective_value)
