"""Lexicographic goals, on statements small enough for the answer to be obvious."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.check import find_violations
from tessera.formulation.goals import Goal
from tessera.formulation.policy import Policy
from tessera.formulation.problem import MAX_TOTAL, Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.statement import state_round
from tessera.solvers.answers import make_solution
from tessera.solvers.base import Budget
from tessera.solvers.goals import SolvedGoals, build_surrogate, solve_goals
from tessera.solvers.goals.rows import keep_goal_row, with_rows
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_random_snapshot
from tests.support.goals import a_statement, a_sum, greedy_of, some_levels
from tests.support.problems import a_problem, are_equal

EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)


def solve_in_order(
    problem: Problem, *goals: Goal, name: str = "portfolio", budget: Budget = EXACT
) -> SolvedGoals:
    statement = a_statement(problem, *goals)
    return solve_goals(statement, make_solver(name), budget, greedy_of(statement, budget))


def two_jobs_for_one_gpu() -> Problem:
    return a_problem([[(1, {0: 1})], [(1, {0: 1})]], capacity=[1])


def test_a_sum_too_large_for_a_row_is_kept_up_to_rounding() -> None:
    large = 2**50
    problem = a_problem([[(1, {0: 1}), (1, {0: 1}), (1, {0: 1})]] * 4, capacity=[4])
    goal = a_sum([large, large - 1024, large // 2] * 4, "large")
    row = keep_goal_row(problem, goal, 4 * large)
    assert row.amount.sum() + row.idle_amount.sum() < MAX_TOTAL
    kept = with_rows(problem, [row])
    best = np.array([0, 3, 6, 9])
    assert np.all(kept.used(best) <= kept.capacity)
    assert not np.all(kept.used(np.array([0, 3, 6, 11])) <= kept.capacity)


def test_a_bound_proven_for_one_position_is_not_used_for_another() -> None:
    """If no job exceeds 1, job 0 needs the whole cluster; if job 0 exceeds 1, the others reach 1."""
    problem = a_problem(
        [[(0, {0: 3}), (0, {0: 1})], [(0, {0: 1}), (0, {0: 1})], [(0, {0: 1})]],
        capacity=[3],
        must_run=[0],
    )
    levels = some_levels([1.0, 5.0, 3.0, 1.0, 1.0], [9.0, 6.0, 6.0])
    statement = a_statement(problem, levels, a_sum([0] * 5))
    start = make_solution(statement.problem, np.array([1, 2, 4]), bound=0.0, solver="greedy")
    result = solve_goals(statement, make_solver("portfolio"), EXACT, start)
    assert result.solution.choice.tolist() == [1, 3, 4]


def test_levels_are_shown_with_their_sign() -> None:
    levels = some_levels([-7.0, -7.0], [-2.0, -3.0], sign=-1)
    result = solve_in_order(two_jobs_for_one_gpu(), levels, a_sum([1, 1]))
    assert result.results[0].objective == 3.0


def test_jobs_without_columns_and_levels_of_minus_infinity_are_ignored() -> None:
    problem = a_problem([[], [(1, {0: 1})], [(1, {0: 1})]], capacity=[1])
    levels = some_levels([-math.inf, 1.0], [99.0, -math.inf, 2.0], tolerance=0.1)
    result = solve_in_order(problem, levels, a_sum([5, 1]))
    assert result.solution.choice.tolist() == [-1, -1, 1]
    assert result.results[0].objective == 1.0


def test_a_problem_without_jobs_has_a_solution() -> None:
    for problem in (a_problem([]), a_problem([[], []])):
        waiting = [1.0] * len(problem.jobs)
        result = solve_in_order(problem, some_levels([], waiting), a_sum([], "a"), a_sum([], "b"))
        assert result.solution.status is SolveStatus.OPTIMAL
        assert [r.gap for r in result.results] == [0, 0, 0]


@pytest.mark.parametrize("name", ["portfolio", "cp-sat", "cvxpy"])
def test_a_single_sum_without_an_answer_is_proven_infeasible(name: str) -> None:
    """Waiting uses a row, and all values are 0, so greedy's bound proves nothing."""
    problem = a_problem([[(0, {0: 1})], [(0, {0: 1})]], [1, 0], must_run=[1])
    waits = replace(
        problem,
        idle_start=np.array([0, 1, 1]),
        idle_row=np.array([1]),
        idle_amount=np.array([1]),
    )
    result = solve_in_order(waits, a_sum([0, 0], "last"), name=name)
    assert result.solution.status is SolveStatus.INFEASIBLE


class TickingClock:
    """A clock on which each call takes one second of a limit."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s

    def __call__(self) -> float:
        self.left_s -= 1.0
        return self.left_s


@pytest.mark.parametrize("limit_s", [5, 20, 60, 150])
def test_a_round_cut_short_between_goals_is_reproducible(limit_s: float) -> None:
    snapshot = a_random_snapshot(3, jobs=30, groups=((0, 4, 4), (1, 2, 8)))
    policy = Policy(objective="finish-time-fairness then throughput within 5% then jct")
    statement = state_round(snapshot, policy)
    cut = Budget(remaining_s=TickingClock(limit_s))
    greedy = greedy_of(statement, cut)
    first = solve_goals(statement, make_solver("portfolio"), cut, greedy)
    work = dict(first.solution.work)
    endless = Budget(remaining_s=lambda: math.inf, work=work)
    again = solve_goals(statement, make_solver("portfolio"), endless, greedy)
    assert are_equal(first.solution, again.solution)
    assert first.results == again.results


def test_a_single_sum_is_solved_as_without_goals() -> None:
    statement = state_round(a_random_snapshot(1, jobs=20), Policy())
    greedy = greedy_of(statement, EXACT)
    result = solve_goals(statement, make_solver("portfolio"), EXACT, greedy)
    assert build_surrogate(statement) is statement.problem
    assert are_equal(
        result.solution, make_solver("portfolio").solve(statement.problem, EXACT, greedy)
    )
    assert result.on(statement.problem).bound == result.solution.bound


class RuleBreakingSolver:
    """A solver whose solutions break rules."""

    name = "lying"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        return Solution(
            status=SolveStatus.OPTIMAL,
            choice=problem.job_start[:-1],
            objective=10**9,
            bound=1e9,
            solver=self.name,
            work=((self.name, 1.0),),
        )


def test_an_answer_that_breaks_a_rule_is_dropped() -> None:
    levels = some_levels([2.0, 1.0], [9.0, 8.0])
    statement = a_statement(two_jobs_for_one_gpu(), levels, a_sum([1, 3]), a_sum([1, 1]))
    greedy = greedy_of(statement, EXACT)
    result = solve_goals(statement, RuleBreakingSolver(), EXACT, greedy)
    assert np.array_equal(result.solution.choice, greedy.choice)
    assert not find_violations(statement.problem, result.solution)


def test_a_choice_that_serves_the_earlier_goal_better_ranks_higher() -> None:
    statement = a_statement(
        two_jobs_for_one_gpu(), a_sum([100, 98], "first", tolerance=0.05), a_sum([1, 2], "second")
    )
    result = solve_goals(statement, make_solver("portfolio"), EXACT, greedy_of(statement, EXACT))
    first, second, none = (np.array(c) for c in ([0, -1], [-1, 1], [-1, -1]))
    assert result.standing(statement, second) > result.standing(statement, first)
    assert result.standing(statement, first) > result.standing(statement, none)


def test_surrogate_values_put_the_worst_off_first_and_keep_restart_costs() -> None:
    levels = some_levels([2.0, 1.0], [9.0, 8.0])
    last = replace(a_sum([900, 1000]), restart_price=np.array([100, 0]))
    problem = build_surrogate(a_statement(two_jobs_for_one_gpu(), levels, last))
    assert problem.value[0] > problem.value[1] > 0
    assert problem.restart_price[0] > 0
    assert problem.restart_price[1] == 0


@pytest.mark.parametrize(
    "objective",
    [
        "finish-time-fairness",
        "max-min within 10%",
        "makespan then cost",
        "cost",
        "throughput within 5% then jct",
    ],
)
def test_a_whole_round_with_several_goals_passes_the_checker(objective: str) -> None:
    snapshot = a_random_snapshot(5, jobs=25)
    kinds = tuple(replace(t, dollars_per_hour=2.0) for t in snapshot.gpu_types)
    snapshot = replace(snapshot, gpu_types=kinds)
    outcome = plan_round(snapshot, Policy(objective=objective), make_solver(), EXACT)
    assert outcome.violations == ()
    assert len(outcome.goals) >= 2
    assert all(goal.gap < 0.2 for goal in outcome.goals)
    recorded = Budget(remaining_s=lambda: math.inf, gap=0.0, work=dict(outcome.solution.work))
    again = plan_round(snapshot, Policy(objective=objective), make_solver(), recorded)
    assert again.decisions == outcome.decisions
