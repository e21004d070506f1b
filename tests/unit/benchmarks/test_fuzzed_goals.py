"""The fuzzer finds faults in solutions of lexicographic goals and draws the intended cases."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tessera.benchmarks.rounds.bench_fuzz import judge_cases
from tessera.benchmarks.rounds.fuzzed_goals import (
    draw_statement,
    every_answer,
    goal_faults,
)
from tessera.benchmarks.rounds.fuzzed_tally import FAULTS
from tessera.formulation.goals import Levels
from tessera.formulation.solution import SolveStatus
from tessera.formulation.statement import Statement
from tessera.solvers.base import Budget
from tessera.solvers.goals import SolvedGoals, solve_goals
from tessera.solvers.registry import make_solver
from tests.support import goals as support
from tests.support.laws import scaled
from tests.support.problems import a_problem

EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)


@cache
def drawn_statements() -> list[Statement]:
    return [draw_statement(np.random.default_rng(seed)) for seed in range(200)]


def a_statement_of_two_jobs() -> Statement:
    """Return a round in which one of two jobs may run: the first is fairer, the second worth more."""
    problem = a_problem([[(5, {0: 3})], [(9, {0: 3})]], capacity=[3])
    return support.a_statement(
        problem, support.some_levels([1.0, 1.0], [3.0, 2.0]), support.a_sum([5, 9])
    )


def solve_statement(statement: Statement) -> SolvedGoals:
    return solve_goals(
        statement, make_solver("portfolio"), EXACT, support.greedy_of(statement, EXACT)
    )


def faults_of(statement: Statement, found: SolvedGoals) -> list[str]:
    greedy = support.greedy_of(statement, EXACT)
    return goal_faults(statement, found, greedy, every_answer(statement.problem))


@pytest.mark.full
def test_enumeration_lists_all_feasible_choices() -> None:
    for problem in [s.problem for s in drawn_statements() if len(s.problem.jobs) < 6][:40]:
        listed = every_answer(problem)
        assert {tuple(row) for row in listed.tolist()} == set(support.every_answer(problem))


def test_a_correct_answer_has_no_fault() -> None:
    statement = a_statement_of_two_jobs()

    assert faults_of(statement, solve_statement(statement)) == []


def test_an_answer_below_a_reached_goal_breaks_that_goal() -> None:
    statement, result = a_statement_of_two_jobs(), solve_statement(a_statement_of_two_jobs())
    second = replace(result.solution, choice=np.array([-1, 1]), objective=9, bound=9.0)

    assert "violations" in faults_of(statement, replace(result, solution=second))


@pytest.mark.parametrize(("goal", "bound"), [(0, 2.5), (1, 4.0)])
def test_a_bound_that_an_answer_exceeds_is_detected(goal: int, bound: float) -> None:
    statement, result = a_statement_of_two_jobs(), solve_statement(a_statement_of_two_jobs())
    results = list(result.results)
    results[goal] = replace(results[goal], bound=bound)

    assert faults_of(statement, replace(result, results=tuple(results))) == ["wrong_bounds"]


def test_a_false_proof_of_optimality_is_detected() -> None:
    problem = a_problem([[(5, {0: 3})], [(9, {0: 3})]], capacity=[3])
    statement = support.a_statement(problem, support.a_sum([5, 9]))
    result = solve_statement(statement)
    worse = replace(result.solution, choice=np.array([0, -1]), objective=5)

    wrong = faults_of(statement, replace(result, solution=worse))

    assert {"wrong_proofs", "below_greedy"} <= set(wrong)
    nothing = replace(
        result.solution, status=SolveStatus.INFEASIBLE, choice=np.full(2, -1), objective=0
    )
    assert "wrong_proofs" in faults_of(statement, replace(result, solution=nothing))


def test_goals_of_every_kind_are_drawn() -> None:
    goals = [goal for statement in drawn_statements() for goal in statement.goals]

    assert {1, 2, 3, 4} == {len(statement.goals) for statement in drawn_statements()}
    assert {g.depth for g in goals if isinstance(g, Levels)} == set(range(1, 9))
    assert any(g.tolerance for g in goals)
    assert any(len(statement.problem.idle_row) for statement in drawn_statements())
    assert any(
        not len(every_answer(s.problem)) for s in drawn_statements() if len(s.problem.jobs) < 6
    )


def test_random_cases_have_no_fault() -> None:
    """Cases have gaps from 1e-9 to 1e-2, lexicographic goals and all mixes of recorded work.

    `tessera bench fuzz` draws more of them.
    """
    count = scaled(300)
    result = judge_cases(first=1_000_000, count=count, solver="portfolio", seed=0)

    assert result["faulty"] == []
    assert not set(FAULTS) & set(result["tally"])
    assert result["tally"]["optimal"] > 2 / 3 * count


def test_a_case_that_raises_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("tessera.benchmarks.rounds.bench_fuzz._judge", fail)
    monkeypatch.setattr("tessera.benchmarks.rounds.bench_fuzz._judge_goals", fail)
    monkeypatch.setattr("tessera.benchmarks.rounds.bench_fuzz._judge_round", fail)

    result = judge_cases(first=7, count=2, solver="portfolio", seed=0)

    assert result["tally"]["crashes"] == 2
    assert [fault["case"] for fault in result["faulty"]] == [7, 8]
