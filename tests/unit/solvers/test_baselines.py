"""Baseline solvers solve the same problem correctly, and the benchmark and laws detect faults."""

from __future__ import annotations

import json
import math
import queue
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.benchmarks.rounds import contest
from tessera.benchmarks.rounds.contest import ProcessOutcome, SolvedRound
from tessera.benchmarks.rounds.entries import ContestEntry
from tessera.benchmarks.rounds.instances import make_instance
from tessera.benchmarks.rounds.rivals import seconds_to_reach
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import SolveStatus
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import build_problem, state_round
from tessera.solvers import registry
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import objective_of
from tessera.solvers.exact.baselines.pop import Pop, part_of
from tessera.solvers.exact.baselines.stock import StockCpSat
from tests.support import problems as support
from tests.support.laws import scaled
from tests.support.odd_problems import (
    KINDS,
    TooLarge,
    answer_faults,
    draw_problem,
    dynamic_optimum,
)

ALWAYS = Budget(remaining_s=lambda: math.inf, gap=0.0)
EXPIRED = Budget(remaining_s=lambda: 0.0)
EXACT = ("stock-cp-sat", "highs")
SMALL_KINDS = tuple(kind for kind in KINDS if kind not in ("huge", "middling"))


def optimum_or_nan(problem: Problem) -> int | float | None:
    try:
        return dynamic_optimum(problem)
    except TooLarge:
        return math.nan


@pytest.mark.parametrize("name", registry.baseline_names())
@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_a_baseline_breaks_no_rule_and_its_bound_is_valid(name: str, kind: str) -> None:
    by = registry.make_solver(name)
    for seed in range(scaled(5)):
        problem = draw_problem(np.random.default_rng(seed), kind)
        best = optimum_or_nan(problem)
        solution = by.solve(problem, ALWAYS)
        assert answer_faults(problem, solution, best) == []
        if name in EXACT and best is not None and not math.isnan(best):
            assert solution.objective == best


@pytest.mark.parametrize("name", registry.baseline_names())
def test_a_baseline_without_time_returns_unknown(name: str) -> None:
    problem = support.a_problem([[(60, {0: 5})], [(50, {0: 5})]], [10])
    solution = registry.make_solver(name).solve(problem, EXPIRED)

    assert solution.status is SolveStatus.UNKNOWN or not find_violations(problem, solution)
    assert solution.bound >= 110


def test_parts_of_pop_cannot_share_free_gpus() -> None:
    # each part has one of the two GPUs, so no job can have both
    problem = support.a_problem([[(1, {0: 1}), (9, {0: 2})], [(1, {0: 1}), (9, {0: 2})]], [2])

    assert Pop(parts=2).solve(problem, ALWAYS).objective == 2


def test_a_part_keeps_the_properties_of_its_jobs() -> None:
    jobs = [[(1, {0: 1})], [(2, {0: 2}), (3, {1: 3})], [], [(4, {1: 1})]]
    problem = support.a_problem(jobs, [9, 9], must_run=[1], current={1: 1, 3: 0})

    part = part_of(problem, np.array([1, 3]), np.array([4, 5]))

    assert part.jobs == ("job-1", "job-3")
    assert part.value.tolist() == [2, 3, 4]
    assert part.current.tolist() == [1, 2]
    assert part.must_run.tolist() == [True, False]
    assert [part.usage_of(c) for c in range(3)] == [{0: 2}, {1: 3}, {1: 1}]
    assert part.capacity.tolist() == [4, 5]


def test_stock_cp_sat_reports_each_better_answer() -> None:
    values: list[float] = []
    problem = build_problem(make_instance(60, 64, 4, 3), Policy())
    solution = StockCpSat(values.append).solve(problem, ALWAYS)

    assert values == sorted(values)
    assert values[-1] == solution.objective


# the dynamic program that judges answers, and the verdicts of laws


@pytest.mark.parametrize("seed", range(20))
def test_the_dynamic_program_agrees_with_enumeration(seed: int) -> None:
    problem = draw_problem(np.random.default_rng([seed, 9]), "small")

    assert dynamic_optimum(problem) == support.brute_force(problem)


# the benchmark's verdicts on a baseline


def a_round(objective: float, solve_s: float = 2.0, sign: int = 1) -> SolvedRound:
    return SolvedRound(
        status="feasible",
        objective=objective,
        bound=12.0,
        gap=0.1,
        sign=sign,
        last_gap=0.1,
        build_s=0.5,
        solve_s=solve_s,
        cpu_s=solve_s,
        jobs=1,
        columns=1,
        verified=True,
        proved_by="prices",
        cp_sat=False,
    )


def test_a_baseline_reaches_ours_at_its_first_answer_of_equal_value() -> None:
    baseline = replace(a_round(11.0), answers=((0.25, 9.0), (1.0, 10.0 - 1e-9), (1.5, 11.0)))

    assert seconds_to_reach(a_round(10.0), ProcessOutcome(rounds=(baseline,), ended="done")) == 1.5


def test_a_baseline_without_reports_reaches_ours_at_its_end() -> None:
    assert (
        seconds_to_reach(a_round(10.0), ProcessOutcome(rounds=(a_round(10.0),), ended="done"))
        == 2.5
    )
    assert math.isnan(
        seconds_to_reach(a_round(10.0), ProcessOutcome(rounds=(a_round(9.9),), ended="done"))
    )
    wrong = replace(a_round(10.0), verified=False)
    assert math.isnan(
        seconds_to_reach(a_round(10.0), ProcessOutcome(rounds=(wrong,), ended="done"))
    )


def test_if_less_is_better_a_lower_value_reaches_ours() -> None:
    ours = a_round(1.2, sign=-1)

    assert (
        seconds_to_reach(ours, ProcessOutcome(rounds=(a_round(1.1, sign=-1),), ended="done")) == 2.5
    )
    assert math.isnan(
        seconds_to_reach(ours, ProcessOutcome(rounds=(a_round(1.3, sign=-1),), ended="done"))
    )
    baseline = replace(a_round(1.0, sign=-1), answers=((0.2, 1.3), (0.4, 1.1)))
    assert seconds_to_reach(ours, ProcessOutcome(rounds=(baseline,), ended="done")) == 0.9


def test_a_killed_baseline_keeps_its_reported_answers() -> None:
    lines: queue.Queue[str] = queue.Queue()
    for line in ({"started": True}, {"answer": [0.5, 10.0]}):
        lines.put(json.dumps(line))
    late = ContestEntry(solver="cp-sat", jobs=1, gpus=1, types=1, time_limit_s=0.0)

    result = contest._follow(late, lines)

    assert result.ended == "killed"
    assert seconds_to_reach(a_round(10.0), result) == 1.0


def test_a_process_that_ends_without_a_report_has_failed() -> None:
    lines: queue.Queue[str] = queue.Queue()
    lines.put("")

    assert (
        contest._follow(ContestEntry(solver="x", jobs=1, gpus=1, types=1), lines).ended == "failed"
    )


@pytest.mark.full
def test_a_round_is_solved_in_a_separate_process() -> None:
    entry = ContestEntry(solver="greedy", jobs=12, gpus=16, types=2, running=0.5, repeats=2, seed=4)
    policy = Policy(objective=entry.objective, promise_starts=False)
    problem = state_round(make_instance(12, 16, 2, 5, running=0.5), policy).problem
    greedy = registry.make_solver("greedy").solve(problem, ALWAYS)

    result = contest.run_entry(entry)

    assert result.ended == "done"
    assert [r.verified for r in result.rounds] == [True, True]
    second = result.rounds[1]  # the next seed's round
    assert second.objective == objective_of(problem, greedy.choice) / problem.scale
    assert second.bound == greedy.bound / problem.scale
    assert second.columns == len(problem.cell)
    assert 20 < result.peak_mib < 2000


def test_a_round_after_churn_is_solved_cold_and_warm_and_both_are_checked() -> None:
    reports: list[dict[str, Any]] = []
    entry = ContestEntry(solver="portfolio", jobs=30, gpus=32, types=4, running=0.5, churn=0.1)

    contest.take_part(entry, reports.append)

    done = reports[-1]["done"]
    assert done["warm_verified"]
    assert done["warm_gap"] <= 1e-4
    assert min(done["first_s"], done["cold_s"], done["warm_s"]) > 0
    assert not any("round" in line for line in reports)


@pytest.mark.parametrize("objective", ["throughput", "jct", "max-min", "finish-time-fairness"])
def test_the_first_goal_is_compared(objective: str) -> None:
    reports: list[dict[str, Any]] = []
    entry = ContestEntry(solver="portfolio", jobs=12, gpus=64, types=4, objective=objective)

    contest.take_part(entry, reports.append)

    (solved,) = [SolvedRound(**line["round"]) for line in reports if "round" in line]
    assert solved.verified
    assert solved.sign * solved.objective <= solved.sign * solved.bound
    assert solved.sign == (-1 if objective == "finish-time-fairness" else 1)
