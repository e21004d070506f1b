"""Laws of every published scheduler: choices that fit and repeat, and rounds that break no rule."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.information import Information, all_estimates, searched_optimum, single_gpu
from tessera.formulation.lifecycle import SCHEDULABLE
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import STATES, Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.base import PublishedScheduler, Scheduler
from tessera.solvers.schedulers.registry import make_scheduler, scheduler_names
from tests.support.builders import a_random_snapshot
from tests.support.laws import examples
from tests.support.snapshots import snapshots

LAW = examples(25)
NAMES = pytest.mark.parametrize("name", scheduler_names())
FOREVER = Budget(remaining_s=lambda: math.inf)


@cache
def policy_of(name: str) -> PublishedScheduler:
    return make_scheduler(name)


@cache
def another_cluster() -> Snapshot:
    return a_random_snapshot(5, jobs=6)


def outcome(
    snapshot: Snapshot, name: str, information: Information = all_estimates
) -> RoundOutcome:
    return plan_round(
        snapshot,
        Policy(),
        Greedy(),
        FOREVER,
        scheduler=Scheduler(published=policy_of(name), information=information),
    )


@NAMES
@LAW
@given(snapshot=snapshots())
def test_a_round_of_any_scheduler_breaks_no_rule_and_explains_waiting_jobs(
    name: str, snapshot: Snapshot
) -> None:
    result = outcome(snapshot, name)
    assert result.violations == ()
    assert [d.job for d in result.decisions] == list(range(len(snapshot.jobs)))
    for decision in result.decisions:
        says_why = decision.gang is None or decision.kind is DecisionKind.REPLAN
        assert says_why == (decision.reason is not None)
        if decision.gang is not None:
            assert STATES[int(snapshot.jobs.state[decision.job])] in SCHEDULABLE


@NAMES
@LAW
@given(snapshot=snapshots())
def test_a_scheduler_keeps_no_state_between_rounds(name: str, snapshot: Snapshot) -> None:
    first = outcome(snapshot, name).decisions
    outcome(another_cluster(), name)
    assert first == outcome(snapshot, name).decisions
    other = plan_round(
        snapshot, Policy(), Greedy(), FOREVER, scheduler=Scheduler(published=make_scheduler(name))
    )
    assert first == other.decisions


@NAMES
@pytest.mark.parametrize(
    "information", [searched_optimum, single_gpu(1)], ids=["optimum", "single-gpu"]
)
def test_a_scheduler_with_other_estimates_still_makes_a_round_that_breaks_no_rule(
    name: str, information: Information
) -> None:
    for seed in range(3):
        result = outcome(a_random_snapshot(seed, jobs=12), name, information)
        assert result.violations == ()
        started = [d for d in result.decisions if d.kind is DecisionKind.START]
        assert len(started) > 0
