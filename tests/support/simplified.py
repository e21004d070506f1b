"""A stage of the portfolio as the portfolio calls it: on the problem in its simplest numbers."""

from __future__ import annotations

from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution
from tessera.solvers.base import Budget, Solver
from tessera.solvers.simplify import simplify
from tessera.solvers.waiting_columns import with_waiting_as_columns


class Simplified:
    """A solver that calls ``stage`` on the simplest numbers, with waiting as columns."""

    def __init__(self, stage: Solver) -> None:
        self._stage, self.name = stage, stage.name

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Return the stage's solution in terms of ``problem``."""
        simple = simplify(problem)
        return simple.lift(self._stage.solve(simple.problem, budget, simple.read_hint(hint)))
