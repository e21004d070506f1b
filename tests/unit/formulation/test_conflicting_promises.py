"""Conflicting promises: the cap on changes yields, and only promises that were made are waived."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.problem import RowKind
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate, some_nodes
from tests.support.driver import decide_round

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


def decision_kinds(outcome: RoundOutcome) -> list[DecisionKind]:
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
    assert decision_kinds(outcome) == [SUSPEND] * 4 + [START]
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
    assert decision_kinds(outcome) == [SUSPEND, KEEP, KEEP, START, WAIT]
    assert change_limit(outcome) == 1


def test_placement_may_exceed_the_change_limit_if_a_promise_finds_no_blocks_within_it() -> None:
    spread = [a_running_job_and_gang(f"r{k}", k % 2, (k // 2,), weight=9.0) for k in range(8)]
    outcome = decide_round(
        a_round(spread, a_job("due", 1, **DUE), nodes=2), Policy(deadlines="myopic", max_changes=0)
    )
    assert outcome.decisions[8].kind is START
    assert outcome.given_up == frozenset()
    assert 4 <= 8 - decision_kinds(outcome).count(KEEP) <= change_limit(outcome)


def test_a_guaranteed_job_that_lost_its_node_overrides_the_limit_on_changes() -> None:
    lost = a_job(
        "lost",
        1,
        state=JobState.RUNNING,
        cell=(0, 4, 1),
        since_s=500.0,
        guaranteed=True,
        requested_gpus=4,
    )
    small = [a_running_job_and_gang(f"r{k}", 0, (k,), weight=9.0) for k in range(4)]
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=4), a_node("gone", gpus=4, schedulable=False)],
        estimates=CELLS,
        jobs=[*(job for job, _ in small), lost],
        workloads=2,
        gangs={**{k: g for k, (_, g) in enumerate(small)}, 4: Gang(members=((1, (0, 1, 2, 3)),))},
    )
    outcome = decide_round(snapshot, Policy(max_changes=0))
    assert decision_kinds(outcome) == [SUSPEND] * 4 + [MOVE]
    assert outcome.given_up == frozenset()


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
    assert decision_kinds(outcome) == [KEEP, KEEP, WAIT]
    assert outcome.given_up == {2}
    assert change_limit(outcome) == 0
    reason = outcome.decisions[2].reason
    assert reason is not None
    assert reason.code is ReasonCode.PROMISE_GIVEN_UP


def test_a_queued_start_that_finds_no_blocks_is_no_broken_promise() -> None:
    fixed = [
        a_running_job_and_gang(f"r{k}", k, (0,), movable=False, guaranteed=True) for k in range(2)
    ]
    outcome = decide_round(
        a_round(fixed, a_job("first", 1), nodes=2), Policy(queue_order=True, min_run_s=1e4)
    )
    assert decision_kinds(outcome) == [KEEP, KEEP, WAIT]
    reason = outcome.decisions[2].reason
    assert reason is not None
    assert reason.code is ReasonCode.FRAGMENTED
    assert outcome.given_up == frozenset()
