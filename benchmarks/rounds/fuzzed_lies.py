"""A CP-SAT that lies, and the judgement of a portfolio that asks it."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tessera.formulation.check import find_violations
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.tables import Ints
from tessera.solvers.answers import objective_of, usable_hint
from tessera.solvers.base import Budget
from tessera.solvers.cpsat import CpSat
from tessera.solvers.greedy import Greedy

LIES: Final = (
    "false optimum",
    "low bound",
    "low bound without an answer",
    "nonsense",
    "too much for the rows",
    "wrong objective",
    "wrong length",
    "infeasible",
)
"""The lies: a good answer called optimal; a bound between the answer and what is possible, or below
every answer; columns of other jobs; best columns whatever the rows hold; an objective that is not
that of the answer; choices for other jobs than there are; and no answer where there is one."""


class LyingCpSat:
    """A solver that is named like CP-SAT, and whose results are wrong in the way ``lie``."""

    name = CpSat.name

    def __init__(self, lie: str, rng: np.random.Generator) -> None:
        self._lie = lie
        self._rng = rng

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Return a false result for ``problem``, based on the hint or on greedy's answer."""
        choice = usable_hint(problem, hint)
        if choice is None:
            choice = Greedy().solve(problem, budget).choice
        status, bound = SolveStatus.OPTIMAL, math.nan
        if self._lie in ("low bound", "low bound without an answer"):
            status, bound = SolveStatus.FEASIBLE, self._low_bound(problem, choice)
        if self._lie == "nonsense":
            choice = self._rng.integers(-1, max(1, len(problem.cell)), len(problem.jobs))
        elif self._lie == "too much for the rows":
            choice = _best_columns(problem)
        elif self._lie == "wrong length":
            choice = np.append(choice, -1)
        elif self._lie == "infeasible":
            status = SolveStatus.INFEASIBLE
        elif self._lie == "low bound without an answer":
            status = SolveStatus.UNKNOWN
        answers = status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)
        objective = objective_of(problem, choice) if answers else 0
        if self._lie == "wrong objective":
            objective += int(self._rng.integers(1, 100))
        return Solution(
            status=status,
            choice=choice if answers else np.full(len(problem.jobs), -1),
            objective=objective,
            bound=float(objective) if math.isnan(bound) else bound,
            solver=self.name,
            work=((self.name, 1.0),),
            proved_by=self.name,
        )

    def _low_bound(self, problem: Problem, choice: Ints) -> float:
        worth = objective_of(problem, choice)
        return worth + float(self._rng.integers(-max(2, abs(worth)), 3))


def _best_columns(problem: Problem) -> Ints:
    """Return the column of the greatest value of each job, whatever fits; -1 without columns."""
    choice = np.full(len(problem.jobs), -1)
    for job in range(len(problem.jobs)):
        own = problem.columns_of(job)
        if len(own):
            choice[job] = own[int(np.argmax(problem.value[own.start : own.stop]))]
    return choice


def believes_lie(problem: Problem, result: Solution, best: int | float | None) -> bool:
    """Return whether a portfolio passed on a lie as its own.

    ``best`` is the optimum, None if there is no answer, or NaN if it is not known. An answer must
    break no rule, be worth what it claims and lie below its bound. A bound below the optimum, or
    infeasibility where there is an answer, can only be labelled as CP-SAT's word.
    """
    labelled = result.proved_by == CpSat.name and not result.is_certified
    if result.status is SolveStatus.INFEASIBLE:
        return best is not None and not labelled
    if result.has_answer and (best is None or find_violations(problem, result)):
        return True
    if best is None or math.isnan(best):
        return False
    return not result.bound >= best and not labelled
