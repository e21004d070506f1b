"""Laws of every solver and of goals in order, on small problems that can be enumerated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.round.goals import Linear
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import Statement
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.cbc import Cbc
from tessera.solvers.exact.convex import Convex
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.exact.cpsat import model as cpsat_model
from tessera.solvers.exact.fixing import core_of
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.exact.prices import price_problem
from tessera.solvers.exact.relaxation import Relaxation
from tessera.solvers.goals import SolvedGoals, solve_goals
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
from tests.support.problems import a_problem, are_equal, brute_force, problems

EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)

FEW = examples(25)

SOME = examples(100)


def _check_solution(solver: Solver, problem: Problem, hint: Solution | None = None) -> Solution:
    """Solve the problem, check the laws of every solution, and return the solution."""
    solution = solver.solve(problem, EXACT, hint)
    best = brute_force(problem)
    assert dict(solution.work).keys() >= {solver.name} or solver.name == "portfolio"
    if not solution.has_answer:
        assert np.all(solution.choice == -1)
        assert solution.status is SolveStatus.UNKNOWN or best is None
    else:
        assert find_violations(problem, solution) == []
        assert best is not None
        assert solution.objective <= best
        assert solution.status is not SolveStatus.OPTIMAL or solution.objective == best
    assert best is None or solution.bound >= best
    return solution


def _check_exact(solver: Solver, problem: Problem, hint: Solution | None = None) -> None:
    solution, best = _check_solution(solver, problem, hint), brute_force(problem)
    assert solution.status is (SolveStatus.INFEASIBLE if best is None else SolveStatus.OPTIMAL)
    assert solution.objective == (best or 0)


@SOME
@given(problems())
def test_greedy_is_valid_and_keeps_running_jobs_if_they_fit(problem: Problem) -> None:
    solution = _check_solution(Greedy(), problem)
    alive = a_problem([], [1]) if not len(problem.cell) else problem
    now = problem.current[problem.current >= 0]
    stays = bool(np.all(problem.used(problem.current) <= problem.capacity))
    if alive is problem and stays and not np.any(problem.must_run & (problem.current < 0)):
        assert solution.has_answer
        assert solution.objective >= int(problem.value[now].sum())


@SOME
@given(problems())
def test_the_relaxation_bound_is_valid_and_its_prices_are_not_negative(problem: Problem) -> None:
    solution = _check_solution(Relaxation(), problem)
    assert np.all(solution.prices >= 0)


@SOME
@given(problems(), st.lists(st.floats(0, 10), min_size=3, max_size=3), st.floats(0, 30))
def test_a_core_loses_nothing_that_its_outside_bound_does_not_cover(
    problem: Problem, prices: list[float], reach: float
) -> None:
    known = Greedy().solve(problem, EXACT)
    best = brute_force(problem)
    if not known.has_answer or best is None:
        return
    priced = price_problem(problem, np.array(prices[: len(problem.rows)]))
    core = core_of(problem, priced, known.choice, reach)
    inside = brute_force(core.problem)
    assert inside is not None, "the core must contain the known answer"
    assert np.array_equal(core.lift(core.lower(known.choice)), known.choice)
    assert best <= max(inside + core.offset, core.outside)
    assert inside + core.offset <= best


@SOME
@given(problems())
def test_cp_sat_is_exact(problem: Problem) -> None:
    _check_exact(CpSat(), problem)


@SOME
@given(problems())
def test_cp_sat_is_exact_on_widening_cores(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpsat_model, "FIRST_CORE_COLUMNS", 1)
        _check_exact(CpSat(), problem, Relaxation().solve(problem, EXACT))


@SOME
@given(problems())
def test_the_portfolio_is_exact_and_never_below_greedy(problem: Problem) -> None:
    _check_exact(Portfolio(), problem)
    greedy = Greedy().solve(problem, EXACT)
    assert not greedy.has_answer or Portfolio().solve(problem, EXACT).objective >= greedy.objective


@FEW
@given(problems(jobs=4))
def test_cbc_agrees_with_enumeration(problem: Problem) -> None:
    _check_exact(Cbc(), problem)


@SOME
@given(problems())
def test_cvxpy_agrees_with_enumeration(problem: Problem) -> None:
    _check_exact(Convex(), problem)


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
