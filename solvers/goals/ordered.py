"""Goals in order: each is solved by any solver on the problem that the earlier goals leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from tessera.formulation.answer.certificates import Certificate
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.proofs import BY_LEVELS, GoalProof, RoundProof
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.goals import Goal, GoalResult, Levels, Linear
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import Statement, replace_goal_values
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import (
    is_answer,
    make_solution,
    objective_of,
    proves_nothing,
    trivial_bound,
    without_answer,
)
from tessera.solvers.goals.calls import Calls
from tessera.solvers.goals.levels import (
    excludes_nothing,
    limits_of,
    loosen_levels,
    lowest_possible_level,
    settle_levels,
)
from tessera.solvers.goals.rows import (
    add_limits,
    keep_goal_row,
    keep_value_row,
    least_kept_value,
    levels_of,
    with_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolvedGoals:
    """A solution of a statement, in the values of the last goal, with a result for each goal.

    ``floors`` has, for each goal but the last, the part that later goals had to leave of it. For a
    sum it is the least value, and for levels the highest level in each place. ``certificates`` has
    the certificate of each goal's bound, or None where the bound is a stage's word.
    """

    solution: Solution
    results: tuple[GoalResult, ...]
    floors: tuple[tuple[float, ...], ...] = ()
    certificates: tuple[Certificate | None, ...] = ()

    @property
    def proof(self) -> RoundProof:
        """Return what a round keeps of this solution's proof."""
        goals = tuple(
            GoalProof(certificate=certificate, floor=floor or ())
            for certificate, floor in zip_longest(self.certificates, self.floors)
        )
        return RoundProof(goals=goals, recorded=self.solution.recorded)

    def on(self, problem: Problem) -> Solution:
        """Return the solution measured by the values of ``problem``, which has the same columns."""
        if not self.solution.has_answer:
            return self.solution
        objective = objective_of(problem, self.solution.choice)
        bound = self.solution.bound if len(self.results) == 1 else trivial_bound(problem)
        return replace(self.solution, objective=objective, bound=max(objective, bound))

    def standing(self, statement: Statement, choice: Ints) -> tuple[float, ...]:
        """Return the standing of ``choice`` by the goals in order.

        The choice with the greater standing is better. What a goal has beyond its floor does not
        count. The standing is empty for a single goal.
        """
        standing: list[float] = []
        if len(statement.goals) == 1:
            return ()
        for position, goal in enumerate(statement.goals):
            floor = self.floors[position] if position < len(self.floors) else None
            if isinstance(goal, Levels):
                worst = levels_of(statement.problem, goal, choice).tolist()
                standing += [
                    -max(level, least) for level, least in zip(worst, floor or (), strict=False)
                ]
            else:
                value = float(goal.value[choice[choice >= 0]].sum())
                standing.append(min(value, floor[0]) if floor else value)
        return tuple(standing)


def solve_goals(
    statement: Statement,
    solver: Solver,
    budget: Budget,
    greedy: Solution,
    prices: Floats | None = None,
) -> SolvedGoals:
    """Reach the goals in order, each within the tolerance of those before it.

    ``greedy`` is a solution of ``build_surrogate(statement)``; the result is never worse by the goals in
    order. With several goals, the time is shared evenly among those that are left, and the work is
    recorded call by call (``tessera.solvers.goals.calls``). ``prices`` are shadow prices of the
    rows, float64[rows] in the last goal's integers, from which its solver may begin. The resulting
    shadow prices are the solver's.
    """
    if len(statement.goals) == 1 and isinstance(statement.goals[0], Linear):
        problem = statement.problem
        solution = _solve(problem, solver, budget, greedy, prices)
        trivial = proves_nothing(problem, solution, budget.gap)
        return SolvedGoals(
            solution=solution,
            results=(_linear_result(statement.goals[0], solution, trivial),),
            certificates=(None if trivial else solution.certificate,),
        )
    return _Ordered(statement, solver, budget, greedy).solve(prices)


def _linear_result(goal: Linear, solution: Solution, trivial: bool) -> GoalResult:
    return GoalResult(
        name=goal.name,
        unit=goal.unit,
        objective=solution.objective / goal.scale,
        bound=solution.bound / goal.scale,
        gap=solution.gap,
        bound_is_trivial=trivial,
        proved_by="" if trivial else solution.proved_by,
        certified=not trivial and solution.is_certified,
    )


def _solve(
    problem: Problem, solver: Solver, budget: Budget, greedy: Solution, prices: Floats | None
) -> Solution:
    """Return the solver's solution, or greedy's if that is better or the only verified one."""
    if solver.name == greedy.solver:
        return greedy
    solution = solver.solve(problem, budget, _with_prices(greedy, problem, prices))
    if solution.has_answer and not find_violations(problem, solution):
        if solution.objective >= greedy.objective:
            return solution
        return _with_proof(greedy, solution)
    if solution.status is SolveStatus.INFEASIBLE and not greedy.has_answer:
        return solution
    if not solution.has_answer and greedy.objective <= solution.bound <= greedy.bound:
        return _with_proof(greedy, solution)
    return greedy


def _with_proof(answer: Solution, proven: Solution) -> Solution:
    """Return ``answer`` with the bound of ``proven``, its proof, prices and record."""
    return replace(
        answer,
        bound=proven.bound,
        prices=proven.prices,
        work=proven.work,
        recorded=proven.recorded,
        proved_by=proven.proved_by,
        certificate=proven.certificate,
        failures=proven.failures,
    )


def _with_prices(hint: Solution, problem: Problem, prices: Floats | None) -> Solution:
    """Return ``hint`` with shadow prices of the problem's first rows.

    Rows that goals added cost nothing yet.
    """
    if prices is None:
        return hint
    return replace(hint, prices=np.append(prices, np.zeros(len(problem.rows) - len(prices))))


class _Ordered:
    """Several goals: the remaining problem, the best choice so far, and what is proven."""

    def __init__(
        self, statement: Statement, solver: Solver, budget: Budget, greedy: Solution
    ) -> None:
        self._statement, self._solver, self._budget = statement, solver, budget
        self._greedy = greedy
        # If false, the solver is greedy, which has already run.
        self._ask = solver.name != greedy.solver
        self._calls = Calls(budget)
        self._problem = statement.problem
        self._choice: Ints | None = greedy.choice if greedy.has_answer else None
        self._bounds: list[float] = []
        self._trivial: list[bool] = []
        self._proved_by: list[str] = []
        self._certificates: list[Certificate | None] = []
        self._floors: list[tuple[float, ...]] = []

    def solve(self, prices: Floats | None) -> SolvedGoals:
        """Reach every goal in turn."""
        *early, last = self._statement.goals
        if not isinstance(last, Linear):
            raise AssertionError("the last goal of a policy must be a sum")
        if self._choice is None:
            nothing = self._first_answer(last)
            if nothing is not None:
                return self._solved(nothing)
        for position, goal in enumerate(early):
            self._budget.check()
            part = self._budget.share(1.0 / (len(early) + 1 - position))
            if isinstance(goal, Levels):
                self._reach_levels(goal, part)
            else:
                self._reach_sum(goal, part)
        solution = self._best(last, self._budget, prices)
        rows = len(self._statement.problem.rows)
        return self._solved(replace(solution, prices=solution.prices[:rows]))

    def _first_answer(self, last: Linear) -> Solution | None:
        """Find a choice to start from; or else return a solution that says why."""
        problem = replace_goal_values(self._statement.problem, last)
        part = self._budget.share(1.0 / (len(self._statement.goals) + 1))
        solution = self._calls.solve(self._solver, problem, part) if self._ask else self._greedy
        if solution is not None and solution.has_answer and not find_violations(problem, solution):
            self._choice = solution.choice
            return None
        proven = solution is not None and solution.status is SolveStatus.INFEASIBLE
        status = SolveStatus.INFEASIBLE if proven else SolveStatus.UNKNOWN
        return without_answer(problem, status, solver=self._solver.name, seed=self._budget.seed)

    def _reach_sum(self, goal: Linear, budget: Budget) -> None:
        solution = self._best(goal, budget)
        self._choice = solution.choice
        self._floors.append((float(least_kept_value(goal, solution.objective)),))
        self._problem = with_rows(
            self._problem, [keep_goal_row(self._problem, goal, solution.objective)]
        )

    def _reach_levels(self, goal: Levels, budget: Budget) -> None:
        problem, choice = self._problem, self._known()
        if not self._ask:
            places = tuple(levels_of(problem, goal, choice)[: goal.depth].tolist())
            self._bounds.append(lowest_possible_level(problem, goal))
        else:
            settled = settle_levels(problem, goal, choice, self._solver, self._calls, budget)
            self._choice, places = settled.choice, settled.places
            self._bounds.append(max(settled.bound, lowest_possible_level(problem, goal)))
        self._trivial.append(
            bool(places) and excludes_nothing(problem, goal, self._bounds[-1], places[0])
        )
        self._proved_by.append("" if self._trivial[-1] else BY_LEVELS)
        self._certificates.append(None)
        loose = loosen_levels(goal, places)
        self._floors.append(loose)
        self._problem = add_limits(problem, goal, limits_of(loose))

    def _known(self) -> Ints:
        if self._choice is None:
            raise AssertionError("a goal must be reached from an answer")
        return self._choice

    def _best(self, goal: Linear, budget: Budget, prices: Floats | None = None) -> Solution:
        """Return the best verified solution by ``goal``, and record what is proven of the goal."""
        problem = replace_goal_values(self._problem, goal)
        solution = self._best_on(problem, budget, prices)
        self._bounds.append(solution.bound)
        trivial = proves_nothing(problem, solution, budget.gap)
        self._trivial.append(trivial)
        self._proved_by.append("" if trivial else solution.proved_by)
        self._certificates.append(None if trivial else solution.certificate)
        return solution

    def _best_on(self, problem: Problem, budget: Budget, prices: Floats | None) -> Solution:
        """Return the best verified solution of ``problem``: the solver's, the last, or greedy's."""
        start, made_by = self._known(), "goals"
        greedy = self._greedy.choice
        stands = self._greedy.has_answer and is_answer(problem, greedy)
        if stands and objective_of(problem, greedy) >= objective_of(problem, start):
            start, made_by = greedy, "goals" if self._ask else self._greedy.solver
        best = make_solution(
            problem, start, bound=trivial_bound(problem), solver=made_by, seed=self._budget.seed
        )
        hint = _with_prices(best, problem, prices)
        solution = self._calls.solve(self._solver, problem, budget, hint) if self._ask else None
        if solution is None or find_violations(problem, solution):
            return best
        if solution.has_answer and solution.objective >= best.objective:
            return solution
        if solution.bound < best.objective:  # it cannot be true
            return replace(best, prices=solution.prices)
        proven = solution.bound <= best.objective
        return replace(
            _with_proof(best, solution),
            work=best.work,
            recorded=best.recorded,
            status=SolveStatus.OPTIMAL if proven else SolveStatus.FEASIBLE,
        )

    def _solved(self, solution: Solution) -> SolvedGoals:
        goals, bounds, trivial = self._statement.goals, self._bounds, self._trivial
        proved_by, certificates = self._proved_by, self._certificates
        work = self._calls.work if self._ask else self._greedy.work
        if not solution.has_answer:
            bounds = [_first_bound(self._statement.problem, goal) for goal in goals]
            trivial = [True] * len(goals)
            proved_by, certificates = [""] * len(goals), [None] * len(goals)
        results = tuple(
            replace(
                _result(self._statement.problem, goal, solution, bound),
                bound_is_trivial=unproven,
                proved_by=by,
                certified=certificate is not None and certificate.bound <= bound,
            )
            for goal, bound, unproven, by, certificate in zip(
                goals, bounds, trivial, proved_by, certificates, strict=True
            )
        )
        return SolvedGoals(
            solution=replace(
                solution,
                work=work,
                recorded=self._calls.recorded,
                failures=self._calls.failures,
            ),
            results=results,
            floors=tuple(self._floors),
            certificates=tuple(certificates),
        )


def state_goals(
    statement: Statement, floors: Sequence[tuple[float, ...]]
) -> tuple[Problem | None, ...]:
    """Return the problem of each goal, once the goals before it keep their ``floors``.

    The bound of a sum is one of this problem. It is None for levels.
    """
    problem, stated = statement.problem, list[Problem | None]()
    for position, goal in enumerate(statement.goals):
        floor = floors[position] if position < len(floors) else ()
        if isinstance(goal, Levels):
            stated.append(None)
            problem = add_limits(problem, goal, limits_of(floor))
            continue
        stated.append(replace_goal_values(problem, goal))
        if floor:
            problem = with_rows(problem, [keep_value_row(problem, goal, int(floor[0]))])
    return tuple(stated)


def _first_bound(problem: Problem, goal: Goal) -> float:
    if isinstance(goal, Levels):
        return lowest_possible_level(problem, goal)
    return trivial_bound(replace(problem, value=goal.value))


def _result(problem: Problem, goal: Goal, solution: Solution, bound: float) -> GoalResult:
    """Return the result of ``goal`` in the final solution, with what later goals gave away."""
    if isinstance(goal, Linear):
        objective = objective_of(replace(problem, value=goal.value), solution.choice)
        gap = max(0.0, bound - objective) / max(abs(bound), 1.0)
        shown, limit = objective / goal.scale, bound / goal.scale
    else:
        worst = levels_of(problem, goal, solution.choice)
        level = float(worst[0]) if len(worst) else 0.0
        bound = min(bound, level) if len(worst) else 0.0
        gap = 0.0 if bound == level else (level - bound) / (abs(bound) or abs(level))
        shown, limit = goal.sign * level, goal.sign * bound
    return GoalResult(
        name=goal.name,
        unit=goal.unit,
        objective=shown,
        bound=limit,
        gap=gap if solution.has_answer else math.inf,
    )
