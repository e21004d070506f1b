"""Each promise and each limit, in the smallest round that shows it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.check import find_placement_violations, find_violations
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.policy import MAX_SPACING, Policy
from tessera.formulation.round.promises.guarantee import request_rate
from tessera.formulation.round.statement import Statement, state_round
from tessera.formulation.state.snapshot import Snapshot
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate, some_nodes
from tests.support.driver import (
    decide_round,
    decision_kinds,
    reason_of,
    with_avoided_nodes,
    with_quotas,
)

START, KEEP, WAIT = DecisionKind.START, DecisionKind.KEEP, DecisionKind.WAIT
SUSPEND, RESIZE, MOVE = DecisionKind.SUSPEND, DecisionKind.RESIZE, DecisionKind.MOVE

LINEAR = [an_estimate(gpus=n, iter_time_s=1 / n) for n in (1, 2, 4)]
"""Workload 0 on a100: rate 256 samples/s a GPU."""

FOUR_ONLY = [an_estimate(1, gpus=4, iter_time_s=0.25)]
"""Workload 1 runs on exactly 4 GPUs."""


def gang_on(node: int, *gpus: int) -> Gang:
    return Gang(members=((node, gpus),))


def a_running_job(name: str, gpus: int, workload: int = 0, **overrides: Any) -> dict[str, Any]:
    """Return a job that has run since second 500 on the ``gpus`` GPUs of type 0 that it asked for."""
    settings = {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 500.0}
    settings |= {"requested_gpus": gpus}
    return a_job(name, workload, **(settings | overrides))


def columns_of_job(statement: Statement, job: int) -> set[tuple[int, int]]:
    """Return (type, GPUs) of each column of ``job``."""
    problem = statement.problem
    cell = problem.cell[list(problem.columns_of(job))]
    return set(
        zip(problem.cells.gpu_type[cell].tolist(), problem.cells.gpus[cell].tolist(), strict=True)
    )


def a_snapshot_of_two_types(*jobs: dict[str, Any], **more: Any) -> Snapshot:
    estimates = [*LINEAR, *(an_estimate(0, 1, n, iter_time_s=2 / n) for n in (1, 2, 4, 8))]
    nodes = some_nodes((0, 2, 4), (1, 1, 8))
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=estimates, **more)


# pins and avoided nodes


def test_a_pinned_job_has_columns_only_on_its_type_and_a_requested_type_is_no_pin() -> None:
    snapshot = a_snapshot_of_two_types(
        a_job("pinned", requested_gpu_type=0, pinned_gpu_type=True),
        a_job("wishes", requested_gpu_type=0),
        a_job("any", pinned_gpu_type=True),
    )
    stated = state_round(snapshot, Policy())
    assert {t for t, _ in columns_of_job(stated, 0)} == {0}
    assert (
        {t for t, _ in columns_of_job(stated, 1)}
        == {t for t, _ in columns_of_job(stated, 2)}
        == {0, 1}
    )


def test_a_job_pinned_to_a_type_without_cells_gets_the_contradiction_as_its_reason() -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4), (1, 1, 8)),
        estimates=LINEAR,
        jobs=[a_job("j", requested_gpu_type=1, pinned_gpu_type=True)],
    )
    reason = reason_of(decide_round(snapshot, Policy()).decisions[0])
    assert reason.code is ReasonCode.PINS_CONTRADICT
    assert "pinned to v100" in str(reason.message)


def test_the_checker_refuses_a_job_on_a_node_that_it_avoids() -> None:
    snapshot = a_snapshot_of_two_types(a_job("j"))
    outcome = decide_round(snapshot, Policy())
    node = outcome.placed.placement.gangs[0].members[0][0]
    broken = find_placement_violations(
        with_avoided_nodes(snapshot, (0, node)),
        outcome.problem,
        outcome.solution,
        outcome.placed.placement,
    )
    assert [v.rule for v in broken] == ["avoided node"]


# guarantees


def a_guaranteed_job(name: str = "j", gpus: int = 2, **overrides: Any) -> dict[str, Any]:
    return a_job(name, **({"guaranteed": True, "requested_gpus": gpus} | overrides))


def test_the_requested_rate_is_that_of_its_type_or_of_the_slowest_if_any_type_will_do() -> None:
    snapshot = a_snapshot_of_two_types(
        a_guaranteed_job(requested_gpu_type=0),
        a_guaranteed_job(requested_gpu_type=1),
        a_guaranteed_job(),
        a_guaranteed_job(gpus=3),
        a_job("best effort"),
    )
    rate = request_rate(first_draft(snapshot, Policy()))
    assert rate.tolist() == pytest.approx([512, 256, 256, math.nan, 0], nan_ok=True)


def test_a_request_without_a_cell_is_reported_and_the_round_continues() -> None:
    outcome = decide_round(a_snapshot_of_two_types(a_guaranteed_job(gpus=3), a_job("k")), Policy())
    assert reason_of(outcome.decisions[0]).code is ReasonCode.GUARANTEE_UNMET
    assert "3 x any type" in str(reason_of(outcome.decisions[0]).message)
    assert outcome.decisions[1].kind is START


def test_a_guarantee_does_not_shrink_while_nodes_are_away() -> None:
    nodes = [*some_nodes((0, 1, 2)), a_node("silent", 0, 4, schedulable=False)]
    snapshot = a_snapshot(nodes=nodes, estimates=LINEAR, jobs=[a_guaranteed_job(gpus=4)])
    outcome = decide_round(snapshot, Policy())
    assert reason_of(outcome.decisions[0]).code is ReasonCode.GUARANTEE_UNMET
    assert dict(reason_of(outcome.decisions[0]).evidence)["guaranteed samples/s"] == "1024"


def test_a_launched_job_below_its_guarantee_moves_up_or_stays_if_nothing_is_faster() -> None:
    slow = a_running_job("j", 2, guaranteed=True, requested_gpus=4)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)), estimates=LINEAR, jobs=[slow], gangs={0: gang_on(0, 0, 1)}
    )
    assert decide_round(snapshot, Policy()).decisions[0].cell.gpus == 4
    smaller = replace(snapshot, nodes=replace(snapshot.nodes, gpus=np.array([3])))
    assert decide_round(smaller, Policy()).decisions[0].kind is KEEP


# quotas


def test_guaranteed_jobs_are_charged_their_minimum_demand_up_to_the_quota() -> None:
    jobs = [a_guaranteed_job(f"j{k}", requested_gpu_type=0) for k in range(4)]
    snapshot = with_quotas(a_snapshot_of_two_types(*jobs), {"t": {-1: 4}})
    outcome = decide_round(snapshot, Policy())
    assert list(decision_kinds(snapshot, outcome).values()) == [START, START, WAIT, WAIT]
    assert reason_of(outcome.decisions[2]).code is ReasonCode.QUOTA_SPENT
    assert outcome.decisions[0].cell.gpus >= 2
    assert "quota of t for guaranteed jobs is 4 GPUs, of which 0 are left" in str(
        reason_of(outcome.decisions[2]).message
    )


@pytest.mark.parametrize(("quota", "waits"), [(1, False), (3, True)])
def test_a_job_is_told_to_wait_for_others_only_if_the_whole_quota_has_room_for_it(
    quota: int, waits: bool
) -> None:
    jobs = [a_guaranteed_job(f"j{k}", requested_gpu_type=0) for k in range(2)]
    snapshot = with_quotas(a_snapshot_of_two_types(*jobs), {"t": {-1: quota}})
    reason = reason_of(decide_round(snapshot, Policy()).decisions[1])
    assert reason.code is ReasonCode.QUOTA_SPENT
    assert str(reason.next_step).startswith("wait for a guaranteed job") == waits
    assert str(reason.next_step).endswith("raise the quota, or submit the job as best effort")


def test_a_tenant_borrows_no_more_than_allowed() -> None:
    jobs = [a_job(f"j{k}") for k in range(3)]
    snapshot = with_quotas(a_snapshot_of_two_types(*jobs), {"t": {-1: 2}}, borrow={"t": 3})
    outcome = decide_round(snapshot, Policy(), "portfolio")
    assert sum(d.cell.gpus for d in outcome.decisions) == 5
    far = with_quotas(a_snapshot_of_two_types(*jobs), {"t": {-1: 2}})
    assert sum(d.cell.gpus for d in decide_round(far, Policy()).decisions) > 5


def test_a_tenant_at_its_borrowing_limit_gets_that_reason() -> None:
    jobs = [a_running_job("j", 4), a_job("k", 1)]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        estimates=[*LINEAR, *FOUR_ONLY],
        jobs=jobs,
        gangs={0: gang_on(0, 0, 1, 2, 3)},
    )
    outcome = decide_round(
        with_quotas(snapshot, {"t": {-1: 4}}, borrow={"t": 2}),
        Policy(objective="throughput"),
    )
    assert reason_of(outcome.decisions[1]).code is ReasonCode.QUOTA_SPENT
    assert "t may hold 6 GPUs" in str(reason_of(outcome.decisions[1]).message)


def test_an_unlent_quota_stays_free() -> None:
    jobs = [a_job(f"j{k}", tenant="u") for k in range(5)]
    snapshot = a_snapshot(nodes=some_nodes((0, 2, 4)), estimates=LINEAR, jobs=jobs)
    kept = with_quotas(snapshot, {"t": {-1: 3}}, keeps=["t"])
    assert sum(d.cell.gpus for d in decide_round(kept, Policy()).decisions) == 5
    lent = with_quotas(snapshot, {"t": {-1: 3}})
    assert sum(d.cell.gpus for d in decide_round(lent, Policy()).decisions) == 8


# the cap on changes


def a_fragmented_snapshot() -> Snapshot:
    """Return two small jobs on two nodes, which fit on one, and a job that needs a whole node."""
    jobs = [a_running_job("a", 2), a_running_job("b", 2), a_job("big", 1, weight=5.0)]
    return a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        jobs=jobs,
        workloads=2,
        estimates=[
            an_estimate(gpus=2),
            *FOUR_ONLY,
            an_estimate(1, gpus=4, nodes=2, iter_time_s=math.inf),
        ],
        gangs={0: gang_on(0, 0, 1), 1: gang_on(1, 0, 1)},
    )


def test_moves_within_a_column_count_as_changes() -> None:
    free_outcome = decide_round(a_fragmented_snapshot(), Policy())
    assert sorted(d.kind for d in free_outcome.decisions) == sorted([KEEP, MOVE, START])
    outcome_of_cap = decide_round(a_fragmented_snapshot(), Policy(max_changes=0))
    assert [d.kind for d in outcome_of_cap.decisions] == [KEEP, KEEP, WAIT]
    mended = decide_round(
        a_fragmented_snapshot(),
        Policy(max_changes=0, defragment_every_rounds=1),
    )
    assert mended.placed.placement.migrated == frozenset()


def test_the_checker_counts_moves_with_the_other_changes() -> None:
    moved = decide_round(a_fragmented_snapshot(), Policy(max_changes=1))
    assert len(moved.placed.placement.migrated) == 1
    row = [replace(r, capacity=0) if r.name == "changes" else r for r in moved.problem.rows]
    problem = replace(moved.problem, rows=tuple(row))
    broken = find_placement_violations(
        a_fragmented_snapshot(), problem, moved.solution, moved.placed.placement
    )
    assert [v.rule for v in broken] == ["changes"]
    assert not [v for v in find_violations(problem, moved.solution) if v.rule == "capacity"]


# laws over time


def a_full_node(old: dict[str, Any], policy: Policy, **more: Any) -> list[DecisionKind]:
    """Return the decisions on a job with all 4 GPUs, and on one that is worth 99 times as much.

    A restart of the first takes 60 s. It has run for 500 s.
    """
    jobs = [
        a_running_job("old", 4, **({"restart_s": 60.0} | old)),
        a_job("new", 1, weight=99.0, requested_gpus=4, **more),
    ]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)),
        estimates=[*LINEAR, *FOUR_ONLY],
        jobs=jobs,
        gangs={0: gang_on(0, 0, 1, 2, 3)},
    )
    return [d.kind for d in decide_round(snapshot, policy).decisions]


@pytest.mark.parametrize(
    ("since_s", "restart_s", "spacing", "stays"),
    [
        (701.0, 60.0, 4.0, True),  # 299 s of (4 + 1) x 60 s
        (700.0, 60.0, 4.0, False),
        (701.0, 59.8, 4.0, False),  # 5 x 59.8 s are 299 s
        (881.0, 60.0, 1.0, True),  # 119 s of 120 s
        (880.0, 60.0, 1.0, False),
        (999.0, 60.0, 0.0, False),  # no limit
        (999.0, 0.0, 4.0, False),  # a restart costs nothing
    ],
)
def test_a_job_runs_its_restart_time_many_times_before_a_round_changes_it(
    since_s: float, restart_s: float, spacing: float, stays: bool
) -> None:
    old = {"since_s": since_s, "restart_s": restart_s}
    policy = Policy(keep_requests=False, change_spacing=spacing)
    assert a_full_node(old, policy) == ([KEEP, WAIT] if stays else [SUSPEND, START])


def test_a_young_job_on_a_node_that_is_lost_may_change_at_once() -> None:
    young = a_running_job("young", 2, since_s=999.0, restart_s=60.0)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 2)), estimates=LINEAR, jobs=[young], gangs={0: gang_on(0, 0, 1)}
    )
    assert decide_round(snapshot, Policy()).decisions[0].kind is KEEP
    nodes = replace(snapshot.nodes, schedulable=np.array([False, True]))
    assert decide_round(replace(snapshot, nodes=nodes), Policy()).decisions[0].kind is MOVE


@pytest.mark.parametrize("spacing", [-1.0, math.nan, math.inf, 2 * MAX_SPACING])
def test_a_spacing_of_changes_without_meaning_is_refused(spacing: float) -> None:
    with pytest.raises(InvalidInput, match="must be 0 \\(no limit\\) or a number of restart times"):
        Policy(change_spacing=spacing)


def test_a_job_with_what_it_asked_for_is_suspended_for_no_others_gain() -> None:
    assert a_full_node({}, Policy()) == [KEEP, WAIT]
    assert a_full_node({}, Policy(keep_requests=False)) == [SUSPEND, START]
    assert a_full_node({"preemptible": True}, Policy()) == [SUSPEND, START]


def test_a_job_with_more_than_it_asked_for_is_shrunk_to_its_request_and_no_further() -> None:
    jobs = [a_running_job("old", 4, requested_gpus=2), a_job("new", weight=99.0, requested_gpus=4)]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)),
        estimates=LINEAR,
        jobs=jobs,
        gangs={0: gang_on(0, 0, 1, 2, 3)},
    )
    outcome = decide_round(snapshot, Policy(objective="throughput"))
    assert [(d.kind, d.cell.gpus) for d in outcome.decisions] == [(RESIZE, 2), (START, 2)]
    free = decide_round(snapshot, Policy(objective="throughput", keep_requests=False))
    assert [d.cell.gpus for d in free.decisions] == [0, 4]
    small = replace(snapshot, jobs=replace(snapshot.jobs, requested_gpus=np.array([8, 4])))
    assert [d.kind for d in decide_round(small, Policy()).decisions] == [KEEP, WAIT]


def test_a_job_on_the_type_it_asked_for_gets_no_slower_one() -> None:
    """Two v100 are half as fast as two a100, and four are as fast."""
    old = a_running_job("old", 2, requested_gpu_type=0)
    snapshot = a_snapshot_of_two_types(old, gangs={0: gang_on(0, 0, 1)})
    kept = state_round(snapshot, Policy())
    assert columns_of_job(kept, 0) == {(0, 2), (0, 4), (1, 4), (1, 8)}
    anywhere = replace(snapshot, jobs=replace(snapshot.jobs, requested_gpu_type=np.array([-1])))
    assert columns_of_job(state_round(anywhere, Policy()), 0) == {
        (0, 2),
        (0, 4),
        *((1, n) for n in (2, 4, 8)),
    }


def test_running_jobs_give_way_to_a_guaranteed_job_within_its_quota() -> None:
    assert a_full_node({}, Policy(), guaranteed=True) == [SUSPEND, START]
    young = {"since_s": 999.0}
    assert a_full_node(young, Policy(), guaranteed=True) == [KEEP, WAIT]


def test_a_job_of_unknown_rate_is_protected_for_as_long_as_it_is_taken_to_run() -> None:
    unknown = {"assumed_efficiency": 0.3}
    assert a_full_node(unknown, Policy(default_run_s=501.0)) == [KEEP, WAIT]
    assert a_full_node(unknown, Policy(default_run_s=500.0)) == [SUSPEND, START]
    assert a_full_node({}, Policy(default_run_s=500.0)) == [KEEP, WAIT]
