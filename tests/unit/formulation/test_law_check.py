"""The checker of the laws over time finds each breach in a placement that was tampered with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.law_check import find_law_violations
from tessera.formulation.answer.placement import Gang, Placement, current_gangs
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.last_round import PlannedStarts
from tessera.formulation.state.snapshot import Snapshot
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes, state_freely
from tests.support.driver import with_quotas

FOUR, TWO = Gang(members=((0, (0, 1, 2, 3)),)), Gang(members=((0, (0, 1)),))
OTHER_NODE = Gang(members=((1, (0, 1, 2, 3)),))
STAYS = Placement(gangs={0: FOUR})
NO_JOBS = frozenset[int]()


def a_round(*more_jobs: dict[str, Any], **changes: Any) -> Snapshot:
    """Return two nodes of four GPUs. ``old`` has run on the first one since second 500."""
    row: dict[str, Any] = {
        "state": JobState.RUNNING,
        "cell": (0, 4, 1),
        "since_s": 500.0,
        "requested_gpus": 4,
    }
    return a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        jobs=[a_job("old", **(row | changes)), *more_jobs],
        estimates=[an_estimate(gpus=n, iter_time_s=1 / n) for n in (1, 2, 4)],
        gangs={0: FOUR},
    )


def rules_broken(
    snapshot: Snapshot,
    placement: Placement,
    policy: Policy | None = None,
    *,
    given_up: frozenset[int] = NO_JOBS,
    must_run: tuple[int, ...] = (),
) -> list[tuple[str, str]]:
    """Return the rule and the detail of each violation."""
    policy = policy or Policy()
    problem = state_freely(snapshot, policy).problem
    runs = np.isin(np.arange(len(snapshot.jobs)), must_run)
    problem = replace(problem, must_run=runs)
    gangs = current_gangs(snapshot)
    violations = find_law_violations(snapshot, policy, problem, placement, gangs, given_up)
    return [(v.rule, v.detail) for v in violations]


def test_a_job_that_stays_breaks_no_law() -> None:
    assert rules_broken(a_round(), STAYS) == []
    assert rules_broken(a_round(since_s=999.0, restart_s=10.0), STAYS) == []


@pytest.mark.parametrize("gang", [OTHER_NODE, Gang(members=(*FOUR.members, *OTHER_NODE.members))])
def test_a_job_that_changes_before_it_has_settled_is_found(gang: Gang) -> None:
    """It settles 5 restart times of 10 s after second 990."""
    snapshot = a_round(since_s=990.0, restart_s=10.0)
    detail = "old changes 40 s too soon"
    assert rules_broken(snapshot, Placement(gangs={0: gang})) == [("settling", detail)]
    free = Policy(change_spacing=0.0)
    assert rules_broken(snapshot, Placement(gangs={0: gang}), free) == []


def test_a_job_may_change_from_the_moment_on_at_which_it_has_settled() -> None:
    snapshot = a_round(since_s=950.0, restart_s=10.0)
    assert rules_broken(snapshot, Placement(gangs={0: OTHER_NODE})) == []


@pytest.mark.parametrize(("gangs", "gpus"), [({}, 0), ({0: TWO}, 2)])
def test_a_job_that_loses_gpus_of_its_request_is_found(gangs: dict[int, Gang], gpus: int) -> None:
    detail = f"old gets {gpus} of the 4 GPUs that it may keep"
    assert rules_broken(a_round(), Placement(gangs=gangs)) == [("kept request", detail)]


def test_a_job_keeps_no_more_than_its_request_and_no_more_than_it_has() -> None:
    shrinks = Placement(gangs={0: TWO})
    assert rules_broken(a_round(requested_gpus=2), shrinks) == []
    assert rules_broken(a_round(requested_gpus=8), STAYS) == []
    detail = "old gets 2 of the 4 GPUs that it may keep"
    assert rules_broken(a_round(requested_gpus=8), shrinks) == [("kept request", detail)]


@pytest.mark.parametrize(
    "changes",
    [
        {"preemptible": True},
        {"opportunistic": True},
        {"weight": 0.0},
        {"unestimated": True, "assumed_efficiency": 1.0},
    ],
)
def test_jobs_that_may_be_suspended_lose_their_gpus_without_a_breach(
    changes: dict[str, Any],
) -> None:
    assert rules_broken(a_round(**changes), Placement()) == []


def test_policies_and_promises_that_are_given_up_make_exceptions() -> None:
    assert rules_broken(a_round(), Placement(), Policy(keep_requests=False)) == []
    assert rules_broken(a_round(), Placement(), given_up=frozenset({0})) == []


def a_round_with_a_planned_start(start_s: float) -> Snapshot:
    cell = {"gpu_type": 0, "gpus": 4, "pipeline_degree": 1, "plan": 0}
    row = {"job": 1, "start_s": start_s, "end_s": start_s + 100.0, **cell}
    snapshot = a_round(a_job("new", requested_gpus=4))
    return replace(snapshot, planned_starts=PlannedStarts.from_rows([row]))


def test_a_start_that_is_due_and_does_not_take_place_is_found() -> None:
    snapshot = a_round_with_a_planned_start(1000.0)
    detail = "new was to start now, and does not"
    assert rules_broken(snapshot, STAYS, must_run=(1,)) == [("planned start", detail)]
    placement = Placement(gangs={0: FOUR, 1: OTHER_NODE})
    assert rules_broken(snapshot, placement, must_run=(1,)) == []


def test_a_start_that_is_not_due_or_given_up_or_not_promised_may_wait() -> None:
    later_round = a_round_with_a_planned_start(1000.1)
    assert rules_broken(later_round, STAYS, must_run=(1,)) == []
    snapshot = a_round_with_a_planned_start(1000.0)
    assert rules_broken(snapshot, STAYS) == []
    assert rules_broken(snapshot, STAYS, must_run=(1,), given_up=frozenset({1})) == []
    assert rules_broken(snapshot, STAYS, Policy(promise_starts=False), must_run=(1,)) == []


def test_rounds_with_other_promises_are_not_checked() -> None:
    assert rules_broken(a_round(guaranteed=True), Placement()) == []
    assert rules_broken(a_round(admitted=True), Placement()) == []
    assert rules_broken(with_quotas(a_round(), {"t": {-1: 2}}), Placement()) == []
    round_with_deadline = a_round(deadline_s=9e9)
    assert rules_broken(round_with_deadline, Placement(), Policy(deadlines="look-ahead")) == []
    assert len(rules_broken(round_with_deadline, Placement(), Policy(deadlines="ignore"))) == 1
