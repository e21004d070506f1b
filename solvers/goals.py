"""Goals in order: each is solved by any solver on the problem that the goals before it leave."""

from __future__ import annotations

from dataclasses import dataclass, replace

from formulation.check import violations
from formulation.goals import GoalResult, Linear
from formulation.problem import Problem
from formulation.solution import Solution
from formulation.statement import Statement
from solvers.answers import objective_of
from solvers.base import Budget, Solver


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """An answer to a statement: ``solution`` is in the values of the last goal; a result for each goal."""

    solution: Solution
    results: tuple[GoalResult, ...]

    def on(self, problem: Problem) -> Solution:
        """Return the answer measured by the values of ``problem``, which has the same columns."""
        if not self.solution.has_answer:
            return self.solution
        objective = objective_of(problem, self.solution.choice)
        return replace(
            self.solution, objective=objective, bound=max(objective, self.solution.bound)
        )


def surrogate(statement: Statement) -> Problem:
    """Return the problem whose values speak for all goals at once, for greedy and for placement."""
    return statement.problem


def solve_goals(statement: Statement, solver: Solver, budget: Budget, greedy: Solution) -> Solved:
    """Reach the goals in order, each within the tolerance of those before it.

    ``greedy`` answers ``surrogate(statement)``: the result is never worse by the goals in order.
    """
    (goal,) = (goal for goal in statement.goals if isinstance(goal, Linear))
    found = _solve(statement.problem, solver, budget, greedy)
    return Solved(solution=found, results=(_result(goal, found),))


def _result(goal: Linear, found: Solution) -> GoalResult:
    return GoalResult(
        name=goal.name, unit=goal.unit, objective=found.objective / goal.scale,
        bound=found.bound / goal.scale, gap=found.gap,
    )  # fmt: skip


def _solve(problem: Problem, solver: Solver, budget: Budget, greedy: Solution) -> Solution:
    """Return the solver's answer, or greedy's where that is better or the only verified one."""
    if solver.name == greedy.solver:
        return greedy
    found = solver.solve(problem, budget, greedy)
    if found.has_answer and not violations(problem, found):
        if found.objective >= greedy.objective:
            return found
        return replace(greedy, bound=found.bound, prices=found.prices, work=found.work)
    if not found.has_answer and greedy.objective <= found.bound <= greedy.bound:
        return replace(greedy, bound=found.bound, prices=found.prices, work=found.work)
    return greedy
