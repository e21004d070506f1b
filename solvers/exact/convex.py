"""HiGHS's branch and bound, called through CVXPY and SciPy: a second opinion stated in matrices."""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from typing import Any, Final

import numpy as np
from scipy import sparse

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.answers import after_one_run, find_unrunnable, is_answer
from tessera.solvers.exact.usage import usage_matrix, value_unit
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns


def _cvxpy() -> Any:
    """Import CVXPY without its log lines about a newer OR-Tools, which we do not use through it."""
    log = logging.getLogger("__cvxpy__")
    log.addFilter(_about_no_other_solver)
    try:
        return importlib.import_module("cvxpy")
    finally:
        log.removeFilter(_about_no_other_solver)


def _about_no_other_solver(record: logging.LogRecord) -> bool:
    return "importing solver" not in record.getMessage()


cp: Final = _cvxpy()

STATUS: Final = {
    cp.OPTIMAL: SolveStatus.OPTIMAL,
    cp.OPTIMAL_INACCURATE: SolveStatus.FEASIBLE,  # the time ended, and an answer had been found
    cp.INFEASIBLE: SolveStatus.INFEASIBLE,
}


class Convex:
    """A solver of (1) to (4) to within the requested gap; the hint is not used, on purpose.

    The recorded work is 1, or 0 if the time ended first.
    """

    name = "cvxpy"

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
        idle = np.full(len(problem.jobs), -1, dtype=np.int64)
        if len(find_unrunnable(problem)):
            return SolveStatus.INFEASIBLE, None, math.inf
        if not len(problem.cell):  # CVXPY has no variables of size 0
            return SolveStatus.OPTIMAL, idle, 0.0
        if budget.expired():
            return SolveStatus.UNKNOWN, None, math.inf
        unit = value_unit(problem)
        model, x = _model(problem, unit)
        status = _run(model, budget)
        if status in (SolveStatus.INFEASIBLE, SolveStatus.UNKNOWN) or x.value is None:
            return status, None, math.inf
        picked = np.flatnonzero(x.value > 0.5)
        choice = idle
        choice[problem.column_job[picked]] = picked
        if not is_answer(problem, choice):
            raise SolverFailed(self.name, "its answer breaks a rule of the problem")
        # HiGHS minimizes the negative value, in units of `unit`.
        dual = float(model.solver_stats.extra_stats["mip_dual_bound"])
        return status, choice, float(round(-dual * unit)) if math.isfinite(dual) else math.inf


def _model(problem: Problem, unit: float) -> tuple[Any, Any]:
    columns = len(problem.cell)
    x = cp.Variable(columns, boolean=True)
    member = sparse.csr_array(
        (np.ones(columns), (problem.column_job, np.arange(columns))),
        shape=(len(problem.jobs), columns),
    )
    must = problem.must_run
    rules = (
        [usage_matrix(problem).astype(np.float64) @ x <= problem.capacity] if problem.rows else []
    )
    if must.any():
        rules.append(member[np.flatnonzero(must)] @ x == 1)
    if not must.all():
        rules.append(member[np.flatnonzero(~must)] @ x <= 1)
    return cp.Problem(cp.Maximize((problem.value / unit) @ x), rules), x


def _run(model: Any, budget: Budget) -> SolveStatus:
    options: dict[str, float] = {"mip_rel_gap": budget.gap}
    remaining_s = budget.time_limit_s()
    if math.isfinite(remaining_s):
        options["time_limit"] = max(remaining_s, 0.0)
    try:
        with warnings.catch_warnings():
            # "Solution may be inaccurate": the status below says so.
            warnings.simplefilter("ignore", UserWarning)
            model.solve(solver=cp.SCIPY, scipy_options=options)
    except cp.SolverError as error:
        if budget.expired() or math.isfinite(remaining_s):
            # CVXPY raises SolverError when the time ends without an answer
            return SolveStatus.UNKNOWN
        raise SolverFailed(Convex.name, str(error)) from error
    status = STATUS.get(model.status)
    if status is None:
        raise SolverFailed(Convex.name, f"status {model.status}")
    return status
