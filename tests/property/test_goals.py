"""Laws of lexicographic goals, against an enumeration of all solutions of tiny statements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from tessera.formulation.check import find_violations
from tessera.formulation.goals import Linear
from tessera.formulation.solution import SolveStatus
from tessera.formulation.statement import Statement
from tessera.solvers.base import Budget
from tessera.solvers.goals import SolvedGoals, build_surrogate, solve_goals
from tessera.solvers.registry import make_solver
from tests.support.goals import (
    best_answers,
    every_answer,
    greedy_of,
    sorted_levels,
    statements,
    value_of,
)
from tests.support.laws import examples
from tests.support.problems import are_equal

EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)


def solve_statement(statement: Statement, name: str, budget: Budget = EXACT) -> SolvedGoals:
    return solve_goals(statement, make_solver(name), budget, greedy_of(statement, budget))


@pytest.mark.parametrize("name", ["portfolio", "cp-sat", "cvxpy"])
@given(statement=statements())
@examples(150)
def test_every_goal_reaches_the_optimum_found_by_enumeration(
    name: str, statement: Statement
) -> None:
    best = best_answers(statement)
    found = solve_statement(statement, name)
    if not best:
        assert found.solution.status is SolveStatus.INFEASIBLE
        return
    assert tuple(found.solution.choice.tolist()) in best
    assert found.solution.gap == 0
    for goal, result in zip(statement.goals, found.results, strict=True):
        assert result.gap == 0 or goal.tolerance > 0


@given(statement=statements())
@examples(60)
def test_bounds_are_never_better_than_the_optimum(statement: Statement) -> None:
    answers = every_answer(statement.problem)
    found = solve_statement(statement, "portfolio", Budget(remaining_s=lambda: math.inf))
    for goal, result in zip(statement.goals[:1], found.results[:1], strict=True):
        if not answers:
            assert result.gap == math.inf
        elif isinstance(goal, Linear):
            assert result.bound >= max(value_of(goal, c) for c in answers) - 1e-9
        else:
            worst = [sorted_levels(statement.problem, goal, c)[:1] for c in answers]
            assert result.bound <= (min(w[0] for w in worst) if worst[0] else 0.0)


@given(statement=statements())
@examples(60)
def test_the_solution_is_never_worse_than_greedy(statement: Statement) -> None:
    greedy = greedy_of(statement, EXACT)
    for budget in (EXACT, Budget(remaining_s=lambda: 0.0)):
        result = solve_goals(statement, make_solver("portfolio"), budget, greedy)
        if greedy.has_answer:
            assert not find_violations(statement.problem, result.solution)
            standing = result.standing(statement, result.solution.choice)
            assert standing >= result.standing(statement, greedy.choice)


@given(statement=statements())
@examples(40)
def test_a_recorded_round_repeats_bit_for_bit(statement: Statement) -> None:
    first = solve_statement(statement, "portfolio", Budget(remaining_s=lambda: math.inf))
    work = dict(first.solution.work)
    again = solve_statement(statement, "portfolio", Budget(remaining_s=lambda: math.inf, work=work))
    assert are_equal(first.solution, again.solution)
    assert repr(first.results) == repr(again.results)


@given(statement=statements())
@examples(60)
def test_surrogate_values_stay_small_and_keep_the_columns(statement: Statement) -> None:
    problem = build_surrogate(statement)
    assert np.array_equal(problem.cell, statement.problem.cell)
    if len(statement.goals) == 1:
        assert problem is statement.problem
    else:
        assert np.abs(problem.value).max(initial=0) <= 2e9
