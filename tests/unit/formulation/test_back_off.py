"""Failed jobs: no columns until the back-off is over, and their promises are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.last_round import NO_LEGS, Legs
from tessera.formulation.policy import Policy
from tessera.formulation.promises.backoff import back_off_s
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.registry import scheduler_of
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.driver import FOREVER, decide_round, decision_kinds

NOW_S = 1_000.0  # the time of the builders' snapshots


def a_pair(**first: Any) -> Snapshot:
    """Return two queued jobs for one node. The first has the higher value."""
    return a_snapshot(
        nodes=[a_node("n", gpus=4)],
        jobs=[
            a_job("a", **{"weight": 50.0, "requested_gpus": 4, **first}),
            a_job("b", requested_gpus=4),
        ],
        estimates=[an_estimate(gpus=4, iter_time_s=1.0)],
    )


def test_back_offs_double_up_to_half_an_hour() -> None:
    waits = [back_off_s(failures) for failures in range(1, 10)]
    assert waits == [30, 60, 120, 240, 480, 960, 1800, 1800, 1800]
    assert back_off_s(10**6) == 1800


def test_gpus_of_a_failed_job_go_to_another_job() -> None:
    snapshot = a_pair(failures=2, retry_s=NOW_S + 60.0, generation=2)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"a": DecisionKind.WAIT, "b": DecisionKind.START}
    reason = outcome.decisions[0].reason
    assert reason is not None
    assert reason.code is ReasonCode.BACK_OFF
    assert reason.message == (
        "the job failed 2 times in a row; it will be tried again at 1970-01-01T00:17:40Z"
    )
    assert dict(reason.evidence) == {"failures": "2", "retry": "1970-01-01T00:17:40Z"}


@pytest.mark.parametrize("retry_s", [0.0, NOW_S - 1.0, NOW_S])
def test_a_job_starts_once_its_back_off_is_over(retry_s: float) -> None:
    snapshot = a_pair(failures=2, retry_s=retry_s, generation=2)
    assert decision_kinds(snapshot, decide_round(snapshot, Policy()))["a"] is DecisionKind.START


@pytest.mark.parametrize(
    "policy",
    [
        Policy(queue_order=True),
        Policy(reserve_after_s=1.0),
        Policy(objective="max-min"),
        Policy(objective="jct"),
        Policy(run_to_completion=True),
    ],
)
def test_no_job_waits_for_a_job_in_back_off(policy: Policy) -> None:
    snapshot = a_pair(failures=1, retry_s=NOW_S + 60.0, generation=1, guaranteed=True)
    assert decision_kinds(snapshot, decide_round(snapshot, policy)) == {
        "a": DecisionKind.WAIT,
        "b": DecisionKind.START,
    }


def test_published_schedulers_skip_a_job_in_back_off_too() -> None:
    snapshot = a_pair(failures=1, retry_s=NOW_S + 60.0)
    outcome = plan_round(
        snapshot, Policy(), make_solver("greedy"), FOREVER, scheduler=scheduler_of("fcfs")
    )
    assert decision_kinds(snapshot, outcome) == {"a": DecisionKind.WAIT, "b": DecisionKind.START}


def a_promised_pair(legs: Legs = NO_LEGS, **more: Any) -> Snapshot:
    """Return the pair. The first job is promised a deadline with an hour to spare."""
    work = {"iterations": 3600.0, "iterations_left": 3600.0, "deadline_s": NOW_S + 7200.0}
    return replace(a_pair(admitted=True, generation=1, **work, **more), legs=legs)


@pytest.mark.parametrize("mode", ["keep", "myopic", "look-ahead"])
def test_the_promise_of_a_failed_job_is_kept_while_it_can_be_met_after_the_back_off(
    mode: str,
) -> None:
    policy = Policy(deadlines=mode)
    first = a_promised_pair()
    legs = decide_round(first, policy).legs_after(first)
    failed = a_promised_pair(legs, failures=1, retry_s=NOW_S + 30.0)
    outcome = decide_round(failed, policy)
    assert outcome.given_up == frozenset()
    assert outcome.decisions[0].kind is DecisionKind.WAIT
    assert outcome.decisions[0].admitted
    again = replace(failed, now_s=NOW_S + 31.0, legs=outcome.legs_after(failed), round_number=2)
    outcome = decide_round(again, policy)
    assert (outcome.decisions[0].kind, outcome.decisions[0].admitted) == (DecisionKind.START, True)


def test_a_back_off_that_leaves_too_little_time_waives_the_promise_with_a_reason() -> None:
    failed = a_promised_pair(
        failures=7,
        retry_s=NOW_S + 1800.0,
    )
    late = replace(
        failed,
        now_s=NOW_S + 3700.0,
        jobs=replace(failed.jobs, retry_s=failed.jobs.retry_s + 3700.0),
    )
    outcome = plan_round(
        late,
        Policy(deadlines="look-ahead"),
        make_solver("greedy"),
        Budget(remaining_s=lambda: math.inf),
    )
    assert outcome.violations == ()
    assert outcome.given_up == {0}
    reason = outcome.decisions[0].reason
    assert reason is not None
    assert reason.code is ReasonCode.BACK_OFF
