"""HiGHS's branch and bound through SciPy, on the whole problem as sparse matrices."""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.answers import after_one_run, find_unrunnable, is_answer
from tessera.solvers.exact.usage import usage_matrix, value_unit
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns

_ENDED, _LIMIT, _INFEASIBLE = 0, 1, 2  # scipy.optimize.milp's status
_TRUST = 1e-9
"""Relative error that its floating-point bound may have."""


class Highs:
    """A solver of (1) to (4) to within the requested gap; the hint is not used, on purpose.

    SciPy reports no answers before the end. The recorded work is 1, or 0 if the time ended first.
    """

    name = "highs"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``, with HiGHS's own bound.

        Raises:
            SolverFailed: the status has no meaning here, or the answer breaks a rule.
        """
        del hint
        status, choice, bound = self._answer(problem, budget)
        return after_one_run(problem, status, choice, bound, solver=self.name, seed=budget.seed)

    def _answer(self, problem: Problem, budget: Budget) -> tuple[SolveStatus, Ints | None, float]:
        choice = np.full(len(problem.jobs), -1, dtype=np.int64)
        if len(find_unrunnable(problem)):
            return SolveStatus.INFEASIBLE, None, math.inf
        if not len(problem.cell):
            return SolveStatus.OPTIMAL, choice, 0.0
        unit = value_unit(problem)
        rules = _rules(problem)
        remaining_s = budget.time_limit_s()
        if remaining_s <= 0 or budget.cancelled():
            return SolveStatus.UNKNOWN, None, math.inf
        result = milp(
            -problem.value / unit,
            integrality=np.ones(len(problem.cell), np.int64),
            bounds=Bounds(0, 1),
            constraints=rules,
            options={"disp": False, "mip_rel_gap": budget.gap, "time_limit": remaining_s},
        )
        if result.status == _INFEASIBLE:
            return SolveStatus.INFEASIBLE, None, math.inf
        if result.status not in (_ENDED, _LIMIT):
            raise SolverFailed(self.name, str(result.message))
        bound = _bound(result.mip_dual_bound, unit)
        if result.x is None:
            return SolveStatus.UNKNOWN, None, bound
        picked = np.flatnonzero(result.x > 0.5)
        choice[problem.column_job[picked]] = picked
        if not is_answer(problem, choice):
            raise SolverFailed(self.name, "its answer breaks a rule of the problem")
        ended = result.status == _ENDED
        return SolveStatus.OPTIMAL if ended else SolveStatus.FEASIBLE, choice, bound


def _bound(dual: float | None, unit: float) -> float:
    """Return HiGHS's bound in the problem's integers; HiGHS minimizes the negative value."""
    if dual is None or not math.isfinite(dual):
        return math.inf
    bound = -dual * unit
    return float(round(bound + _TRUST * abs(bound)))


def _rules(problem: Problem) -> list[LinearConstraint]:
    columns = len(problem.cell)
    member = sparse.csr_array(
        (np.ones(columns), (problem.column_job, np.arange(columns))),
        shape=(len(problem.jobs), columns),
    )
    rules = [LinearConstraint(member, problem.must_run.astype(np.float64), 1.0)]
    if problem.rows:
        usage = usage_matrix(problem).astype(np.float64)
        rules.append(LinearConstraint(usage, -np.inf, problem.capacity.astype(np.float64)))
    return rules
