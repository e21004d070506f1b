"""Answers that a clock ended are recorded with the round, by call, and given back to a repetition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tessera.formulation.problem import Problem
from tessera.solvers.base import Budget
from tessera.solvers.goals import solve_goals
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_random_snapshot
from tests.support.goals import a_statement, a_sum, greedy_of
from tests.support.problems import a_problem
from tests.support.proving import RecordingSolver

FREE = Budget(remaining_s=lambda: math.inf)


def two_jobs_for_one_gpu() -> Problem:
    return a_problem([[(1, {0: 1})], [(1, {0: 1})]], capacity=[1])


def test_each_call_gets_its_own_answers_back() -> None:
    statement = a_statement(
        two_jobs_for_one_gpu(), a_sum([3, 2], "first", tolerance=0.5), a_sum([1, 100], "second")
    )
    solver = RecordingSolver()
    greedy = greedy_of(statement, FREE)
    solution = solve_goals(statement, solver, FREE, greedy).solution
    assert [answer.stage for answer in solution.recorded] == ["1:cut", "2:cut"]
    assert solver.given == [(), ()]
    again = RecordingSolver()
    budget = replace(FREE, work=dict(solution.work), recorded=solution.recorded)
    assert solve_goals(statement, again, budget, greedy).solution.recorded == solution.recorded
    assert again.given == [(replace(answer, stage="cut"),) for answer in solution.recorded]
    assert again.given[0] != again.given[1]


@pytest.mark.parametrize("objective", ["throughput", "throughput within 1% then jct"])
def test_a_round_keeps_the_answers_that_its_repetition_needs(objective: str) -> None:
    snapshot, options = a_random_snapshot(3, jobs=8), RoundOptions(objective=objective)
    first = plan_round(snapshot, options, RecordingSolver(), FREE)
    assert first.proof.recorded == first.solution.recorded != ()
    again = RecordingSolver()
    budget = replace(FREE, work=dict(first.solution.work), recorded=first.proof.recorded)
    second = plan_round(snapshot, options, again, budget)
    assert all(again.given)
    assert second.proof.recorded == first.proof.recorded
