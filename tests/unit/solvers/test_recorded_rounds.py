"""Recorded rounds are decided alike for ever, and answers that a clock ended are given back."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.formulation.codec import decode
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget, Solver
from tessera.solvers.goals import solve_goals
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_random_snapshot
from tests.support.goals import a_statement, a_sum, greedy_of
from tests.support.problems import a_problem
from tests.support.proving import RecordingSolver
from tests.support.recording import load_round, load_rounds, repeat

WORK = {"cp-sat": 2.0, "greedy": 1.0, "pricing": 400.0, "lp": 100.0}

SOLVERS = [make_solver("portfolio"), Portfolio()]


def plan_with(snapshot: Snapshot, policy: Policy, by: Solver, gap: float) -> RoundOutcome:
    budget = Budget(gap=gap, work=dict(WORK), remaining_s=lambda: math.inf)
    return plan_round(snapshot, policy, by, budget)


@pytest.mark.parametrize("gap", [1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("by", SOLVERS, ids=["registered", "bare"])
def test_the_round_with_a_negative_capacity_is_decided(by: Solver, gap: float) -> None:
    recorded = Path(os.environ.get("TESSERA_DATA", "")) / "cases" / "ftf-negative-capacity.json"
    if not recorded.is_file():
        pytest.skip("the recorded round is not there; set TESSERA_DATA to the folder with cases/")
    snapshot = decode(recorded.read_bytes())
    assert isinstance(snapshot, Snapshot)

    outcome = plan_with(snapshot, Policy(objective="finish-time-fairness", round_s=300.0), by, gap)

    assert not outcome.violations
    assert [goal.gap for goal in outcome.goals] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("seed", "objective"), [(4, "max-min"), (8, "finish-time-fairness"), (25, "max-min")]
)
def test_an_unwrapped_portfolio_decides_goals_in_order_identically(
    seed: int, objective: str
) -> None:
    snapshot = a_random_snapshot(seed, jobs=3)

    registered, bare = (
        plan_with(snapshot, Policy(objective=objective), by, 1e-6) for by in SOLVERS
    )

    assert not bare.violations
    assert bare.goals == registered.goals
    assert bare.solution.choice.tolist() == registered.solution.choice.tolist()


def test_recorded_rounds_exist() -> None:
    assert len(load_rounds()) > 50


@pytest.mark.parametrize("path", load_rounds(), ids=lambda path: path.name.partition(".")[0])
def test_a_recorded_round_is_decided_as_recorded(path: Path) -> None:
    recorded = load_round(path)

    assert repeat(recorded) == recorded.decided


def test_a_round_is_decided_alike_on_another_processor() -> None:
    """The order in which BLAS adds depends on the processor; it must not change a decision."""
    program = (
        "import sys; from pathlib import Path; from tests.support.recording import *\n"
        "rounds = [load_round(Path(path)) for path in sys.argv[1:]]\n"
        "sys.exit(int(any(repeat(one) != one.decided for one in rounds)))"
    )
    names = ("objective-deadline-2", "drawn-10", "solver-portfolio-7")
    paths = [str(path) for path in load_rounds() if path.name.partition(".")[0] in names]
    assert len(paths) == len(names)
    for processor in ("Prescott", "Haswell"):
        environment = os.environ | {"OPENBLAS_CORETYPE": processor}
        subprocess.run([sys.executable, "-c", program, *paths], env=environment, check=True)


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
