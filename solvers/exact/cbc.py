"""CBC, called through PuLP, for small and medium rounds.

It is a second opinion that is independent of shadow prices and of cores.
"""

from __future__ import annotations

import math
import re
import tempfile
import warnings
from typing import Final

import numpy as np
import pulp

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.answers import after_one_run, is_answer, objective_of
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns

_USUAL_FOLDER: Final = "/tmp"  # noqa: S108 - the folder in it is private and has a random name
STATUS: Final = {  # by PuLP's (status, sol_status)
    (pulp.LpStatusOptimal, pulp.LpSolutionOptimal): SolveStatus.OPTIMAL,
    (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible): SolveStatus.FEASIBLE,
    (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible): SolveStatus.INFEASIBLE,
    # CBC's "Integer infeasible": the LP has a solution, but no integer solution exists
    (pulp.LpStatusInfeasible, pulp.LpSolutionNoSolutionFound): SolveStatus.INFEASIBLE,
    (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound): SolveStatus.UNKNOWN,
}


class Cbc:
    """A solver that runs CBC until it ends or the time limit is reached.

    CBC reports no bound to PuLP, so a gap would be worthless. The hint is not used, on purpose. The
    recorded work is 1, or 0 if the time ended first.
    """

    name = "cbc"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``; without a proof the bound is the trivial one.

        Raises:
            SolverFailed: CBC could not run, or its answer breaks a rule.
        """
        del hint
        status, choice, bound = SolveStatus.UNKNOWN, None, math.inf
        if not budget.expired():
            status, choice = self._run(problem, budget)
        if choice is not None and status is SolveStatus.OPTIMAL:
            bound = float(objective_of(problem, choice))
        return after_one_run(problem, status, choice, bound, solver=self.name, seed=budget.seed)

    def _run(self, problem: Problem, budget: Budget) -> tuple[SolveStatus, Ints | None]:
        with warnings.catch_warnings():
            # PuLP announces the names of its next major release at every call
            warnings.simplefilter("ignore", DeprecationWarning)
            return self._run_quietly(problem, budget)

    def _run_quietly(self, problem: Problem, budget: Budget) -> tuple[SolveStatus, Ints | None]:
        model, x = _model(problem)
        remaining_s = budget.time_limit_s()
        command = pulp.PULP_CBC_CMD(
            msg=False,
            threads=budget.workers,
            options=[f"randomCbcSeed {budget.seed + 1}"],
            timeLimit=max(remaining_s, 0.01) if math.isfinite(remaining_s) else None,
            gapRel=0.0,
        )
        try:
            with tempfile.TemporaryDirectory(dir=_folder()) as command.tmpDir:
                model.solve(command)
        except (pulp.PulpSolverError, OSError) as error:
            raise SolverFailed(self.name, str(error)) from error
        status = STATUS.get((model.status, model.sol_status))
        if status is None:
            raise SolverFailed(self.name, f"status {model.status}, {model.sol_status}")
        if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
            return status, None
        picked = np.flatnonzero([(v.value() or 0.0) > 0.5 for v in x])
        choice = np.full(len(problem.jobs), -1, dtype=np.int64)
        choice[problem.column_job[picked]] = picked
        if not is_answer(problem, choice):
            raise SolverFailed(self.name, "its answer breaks a rule of the problem")
        return status, choice


def _folder() -> str:
    """Return a folder for files. PuLP divides CBC's command line at blanks, so its name has none."""
    folder = tempfile.gettempdir()
    return _USUAL_FOLDER if re.search(r"\s", folder) else folder


def _model(problem: Problem) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Return the program (1) to (4) as a PuLP model, and x by column."""
    model = pulp.LpProblem("round", pulp.LpMaximize)
    x = [pulp.LpVariable(f"x{c}", cat=pulp.LpBinary) for c in range(len(problem.cell))]
    none = pulp.LpVariable("none", 0, 0)  # CBC refuses a model without any variable
    model += pulp.LpAffineExpression([(none, 1), *zip(x, problem.value.tolist(), strict=True)])
    for job in range(len(problem.jobs)):
        total = pulp.LpAffineExpression([(none, 1), *((x[c], 1) for c in problem.columns_of(job))])
        model += total == 1 if problem.must_run[job] else total <= 1
    by_row: list[list[tuple[pulp.LpVariable, int]]] = [[] for _ in problem.rows]
    for column, row, amount in zip(
        problem.usage_column.tolist(), problem.row.tolist(), problem.amount.tolist(), strict=True
    ):
        by_row[row].append((x[column], amount))
    for row, users in zip(problem.rows, by_row, strict=True):
        model += pulp.LpAffineExpression([(none, 1), *users]) <= row.capacity
    return model, x
