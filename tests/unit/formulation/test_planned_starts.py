"""Planned and promised starts of waiting jobs, in the smallest rounds that show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.starts.planner import MOVED_BY_DELAYS, MOVED_BY_PRIORITY
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.driver import (
    decide_round,
    decision_kinds,
    reason_of,
    the_next_round,
    with_quotas,
)

START, KEEP, WAIT = DecisionKind.START, DecisionKind.KEEP, DecisionKind.WAIT
SUSPEND, RESIZE = DecisionKind.SUSPEND, DecisionKind.RESIZE
NOW_S = 1000.0
"""The time of ``a_snapshot``."""

ELASTIC, ON_FOUR, ON_TWO, ON_ONE, UNKNOWN = range(5)
"""Workloads: one that runs on 1, 2 and 4 GPUs, three that run on one number, and an unknown one."""

CELLS = [
    *(an_estimate(ELASTIC, gpus=n, iter_time_s=1 / n) for n in (1, 2, 4)),
    *(an_estimate(w, gpus=n) for w, n in ((ON_FOUR, 4), (ON_TWO, 2), (ON_ONE, 1))),
]
"""An iteration takes a second on each of the workloads that run on one number of GPUs."""

GPUS = {ELASTIC: 1, ON_FOUR: 4, ON_TWO: 2, ON_ONE: 1}


def a_waiting_job(
    name: str, workload: int, lasts_s: float = 100.0, **changes: Any
) -> dict[str, Any]:
    """Return a job that runs for ``lasts_s`` on its number of GPUs."""
    row = {"requested_gpus": GPUS.get(workload, 4), "iterations_left": lasts_s}
    return a_job(name, workload, **(row | changes))


def a_running_job(
    name: str, gpus: int, lasts_s: float = 100.0, workload: int = ELASTIC, **changes: Any
) -> dict[str, Any]:
    """Return a job that has run since second 500 on its GPUs, and ends after ``lasts_s``."""
    speed = gpus if workload == ELASTIC else 1
    row = {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 500.0}
    row |= {"requested_gpus": gpus, "iterations_left": lasts_s * speed}
    return a_job(name, workload, **(row | changes))


def a_round(
    *jobs: dict[str, Any],
    sizes: Sequence[int] = (4,),
    gangs: dict[int, Gang] | None = None,
    cells: Sequence[dict[str, Any]] = CELLS,
) -> Snapshot:
    """Return nodes of these sizes. The first job is on node 0 if it runs, and no gang is given."""
    nodes = [a_node(f"n{k}", gpus=gpus) for k, gpus in enumerate(sizes)]
    if gangs is None:
        count = jobs[0]["current_gpus"]
        gangs = {0: gang_on(0, *range(count))} if count else {}
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=cells, gangs=gangs, workloads=5)


def gang_on(node: int, *gpus: int) -> Gang:
    return Gang(members=((node, gpus),))


def planned_starts(snapshot: Snapshot, outcome: RoundOutcome) -> dict[str, float]:
    """Return the planned start of each job that has one after the round."""
    assert outcome.plan is not None
    starts = outcome.plan.starts
    jobs = (snapshot.jobs.name[job] for job in starts.job.tolist())
    return dict(zip(jobs, starts.start_s.tolist(), strict=True))


def promised_starts(snapshot: Snapshot, outcome: RoundOutcome) -> dict[str, float]:
    """Return the promised start of each job that has one after the round."""
    assert outcome.plan is not None
    pairs = zip(snapshot.jobs.name, outcome.plan.start_by_s.tolist(), strict=True)
    return {name: start_s for name, start_s in pairs if math.isfinite(start_s)}


def evidence_of(snapshot: Snapshot, outcome: RoundOutcome, name: str) -> dict[str, str]:
    """Return the evidence of the reason of a job's decision."""
    decision = next(d for d in outcome.decisions if snapshot.jobs.name[d.job] == name)
    return {str(key): str(value) for key, value in reason_of(decision).evidence}


def lose_node(snapshot: Snapshot, node: int) -> Snapshot:
    """Return the snapshot in which a node is no longer schedulable."""
    schedulable = np.array(snapshot.nodes.schedulable)
    schedulable[node] = False
    return replace(snapshot, nodes=replace(snapshot.nodes, schedulable=schedulable))


def with_iterations(snapshot: Snapshot, *iterations: float) -> Snapshot:
    """Return the snapshot in which jobs have these iterations left."""
    return replace(snapshot, jobs=replace(snapshot.jobs, iterations_left=np.array(iterations)))


# the first plan


def test_a_job_that_does_not_fit_is_promised_a_start_after_the_expected_end_of_others() -> None:
    """The wait is 100 s, so the promise leaves a twentieth of it, 5 s more."""
    snapshot = a_round(a_running_job("old", 4), a_waiting_job("new", ON_FOUR))
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"old": KEEP, "new": WAIT}
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 100)}
    assert promised_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 105)}
    evidence = evidence_of(snapshot, outcome, "new")
    assert evidence["planned start"] == format_rfc3339(NOW_S + 100)
    assert evidence["promised start"] == format_rfc3339(NOW_S + 105)
    assert "promise moved" not in evidence


def test_without_promised_starts_nothing_is_planned() -> None:
    snapshot = a_round(a_running_job("old", 4), a_waiting_job("new", ON_FOUR))
    outcome = decide_round(snapshot, Policy(promise_starts=False))
    assert outcome.plan is None
    assert "planned start" not in evidence_of(snapshot, outcome, "new")


def test_training_since_the_last_report_brings_the_planned_start_no_later() -> None:
    """An agent reports progress now and then. The job trains meanwhile."""
    old = a_running_job("old", 4, progress_s=NOW_S - 30)
    snapshot = a_round(old, a_waiting_job("new", ON_FOUR))
    starts = planned_starts(snapshot, decide_round(snapshot, Policy()))
    assert starts == {"new": pytest.approx(NOW_S + 70)}


@pytest.mark.parametrize(("silent_s", "more_s"), [(102.0, 5.1), (10.0, 1.0)])
def test_a_job_that_should_have_ended_since_its_last_report_still_holds_its_gpus(
    silent_s: float, more_s: float
) -> None:
    lasts_s = silent_s - 1
    old = a_running_job("old", 4, lasts_s, progress_s=NOW_S - silent_s)
    snapshot = a_round(old, a_waiting_job("new", ON_FOUR))
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"old": KEEP, "new": WAIT}
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + more_s)}


def test_a_start_that_takes_its_restart_time_ends_later() -> None:
    """The first of two waiting jobs loads for 30 s before it trains for 100 s."""
    jobs = [a_waiting_job("b", ON_FOUR, restart_s=30.0), a_waiting_job("c", ON_FOUR, queued_s=1.0)]
    snapshot = a_round(a_running_job("old", 4), *jobs)
    starts = planned_starts(snapshot, decide_round(snapshot, Policy()))
    assert starts == {"b": pytest.approx(NOW_S + 100), "c": pytest.approx(NOW_S + 230)}


@pytest.mark.parametrize(("lasts_s", "kind"), [(99.0, START), (101.0, WAIT)])
def test_a_later_job_backfills_only_if_it_delays_no_planned_start(
    lasts_s: float, kind: DecisionKind
) -> None:
    """Two GPUs are free. The wide job needs all four, after 100 s."""
    narrow = a_waiting_job("later", ON_TWO, lasts_s, queued_s=900.0)
    old = a_running_job("old", 2, workload=ON_TWO)
    snapshot = a_round(old, a_waiting_job("wide", ON_FOUR), narrow)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"old": KEEP, "wide": WAIT, "later": kind}
    starts = {"wide": pytest.approx(NOW_S + 100)}
    if kind is WAIT:
        starts["later"] = pytest.approx(NOW_S + 200)
    assert planned_starts(snapshot, outcome) == starts


def test_a_later_job_backfills_at_any_length_on_gpus_that_no_start_needs() -> None:
    narrow = a_waiting_job("later", ON_TWO, 9e6, queued_s=900.0)
    wide = a_waiting_job("wide", ON_FOUR)
    snapshot = a_round(a_running_job("old", 4), wide, narrow, sizes=(4, 2))
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"old": KEEP, "wide": WAIT, "later": START}


def test_more_waiting_jobs_than_gpus_start_one_after_another_in_order_of_their_waits() -> None:
    jobs = [a_waiting_job(f"j{k}", ON_ONE, queued_s=100.0 * k) for k in range(5)]
    snapshot = a_round(*jobs, sizes=(1,))
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome)["j0"] is START
    assert planned_starts(snapshot, outcome) == {
        f"j{k}": pytest.approx(NOW_S + 100 * k) for k in range(1, 5)
    }


@pytest.mark.parametrize("iter_time_s", [1e-9, 1e-3, 1e9])
def test_planned_starts_follow_iteration_times_of_any_size(iter_time_s: float) -> None:
    cells = [an_estimate(ON_ONE, iter_time_s=iter_time_s)]
    jobs = [a_waiting_job(f"j{k}", ON_ONE, 1e5, queued_s=float(k)) for k in range(3)]
    snapshot = a_round(*jobs, sizes=(1,), cells=cells)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"j0": START, "j1": WAIT, "j2": WAIT}
    assert planned_starts(snapshot, outcome) == {
        "j1": pytest.approx(NOW_S + 1e5 * iter_time_s),
        "j2": pytest.approx(NOW_S + 2e5 * iter_time_s),
    }


# who goes before whom


@pytest.mark.parametrize("changes", [{"priority": 0}, {"weight": 5.0}])
def test_a_job_of_higher_priority_goes_before_and_the_promise_of_the_other_is_moved(
    changes: dict[str, Any],
) -> None:
    first_round = a_round(a_running_job("old", 4), a_waiting_job("low", ON_FOUR))
    outcome = decide_round(first_round, Policy())
    high = a_waiting_job("high", ON_FOUR, **changes)
    snapshot = the_next_round(first_round, outcome, 10.0, [high])
    outcome = decide_round(snapshot, Policy())
    assert planned_starts(snapshot, outcome) == {
        "high": pytest.approx(NOW_S + 100),
        "low": pytest.approx(NOW_S + 200),
    }
    assert promised_starts(snapshot, outcome)["low"] == pytest.approx(NOW_S + 200 + 0.05 * 190)
    assert evidence_of(snapshot, outcome, "low")["promise moved"] == MOVED_BY_PRIORITY
    assert "promise moved" not in evidence_of(snapshot, outcome, "high")


@pytest.mark.parametrize("changes", [{}, {"priority": 2}, {"weight": 0.5}])
def test_a_job_of_the_same_or_a_lower_priority_comes_after_it(changes: dict[str, Any]) -> None:
    """It comes later although it is worth more than the other per GPU."""
    first_round = a_round(a_running_job("old", 4), a_waiting_job("planned", ON_FOUR))
    outcome = decide_round(first_round, Policy())
    late_job = a_waiting_job("late", ON_FOUR, 10.0, **changes)
    snapshot = the_next_round(first_round, outcome, 10.0, [late_job])
    outcome = decide_round(snapshot, Policy())
    assert planned_starts(snapshot, outcome) == {
        "planned": pytest.approx(NOW_S + 100),
        "late": pytest.approx(NOW_S + 200),
    }
    assert promised_starts(snapshot, outcome)["planned"] == pytest.approx(NOW_S + 105)


def test_a_guaranteed_job_leaves_the_quota_that_the_planned_start_of_another_needs() -> None:
    """The quota of four has room for ``small`` now, but ``large`` waits for all of it."""
    guarantee: dict[str, Any] = {"guaranteed": True, "tenant": "t", "requested_gpu_type": 0}
    old = a_running_job("old", 2, workload=ON_TWO, **guarantee)
    large = a_waiting_job("large", ON_FOUR, **guarantee)
    small = a_waiting_job("small", ON_ONE, 1e6, queued_s=1.0, **guarantee)
    snapshot = with_quotas(a_round(old, large, small, sizes=(4, 4)), {"t": {-1: 4}})
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"old": KEEP, "large": WAIT, "small": WAIT}
    assert planned_starts(snapshot, outcome)["large"] == pytest.approx(NOW_S + 100)
    snapshot = with_quotas(a_round(old, small, sizes=(4, 4)), {"t": {-1: 4}})
    assert decision_kinds(snapshot, decide_round(snapshot, Policy())) == {
        "old": KEEP,
        "small": START,
    }


# what running jobs can be counted on to leave


def test_a_grown_job_is_counted_on_to_shrink_once_it_has_settled() -> None:
    """It started 10 s ago, and may change 5 restart times of 10 s after its start."""
    large = a_running_job("grown", 4, 1e6, requested_gpus=2, restart_s=10.0, since_s=990.0)
    snapshot = a_round(large, a_waiting_job("new", ON_TWO))
    outcome = decide_round(snapshot, Policy(change_spacing=4.0))
    assert decision_kinds(snapshot, outcome) == {"grown": KEEP, "new": WAIT}
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 40)}
    assert promised_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 47)}


def test_a_start_that_is_due_takes_place_on_gpus_that_a_grown_job_gives_back() -> None:
    """The objective alone would leave the GPUs to the grown job. It may do so for a twentieth of the run."""
    large = a_running_job("grown", 4, 1e6, requested_gpus=2, weight=9.0)
    snapshot = a_round(large, a_waiting_job("new", ON_TWO, weight=0.01))
    policy = Policy(objective="throughput")
    for waited_s in (0.0, 4.0):
        outcome = decide_round(snapshot, policy)
        assert decision_kinds(snapshot, outcome) == {"grown": KEEP, "new": WAIT}
        assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 5)}
        assert promised_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 5)}
        snapshot = the_next_round(snapshot, outcome, 4.0 - 3.0 * (waited_s > 0))
    outcome = decide_round(snapshot, policy)
    assert decision_kinds(snapshot, outcome) == {"grown": RESIZE, "new": START}
    assert [d.cell.gpus for d in outcome.decisions] == [2, 2]


def test_a_start_on_idle_gpus_is_not_postponed() -> None:
    """The objective would rather give them to the grown job."""
    large = a_running_job("grown", 2, 1e6, requested_gpus=1, weight=9.0)
    snapshot = a_round(large, a_waiting_job("new", ON_TWO, weight=0.01))
    policy = Policy(objective="throughput", promise_starts=False)
    assert decision_kinds(snapshot, decide_round(snapshot, policy))["grown"] == RESIZE
    outcome = decide_round(snapshot, replace(policy, promise_starts=True))
    assert decision_kinds(snapshot, outcome) == {"grown": KEEP, "new": START}


def test_no_start_is_postponed_into_the_planned_start_of_another() -> None:
    """``last`` needs the GPUs of ``new`` right after it, once ``grown`` has ended as well."""
    large = a_running_job("grown", 4, 400.0, requested_gpus=2, weight=9.0)
    new = a_waiting_job("new", ON_TWO, 1000.0, weight=0.01)
    third_job = a_waiting_job("last", ON_FOUR, weight=0.01, queued_s=1.0)
    policy = Policy(objective="throughput")
    snapshot = a_round(large, new)
    assert decision_kinds(snapshot, decide_round(snapshot, policy)) == {"grown": KEEP, "new": WAIT}
    snapshot = a_round(large, new, third_job)
    outcome = decide_round(snapshot, policy)
    assert decision_kinds(snapshot, outcome) == {"grown": RESIZE, "new": START, "last": WAIT}
    assert planned_starts(snapshot, outcome) == {"last": pytest.approx(NOW_S + 1000)}


def test_a_start_that_is_a_little_late_moves_those_after_it_by_as_much_as_their_promises_allow() -> (
    None
):
    """``old`` ends 3 s later than estimated, which is less than the promises leave."""
    jobs = [a_waiting_job(name, ON_FOUR, queued_s=q) for name, q in (("b", 0.0), ("c", 1.0))]
    first_round = a_round(a_running_job("old", 4), *jobs)
    outcome = decide_round(first_round, Policy())
    promises = promised_starts(first_round, outcome)
    snapshot = the_next_round(with_iterations(first_round, 412.0, 100.0, 100.0), outcome, 0.0)
    outcome = decide_round(snapshot, Policy())
    assert planned_starts(snapshot, outcome) == {
        "b": pytest.approx(NOW_S + 103),
        "c": pytest.approx(NOW_S + 203),
    }
    assert promised_starts(snapshot, outcome) == promises


def test_a_job_with_its_request_is_not_counted_on_to_leave_before_its_end() -> None:
    snapshot = a_round(a_running_job("old", 4, 5000.0), a_waiting_job("new", ON_TWO, weight=9.0))
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"old": KEEP, "new": WAIT}
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 5000)}


def test_a_preemptible_job_gives_way_once_it_has_settled() -> None:
    young = a_running_job("old", 4, 1e6, preemptible=True, restart_s=10.0, since_s=990.0)
    new = a_waiting_job("new", ON_FOUR, weight=0.01)
    snapshot = a_round(young, new)
    outcome = decide_round(snapshot, Policy(objective="throughput"))
    assert decision_kinds(snapshot, outcome) == {"old": KEEP, "new": WAIT}
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 40)}
    snapshot = the_next_round(snapshot, outcome, 50.0)
    outcome = decide_round(snapshot, Policy(objective="throughput"))
    assert decision_kinds(snapshot, outcome) == {"old": SUSPEND, "new": START}


def test_an_array_member_beyond_the_limit_is_promised_a_start_although_gpus_are_free() -> None:
    array = {"array": 0, "array_limit": 1}
    members = [a_running_job("a", 1, workload=ON_ONE, **array)]
    members += [
        a_waiting_job(name, ON_ONE, **array, queued_s=q) for name, q in (("b", 0), ("c", 1))
    ]
    snapshot = a_round(*members)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"a": KEEP, "b": WAIT, "c": WAIT}
    assert planned_starts(snapshot, outcome) == {
        "b": pytest.approx(NOW_S + 100),
        "c": pytest.approx(NOW_S + 200),
    }


def an_unknown_job(**changes: Any) -> dict[str, Any]:
    """Return a running job of unknown rate that holds all four GPUs."""
    facts = {"unestimated": True, "requested_gpu_type": 0}
    return a_running_job("unknown", 4, 1e6, UNKNOWN, **(facts | changes))


def test_a_job_of_unknown_rate_counts_for_the_usual_time_from_its_start() -> None:
    snapshot = a_round(an_unknown_job(since_s=900.0), a_waiting_job("new", ON_FOUR))
    outcome = decide_round(snapshot, Policy(default_run_s=600.0))
    assert decision_kinds(snapshot, outcome) == {"unknown": KEEP, "new": WAIT}
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 500)}


def test_a_job_of_unknown_rate_yields_after_the_usual_time() -> None:
    snapshot = a_round(an_unknown_job(since_s=300.0), a_waiting_job("new", ON_FOUR, weight=0.01))
    outcome = decide_round(snapshot, Policy(default_run_s=600.0))
    assert decision_kinds(snapshot, outcome) == {"unknown": SUSPEND, "new": START}


# from round to round


def test_a_planned_start_moves_forward_where_gpus_become_free_early() -> None:
    """``old`` ends after 10 s instead of 100. The first job in the queue starts, and the next follows."""
    jobs = [a_waiting_job(name, ON_FOUR, queued_s=q) for name, q in (("b", 0.0), ("c", 1.0))]
    first_round = a_round(a_running_job("old", 4), *jobs)
    outcome = decide_round(first_round, Policy())
    assert planned_starts(first_round, outcome)["c"] == pytest.approx(NOW_S + 200)
    snapshot = the_next_round(with_iterations(first_round, 1.0, 100.0, 100.0), outcome, 10.0)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"b": START, "c": WAIT}
    assert planned_starts(snapshot, outcome) == {"c": pytest.approx(NOW_S + 110)}
    assert promised_starts(snapshot, outcome) == {"c": pytest.approx(NOW_S + 210)}


def test_a_planned_start_takes_place_when_it_is_due() -> None:
    """In the meantime, a job came that the objective prefers."""
    first_round = a_round(a_running_job("old", 4), a_waiting_job("planned", ON_FOUR))
    outcome = decide_round(first_round, Policy(objective="jct"))
    snapshot = the_next_round(first_round, outcome, 100.0, [a_waiting_job("short", ON_FOUR, 1.0)])
    outcome = decide_round(snapshot, Policy(objective="jct"))
    assert decision_kinds(snapshot, outcome) == {"planned": START, "short": WAIT}


def test_a_start_whose_job_outlasts_its_estimate_is_planned_and_promised_for_later() -> None:
    first_round = a_round(a_running_job("old", 4), a_waiting_job("new", ON_FOUR))
    outcome = decide_round(first_round, Policy())
    snapshot = the_next_round(with_iterations(first_round, 2000.0, 100.0), outcome, 100.0)
    outcome = decide_round(snapshot, Policy())
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 500)}
    assert promised_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 520)}
    assert evidence_of(snapshot, outcome, "new")["promise moved"] == MOVED_BY_DELAYS


def test_a_job_is_not_overtaken_where_the_one_before_it_ends_a_little_late() -> None:
    """Both planned starts follow each other without a gap, and the first one comes a second late."""
    jobs = [a_waiting_job(name, ON_FOUR, 30.0, queued_s=k) for k, name in enumerate("bc")]
    first_round = a_round(a_running_job("old", 4), *jobs)
    outcome = decide_round(first_round, Policy())
    assert planned_starts(first_round, outcome) == {
        "b": pytest.approx(NOW_S + 100),
        "c": pytest.approx(NOW_S + 130),
    }
    snapshot = the_next_round(with_iterations(first_round, 404.0, 30.0, 30.0), outcome, 100.0)
    outcome = decide_round(snapshot, Policy())
    assert planned_starts(snapshot, outcome) == {
        "b": pytest.approx(NOW_S + 101),
        "c": pytest.approx(NOW_S + 131),
    }


@pytest.mark.parametrize("jumps_s", [(-400.0, 400.0), (5000.0, -5000.0)])
def test_a_clock_that_jumps_back_and_forth_leaves_no_start_without_a_plan(
    jumps_s: tuple[float, float],
) -> None:
    """``old`` trains nothing meanwhile, so the start comes 100 s after each round."""
    snapshot = a_round(a_running_job("old", 4), a_waiting_job("new", ON_FOUR))
    outcome = decide_round(snapshot, Policy())
    for jump_s in jumps_s:
        next_round = the_next_round(snapshot, outcome, 0.0)
        snapshot = replace(next_round, now_s=next_round.now_s + jump_s)
        outcome = decide_round(snapshot, Policy())
        assert decision_kinds(snapshot, outcome) == {"old": KEEP, "new": WAIT}
        assert planned_starts(snapshot, outcome) == {"new": pytest.approx(snapshot.now_s + 100)}
        (by_s,) = promised_starts(snapshot, outcome).values()
        assert by_s >= snapshot.now_s + 100


# nodes that are lost


def test_a_planned_start_whose_node_is_lost_is_planned_again_on_another_one() -> None:
    """Node 0 is free after 100 s, node 1 after 300 s."""
    jobs = [a_running_job("a", 4), a_running_job("b", 4, 300.0), a_waiting_job("new", ON_FOUR)]
    gangs = {k: gang_on(k, 0, 1, 2, 3) for k in (0, 1)}
    first_round = a_round(*jobs, sizes=(4, 4), gangs=gangs)
    outcome = decide_round(first_round, Policy())
    assert planned_starts(first_round, outcome) == {"new": pytest.approx(NOW_S + 100)}
    snapshot = lose_node(the_next_round(first_round, outcome, 100.0), 0)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"b": KEEP, "new": WAIT}
    assert planned_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 300)}
    assert promised_starts(snapshot, outcome) == {"new": pytest.approx(NOW_S + 310)}
    assert evidence_of(snapshot, outcome, "new")["promise moved"] == MOVED_BY_DELAYS
    assert outcome.plan is not None
    assert outcome.plan.nodes.node.tolist() == [1]


def test_a_job_that_no_longer_fits_into_the_cluster_waits_and_holds_nobody_up() -> None:
    """The wide job is planned on the only node of four GPUs, which is then lost."""
    first_round = a_round(a_running_job("old", 4), a_waiting_job("wide", ON_FOUR), sizes=(4, 2))
    outcome = decide_round(first_round, Policy())
    assert planned_starts(first_round, outcome) == {"wide": pytest.approx(NOW_S + 100)}
    small = a_waiting_job("small", ON_TWO, 9e6, weight=0.01)
    snapshot = lose_node(the_next_round(first_round, outcome, 100.0, [small]), 0)
    outcome = decide_round(snapshot, Policy())
    assert decision_kinds(snapshot, outcome) == {"wide": WAIT, "small": START}
    assert planned_starts(snapshot, outcome) == {}
    assert promised_starts(snapshot, outcome) == {}
    assert reason_of(outcome.decisions[0]).code is ReasonCode.NODES_AWAY
