"""Rounds that once ended in an error: one that was recorded elsewhere, and similar small ones."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tessera.formulation.codec import decode
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget, Solver
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_random_snapshot

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
