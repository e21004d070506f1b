"""Gavel's formulation through CVXPY: shares of time by job and GPU type, rounded down and repaired.

D. Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads"
(OSDI'20), sections 3.1 and 4.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.answers import (
    find_unrunnable,
    is_answer,
    make_solution,
    trivial_bound,
    without_answer,
)
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.convex import cp
from tessera.solvers.goals.rows import restrict_columns
from tessera.solvers.greedy import Greedy
from tessera.solvers.usage import usage_matrix
from tessera.solvers.waiting_columns import with_waiting_as_columns

_WHOLE = 1 - 1e-6
"""A share of at least this counts as the whole."""


class GavelProgram:
    """A solver that maximizes the sum of value x share over (job, type).

    It keeps whole shares and lets greedy fill what is free. The comparison is not like for like.
    Gavel realizes shares over many rounds by priorities, and keeps each job at its requested count.
    Here one round is decided. Since a problem has no requests, the middle one of a job's counts
    stands for it. Must-run jobs keep all of their columns. The linear program bounds only those
    columns, so the bound is the trivial one. The recorded work is 1, or 0 if there was no time for
    it.
    """

    name = "gavel"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``; the hint is not used, on purpose."""
        del hint
        if len(find_unrunnable(problem)):
            return without_answer(
                problem,
                SolveStatus.INFEASIBLE,
                solver=self.name,
                seed=budget.seed,
                work=((self.name, 1.0),),
            )
        late = budget.expired()
        choice = None if late else self._choice(problem, budget)
        work = ((self.name, float(not late)),)
        if choice is None:
            return without_answer(
                problem, SolveStatus.UNKNOWN, solver=self.name, seed=budget.seed, work=work
            )
        return make_solution(
            problem,
            choice,
            bound=trivial_bound(problem),
            solver=self.name,
            seed=budget.seed,
            work=work,
        )

    def _choice(self, problem: Problem, budget: Budget) -> Ints | None:
        requested, origin = restrict_columns(problem, _as_requested(problem))
        share = _shares(requested, budget)
        rounded = np.full(len(requested.jobs), -1, dtype=np.int64)
        whole = np.flatnonzero(share >= _WHOLE)
        rounded[requested.column_job[whole]] = whole
        known = None
        if is_answer(requested, rounded):
            known = make_solution(
                requested, rounded, bound=trivial_bound(requested), solver=self.name
            )
        filled = Greedy().solve(requested, budget, known)
        if not filled.has_answer:
            return None
        return np.where(filled.choice >= 0, origin[filled.choice], -1) if len(origin) else rounded


def _as_requested(problem: Problem) -> Bools:
    """Return which columns have their job's middle count or must be kept, bool[columns]."""
    gpus, job = problem.cells.gpus[problem.cell], problem.column_job
    order = np.lexsort((gpus, job))
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (np.diff(job[order]) != 0) | (np.diff(gpus[order]) != 0)
    # Count the distinct GPU counts of each job.
    count = np.bincount(job[order][new], minlength=len(problem.jobs))
    first = np.cumsum(count) - count
    some = count > 0
    middle = np.zeros(len(problem.jobs), dtype=np.int64)
    middle[some] = gpus[order][new][first[some] + count[some] // 2]
    return np.asarray((gpus == middle[job]) | problem.must_run[job])


def _shares(problem: Problem, budget: Budget) -> Floats:
    """Return the share of time of each column by the linear program, float64[columns].

    All are 0 if the program has no solution in time.
    """
    columns = len(problem.cell)
    if not columns:
        return np.zeros(0)
    member = sparse.csr_array(
        (np.ones(columns), (problem.column_job, np.arange(columns))),
        shape=(len(problem.jobs), columns),
    )
    limit_s = budget.time_limit_s()
    share = cp.Variable(columns, nonneg=True)
    rules = [member @ share <= 1]
    must = np.flatnonzero(problem.must_run)
    if len(must):
        rules.append(member[must] @ share == 1)
    if problem.rows:
        rules.append(usage_matrix(problem).astype(np.float64) @ share <= problem.capacity)
    unit = max(float(np.abs(problem.value).max()), 1.0)
    options: dict[str, str | float] = {"method": "highs"}
    if math.isfinite(limit_s):
        options["time_limit"] = max(limit_s, 0.0)
    model = cp.Problem(cp.Maximize((problem.value / unit) @ share), rules)
    try:
        model.solve(solver=cp.SCIPY, scipy_options=options)
    except cp.SolverError as error:
        if math.isfinite(limit_s):
            return np.zeros(columns)  # there is no answer in time, so greedy alone decides
        raise SolverFailed(GavelProgram.name, str(error)) from error
    return np.zeros(columns) if share.value is None else np.asarray(share.value)
