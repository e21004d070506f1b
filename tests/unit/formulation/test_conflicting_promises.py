"""Promises that conflict with limits, and those of failed jobs, whose back-off takes time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import RowKind
from tessera.formulation.state.last_round import NO_SEGMENTS, ScheduleSegments
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_of
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate, some_nodes
from tests.support.driver import FOREVER, decide_round, decision_kinds, reason_of

START, KEEP, WAIT = DecisionKind.START, DecisionKind.KEEP, DecisionKind.WAIT

SUSPEND, MOVE = DecisionKind.SUSPEND, DecisionKind.MOVE


CELLS = [
    *(an_estimate(gpus=n, iter_time_s=1 / n) for n in (1, 2, 4)),
    an_estimate(1, gpus=4, iter_time_s=0.25),
    an_estimate(1, gpus=4, nodes=2, iter_time_s=float("inf")),
]
"""Workload 0 trains on 1, 2 or 4 GPUs; workload 1 only on 4 GPUs of one node."""


def a_running_job_and_gang(
    name: str, node: int, gpus: tuple[int, ...], **more: Any
) -> tuple[dict[str, Any], Gang]:
    """Return a job that has run since second 500 on the given GPUs of a node, and its gang."""
    defaults: dict[str, Any] = {
        "state": JobState.RUNNING,
        "cell": (0, len(gpus), 1),
        "since_s": 500.0,
    }
    return a_job(name, **(defaults | more)), Gang(members=((node, gpus),))


def a_round(
    launched: list[tuple[dict[str, Any], Gang]], *waiting: dict[str, Any], nodes: int = 1
) -> Snapshot:
    """Return four-GPU nodes with the given jobs, the launched ones first."""
    jobs = [*(job for job, _ in launched), *waiting]
    gangs = {k: gang for k, (_, gang) in enumerate(launched)}
    return a_snapshot(
        nodes=some_nodes((0, nodes, 4)), estimates=CELLS, jobs=jobs, gangs=gangs, workloads=2
    )


def kinds_of(outcome: RoundOutcome) -> list[DecisionKind]:
    return [d.kind for d in outcome.decisions]


def change_limit(outcome: RoundOutcome) -> int:
    return next(row.capacity for row in outcome.problem.rows if row.kind is RowKind.CHANGES)


DUE: dict[str, Any] = {
    "admitted": True,
    "deadline_s": 2e6,
    "iterations": 1e3,
    "iterations_left": 1e3,
}


@pytest.mark.parametrize("most", [0, 1, 2])
def test_an_admitted_deadline_overrides_the_limit_on_changes(most: int) -> None:
    small = [a_running_job_and_gang(f"r{k}", 0, (k,), weight=9.0) for k in range(4)]
    outcome = decide_round(
        a_round(small, a_job("due", 1, **DUE)), Policy(deadlines="myopic", max_changes=most)
    )
    assert kinds_of(outcome) == [SUSPEND] * 4 + [START]
    assert outcome.given_up == frozenset()


def test_no_more_is_changed_than_a_promise_forces() -> None:
    launched = [
        a_running_job_and_gang("big", 0, (0, 1, 2, 3)),
        a_running_job_and_gang("a", 1, (0, 1)),
        a_running_job_and_gang("b", 1, (2, 3)),
    ]
    outcome = decide_round(
        a_round(launched, a_job("due", 1, **DUE), a_job("dear", 1, weight=9.0), nodes=2),
        Policy(deadlines="myopic", max_changes=0),
    )
    assert kinds_of(outcome) == [SUSPEND, KEEP, KEEP, START, WAIT]
    assert change_limit(outcome) == 1


def test_placement_may_exceed_the_change_limit_if_a_promise_finds_no_blocks_within_it() -> None:
    spread = [a_running_job_and_gang(f"r{k}", k % 2, (k // 2,), weight=9.0) for k in range(8)]
    outcome = decide_round(
        a_round(spread, a_job("due", 1, **DUE), nodes=2), Policy(deadlines="myopic", max_changes=0)
    )
    assert outcome.decisions[8].kind is START
    assert outcome.given_up == frozenset()
    assert 4 <= 8 - kinds_of(outcome).count(KEEP) <= change_limit(outcome)


def test_the_change_limit_holds_again_once_impossible_promises_are_waived() -> None:
    promised = [
        a_running_job_and_gang(
            f"g{k}", k, (0, 1, 2, 3), workload=1, guaranteed=True, requested_gpus=4
        )
        for k in range(2)
    ]
    due = a_job("due", 1, weight=0.1, **DUE)
    outcome = decide_round(
        a_round(promised, due, nodes=2), Policy(deadlines="myopic", max_changes=0)
    )
    assert kinds_of(outcome) == [KEEP, KEEP, WAIT]
    assert outcome.given_up == {2}
    assert change_limit(outcome) == 0
    assert reason_of(outcome.decisions[2]).code is ReasonCode.PROMISE_GIVEN_UP


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


def test_gpus_of_a_failed_job_go_to_another_job() -> None:
    snapshot = a_pair(failures=2, retry_s=NOW_S + 60.0, generation=2)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"a": DecisionKind.WAIT, "b": DecisionKind.START}
    reason = reason_of(outcome.decisions[0])
    assert reason.code is ReasonCode.BACK_OFF
    assert reason.message == (
        "the job failed 2 times in a row; it will be tried again at 1970-01-01T00:17:40Z"
    )
    assert dict(reason.evidence) == {"failures": "2", "retry": "1970-01-01T00:17:40Z"}


@pytest.mark.parametrize("retry_s", [0.0, NOW_S - 1.0, NOW_S])
def test_a_job_starts_once_its_back_off_is_over(retry_s: float) -> None:
    snapshot = a_pair(failures=2, retry_s=retry_s, generation=2)
    assert decision_kinds(snapshot, decide_round(snapshot, Policy()))["a"] is DecisionKind.START


def test_published_schedulers_skip_a_job_in_back_off_too() -> None:
    snapshot = a_pair(failures=1, retry_s=NOW_S + 60.0)
    outcome = plan_round(
        snapshot, Policy(), make_solver("greedy"), FOREVER, scheduler=scheduler_of("fcfs")
    )
    assert decision_kinds(snapshot, outcome) == {"a": DecisionKind.WAIT, "b": DecisionKind.START}


def a_promised_pair(segments: ScheduleSegments = NO_SEGMENTS, **more: Any) -> Snapshot:
    """Return the pair. The first job is promised a deadline with an hour to spare."""
    work = {"iterations": 3600.0, "iterations_left": 3600.0, "deadline_s": NOW_S + 7200.0}
    return replace(a_pair(admitted=True, generation=1, **work, **more), schedule_segments=segments)


@pytest.mark.parametrize("mode", ["keep", "myopic", "look-ahead"])
def test_the_promise_of_a_failed_job_is_kept_while_it_can_be_met_after_the_back_off(
    mode: str,
) -> None:
    policy = Policy(deadlines=mode)
    first = a_promised_pair()
    segments = decide_round(first, policy).segments_after(first)
    failed = a_promised_pair(segments, failures=1, retry_s=NOW_S + 30.0)
    outcome = decide_round(failed, policy)
    assert outcome.given_up == frozenset()
    assert outcome.decisions[0].kind is DecisionKind.WAIT
    assert outcome.decisions[0].admitted
    again = replace(
        failed, now_s=NOW_S + 31.0, schedule_segments=outcome.segments_after(failed), round_number=2
    )
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
    assert reason_of(outcome.decisions[0]).code is ReasonCode.BACK_OFF
