"""Sia's formulation through CVXPY: a binary matrix of jobs by configurations.

S. Jayaram Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling"
(SOSP'23), section 3.4.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from scipy import sparse

from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.answers import (
    after_one_run,
    find_unrunnable,
    fits_alone,
    is_answer,
)
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.convex import cp
from tessera.solvers.usage import value_unit
from tessera.solvers.waiting_columns import with_waiting_as_columns


class SiaProgram:
    """A solver that chooses one configuration per job, by a binary matrix A.

    It maximizes the sum of utility x A. A configuration is what a column uses: (GPU type, GPUs) in
    an ordinary round. As published, the matrix has an entry for every job and every configuration
    of any job.

    The comparison is not like for like. The utilities are this problem's values with restart costs
    already subtracted, not goodput to a power. Batch sizes are fixed. Every count is reachable
    immediately, while Sia at most doubles. HiGHS solves the program, while the paper uses GLPK,
    which is slower. ``tessera.solvers.schedulers.sia`` is the scheduler itself. The bound is
    HiGHS's; the hint is not used.
    """

    name = "sia"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``.

        Raises:
            SolverFailed: the status has no meaning here, or the answer breaks a rule.
        """
        del hint
        status, choice, bound = self._answer(problem, budget)
        return after_one_run(problem, status, choice, bound, solver=self.name, seed=budget.seed)

    def _answer(self, problem: Problem, budget: Budget) -> tuple[SolveStatus, Ints | None, float]:
        if len(find_unrunnable(problem)):
            return SolveStatus.INFEASIBLE, None, math.inf
        if not fits_alone(problem).any():
            return SolveStatus.OPTIMAL, np.full(len(problem.jobs), -1, dtype=np.int64), 0.0
        if budget.expired():
            return SolveStatus.UNKNOWN, None, math.inf
        column, usage = _configurations(problem)
        can = column >= 0
        unit = value_unit(problem)
        utility = np.where(can, problem.value[column] / unit, 0.0)
        model, chosen = _program(problem, utility, can, usage)
        status, bound = _run(model, budget)
        if chosen.value is None or status in (SolveStatus.INFEASIBLE, SolveStatus.UNKNOWN):
            return status, None, math.inf
        taken = np.asarray(chosen.value) > 0.5
        choice = np.where(
            taken.any(axis=1), column[np.arange(len(taken)), taken.argmax(axis=1)], -1
        )
        if not is_answer(problem, choice):
            raise SolverFailed(self.name, "its answer breaks a rule of the problem")
        return status, choice, float(round(bound * unit)) if math.isfinite(bound) else math.inf


def _configurations(problem: Problem) -> tuple[Ints, sparse.csr_array]:
    """Return the best column of each job in each configuration. It is -1 if the job has none.

    The shape is int64[jobs, configurations]. Also return the use of each row by each configuration,
    float64[rows, configurations]. Columns that do not fit into the empty cluster have no
    configuration.
    """
    uses = np.diff(problem.usage_start)
    place = np.arange(len(problem.row)) - np.repeat(problem.usage_start[:-1], uses)
    key = np.full((len(problem.cell), 2 * int(uses.max(initial=0)) + 1), -1, dtype=np.int64)
    key[problem.usage_column, 2 * place] = problem.row
    key[problem.usage_column, 2 * place + 1] = problem.amount
    fits = np.flatnonzero(fits_alone(problem))
    _, first, which = np.unique(key[fits], axis=0, return_index=True, return_inverse=True)
    column = np.full((len(problem.jobs), len(first)), -1, dtype=np.int64)
    rising = fits[np.argsort(problem.value[fits], kind="stable")]  # the best is written last
    configuration = np.zeros(len(problem.cell), dtype=np.int64)
    configuration[fits] = which.ravel()
    column[problem.column_job[rising], configuration[rising]] = rising
    shape = (len(problem.rows), len(problem.cell))
    every = sparse.csc_array((problem.amount * 1.0, problem.row, problem.usage_start), shape=shape)
    return column, sparse.csr_array(every[:, fits[first]])


def _program(
    problem: Problem, utility: Floats, can: Bools, usage: sparse.csr_array
) -> tuple[Any, Any]:
    chosen = cp.Variable(can.shape, boolean=True)
    must = np.flatnonzero(problem.must_run)
    rules = [cp.sum(chosen, axis=1) <= 1, chosen <= can.astype(np.float64)]
    if len(must):
        rules.append(cp.sum(chosen[must], axis=1) == 1)
    if problem.rows:
        rules.append(usage @ cp.sum(chosen, axis=0) <= problem.capacity)
    return cp.Problem(cp.Maximize(cp.sum(cp.multiply(utility, chosen))), rules), chosen


def _run(model: Any, budget: Budget) -> tuple[SolveStatus, float]:
    """Return the status and the bound, in utilities."""
    options: dict[str, float] = {"mip_rel_gap": budget.gap}
    remaining_s = budget.time_limit_s()
    if math.isfinite(remaining_s):
        options["time_limit"] = max(remaining_s, 0.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "inaccurate": the status expresses this
            model.solve(solver=cp.SCIPY, scipy_options=options)
    except cp.SolverError as error:
        if math.isfinite(remaining_s):
            # CVXPY raises SolverError when there is no answer in time
            return SolveStatus.UNKNOWN, math.inf
        raise SolverFailed(SiaProgram.name, str(error)) from error
    if model.status == cp.INFEASIBLE:
        return SolveStatus.INFEASIBLE, math.inf
    if model.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        raise SolverFailed(SiaProgram.name, f"status {model.status}")
    ended = model.status == cp.OPTIMAL
    bound = -float(model.solver_stats.extra_stats["mip_dual_bound"])
    return SolveStatus.OPTIMAL if ended else SolveStatus.FEASIBLE, bound
