"""Each promise and each limit, in the smallest round that shows it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.check import find_placement_violations, find_violations
from tessera.formulation.columns import first_draft
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.promises.guarantee import request_rate
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import Statement, state_round
from tessera.solvers.rounds.plan import RoundOutcome
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

EIGHT_ONLY = [an_estimate(2, gpus=8, nodes=2, iter_time_s=0.125)]


def gang_on(node: int, *gpus: int) -> Gang:
    return Gang(members=((node, gpus),))


def a_running_job(name: str, gpus: int, workload: int = 0, **overrides: Any) -> dict[str, Any]:
    """Return a job that has run since second 500 on ``gpus`` GPUs of type 0."""
    settings = {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 500.0}
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
        a_job("pinned", requested_type=0, pinned_type=True),
        a_job("wishes", requested_type=0),
        a_job("any", pinned_type=True),
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
        jobs=[a_job("j", requested_type=1, pinned_type=True)],
    )
    reason = reason_of(decide_round(snapshot, Policy()).decisions[0])
    assert reason.code is ReasonCode.PINS_CONTRADICT
    assert "pinned to v100" in reason.message


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
        a_guaranteed_job(requested_type=0),
        a_guaranteed_job(requested_type=1),
        a_guaranteed_job(),
        a_guaranteed_job(gpus=3),
        a_job("best effort"),
    )
    rate = request_rate(first_draft(snapshot, Policy()))
    assert rate.tolist() == pytest.approx([512, 256, 256, math.nan, 0], nan_ok=True)


def test_a_request_without_a_cell_is_reported_and_the_round_continues() -> None:
    outcome = decide_round(a_snapshot_of_two_types(a_guaranteed_job(gpus=3), a_job("k")), Policy())
    assert reason_of(outcome.decisions[0]).code is ReasonCode.GUARANTEE_UNMET
    assert "3 x any type" in reason_of(outcome.decisions[0]).message
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
    jobs = [a_guaranteed_job(f"j{k}", requested_type=0) for k in range(4)]
    snapshot = with_quotas(a_snapshot_of_two_types(*jobs), {"t": {-1: 4}})
    outcome = decide_round(snapshot, Policy())
    assert list(decision_kinds(snapshot, outcome).values()) == [START, START, WAIT, WAIT]
    assert reason_of(outcome.decisions[2]).code is ReasonCode.QUOTA_SPENT
    assert outcome.decisions[0].cell.gpus >= 2
    assert (
        "quota of t for guaranteed jobs is 4 GPUs, of which 0 are left"
        in reason_of(outcome.decisions[2]).message
    )


@pytest.mark.parametrize(("quota", "waits"), [(1, False), (3, True)])
def test_a_job_is_told_to_wait_for_others_only_if_the_whole_quota_has_room_for_it(
    quota: int, waits: bool
) -> None:
    jobs = [a_guaranteed_job(f"j{k}", requested_type=0) for k in range(2)]
    snapshot = with_quotas(a_snapshot_of_two_types(*jobs), {"t": {-1: quota}})
    reason = reason_of(decide_round(snapshot, Policy()).decisions[1])
    assert reason.code is ReasonCode.QUOTA_SPENT
    assert reason.next_step.startswith("wait for a guaranteed job") == waits
    assert reason.next_step.endswith("raise the quota, or submit the job as best effort")


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
        Policy(objective="throughput", run_to_completion=True),
    )
    assert reason_of(outcome.decisions[1]).code is ReasonCode.QUOTA_SPENT
    assert "t may hold 6 GPUs" in reason_of(outcome.decisions[1]).message


def test_an_unlent_quota_stays_free() -> None:
    jobs = [a_job(f"j{k}", tenant="u") for k in range(5)]
    snapshot = a_snapshot(nodes=some_nodes((0, 2, 4)), estimates=LINEAR, jobs=jobs)
    kept = with_quotas(snapshot, {"t": {-1: 3}}, keeps=["t"])
    assert sum(d.cell.gpus for d in decide_round(kept, Policy()).decisions) == 5
    lent = with_quotas(snapshot, {"t": {-1: 3}})
    assert sum(d.cell.gpus for d in decide_round(lent, Policy()).decisions) == 8


# minimum run time and the cap on changes


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
    moved = decide_round(a_fragmented_snapshot(), Policy(run_to_completion=True))
    assert sorted(d.kind for d in moved.decisions) == sorted([KEEP, MOVE, START])
    capped = decide_round(a_fragmented_snapshot(), Policy(run_to_completion=True, max_changes=0))
    assert [d.kind for d in capped.decisions] == [KEEP, KEEP, WAIT]
    mended = decide_round(
        a_fragmented_snapshot(),
        Policy(run_to_completion=True, max_changes=0, defragment_every_rounds=1),
    )
    assert mended.placed.placement.migrated == frozenset()


def test_the_checker_counts_moves_with_the_other_changes() -> None:
    moved = decide_round(a_fragmented_snapshot(), Policy(run_to_completion=True, max_changes=1))
    assert len(moved.placed.placement.migrated) == 1
    row = [replace(r, capacity=0) if r.name == "changes" else r for r in moved.problem.rows]
    problem = replace(moved.problem, rows=tuple(row))
    broken = find_placement_violations(
        a_fragmented_snapshot(), problem, moved.solution, moved.placed.placement
    )
    assert [v.rule for v in broken] == ["changes"]
    assert not [v for v in find_violations(problem, moved.solution) if v.rule == "capacity"]


# queues


def a_queue(*jobs: dict[str, Any], nodes: int = 1, **more: Any) -> Snapshot:
    estimates = [*LINEAR, *FOUR_ONLY, *EIGHT_ONLY]
    return a_snapshot(
        nodes=some_nodes((0, nodes, 4)), estimates=estimates, jobs=jobs, workloads=3, **more
    )


def test_launched_best_effort_jobs_give_way_to_higher_queues_but_not_to_their_own() -> None:
    policy = Policy(queue_order=True)
    for queue, expected in ((1, [KEEP, WAIT]), (2, [SUSPEND, START])):
        jobs = [
            a_running_job("r", 4, 1, queue=queue, weight=5.0),
            a_job("w", 1, queue=1, weight=0.1),
        ]
        snapshot = a_queue(*jobs, gangs={0: gang_on(0, 0, 1, 2, 3)})
        assert [d.kind for d in decide_round(snapshot, policy).decisions] == expected


# reservation and backfill


def a_reserved_round(
    *fillers: dict[str, Any], policy: Policy, waited_s: float = 900.0
) -> RoundOutcome:
    """Return the round of a waiting gang of 8. A job that ends in 100 s holds half of its GPUs."""
    jobs = [
        a_running_job("r", 4, 1, iterations_left=400.0),
        a_job("gang", 2, queued_s=1000.0 - waited_s),
        *fillers,
    ]
    snapshot = a_queue(*jobs, nodes=2, gangs={0: gang_on(0, 0, 1, 2, 3)})
    return decide_round(snapshot, policy)


BACKFILL = Policy(objective="throughput", run_to_completion=True, reserve_after_s=600.0)


@pytest.mark.parametrize("order", [False, True])
def test_only_jobs_that_end_before_the_reserved_start_may_fill_the_gap(order: bool) -> None:
    policy = replace(BACKFILL, queue_order=order)
    long = a_job("long", 1, queued_s=950.0, iterations_left=1e6)
    short = a_job("short", 1, queued_s=960.0, iterations_left=300.0)
    outcome = a_reserved_round(long, short, policy=policy)
    assert [d.kind for d in outcome.decisions] == [KEEP, WAIT, WAIT, START]
    assert reason_of(outcome.decisions[2]).code is ReasonCode.RESERVED
    assert "reserved for gang" in reason_of(outcome.decisions[2]).message
    early = a_reserved_round(long, short, policy=policy, waited_s=599.0)
    assert early.decisions[2].kind is START


def test_a_job_that_fits_next_to_the_reservation_may_start_however_long_it_runs() -> None:
    endless = a_job("endless", 0, queued_s=950.0, iterations_left=1e9)
    jobs = [
        a_running_job("r", 4, 1, iterations_left=400.0),
        a_job("gang", 2, queued_s=100.0),
        endless,
    ]
    snapshot = a_queue(*jobs, nodes=3, gangs={0: gang_on(0, 0, 1, 2, 3)})
    free = decide_round(replace(snapshot, now_s=1000.0), BACKFILL)
    assert free.decisions[1].kind is START
    busy = [a_running_job("s", 4, 1, iterations_left=4000.0), *jobs]
    tight = a_queue(*busy, nodes=3, gangs={0: gang_on(1, 0, 1, 2, 3), 1: gang_on(0, 0, 1, 2, 3)})
    outcome = decide_round(tight, BACKFILL)
    assert outcome.decisions[2].kind is WAIT
    # all 8 GPUs that are free at 1,100 s are reserved
    assert outcome.decisions[3].kind is WAIT
    roomy = a_queue(*busy, nodes=4, gangs={0: gang_on(1, 0, 1, 2, 3), 1: gang_on(0, 0, 1, 2, 3)})
    assert decide_round(roomy, BACKFILL).decisions[2].kind is START


def test_a_long_waiting_job_that_fits_starts_without_displacing_others() -> None:
    jobs = [a_running_job("dear", 4, 1, weight=9.0), a_job("old", 1, queued_s=100.0, weight=0.1)]
    snapshot = a_queue(*jobs, gangs={0: gang_on(0, 0, 1, 2, 3)})
    policy = Policy(reserve_after_s=600.0)
    assert [d.kind for d in decide_round(snapshot, policy).decisions] == [SUSPEND, START]
    later = replace(snapshot, jobs=replace(snapshot.jobs, queued_s=np.array([0.0, 700.0])))
    assert [d.kind for d in decide_round(later, policy).decisions] == [KEEP, WAIT]
