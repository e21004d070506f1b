"""Deadlines that are planned for but not promised: ``deadlines = planned``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tessera.formulation.last_round import Legs
from tessera.formulation.lifecycle import JobState
from tessera.formulation.lookahead import look_ahead
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

NOW_S = 1200.0
PLANNED = Policy(deadlines="planned")
AHEAD = Policy(deadlines="look-ahead")


def a_dated_job(name: str, work_s: float, due_s: float, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds, due in ``due_s``. A GPU trains one sample/s."""
    length = work_s / 256
    fields = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, **(fields | more))


def a_job_running_on_all_gpus(
    name: str, work_s: float, due_s: float, **more: Any
) -> dict[str, Any]:
    runs = {"state": JobState.RUNNING, "cell": (0, 4, 1), "since_s": 1.0, "generation": 1}
    return a_dated_job(name, work_s, due_s, **(runs | more))


def cluster(*jobs: dict[str, Any], gangs: dict[int, Gang] | None = None) -> Snapshot:
    """Return one node, on which 1, 2 or 4 GPUs train 1, 2 or 4 samples/s."""
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2, 4)]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)), jobs=jobs, estimates=estimates, gangs=gangs or {}
    )
    return replace(snapshot, now_s=NOW_S)


def decide_round(snapshot: Snapshot, policy: Policy = PLANNED) -> RoundOutcome:
    budget = Budget(remaining_s=lambda: math.inf)
    outcome = plan_round(snapshot, policy, Portfolio(), budget)
    assert not outcome.violations
    return outcome


def gpus_of(outcome: RoundOutcome) -> list[int]:
    return [decision.cell.gpus for decision in outcome.decisions]


def test_scheduled_jobs_run_without_a_promise() -> None:
    outcome = decide_round(cluster(a_dated_job("a", 1200, 300), a_job("b", weight=50.0)))
    assert gpus_of(outcome) == [4, 0]
    assert not any(d.admitted for d in outcome.decisions)
    assert not any(d.admitted for d in decide_round(cluster(a_dated_job("a", 1200, 300))).decisions)


def test_a_long_running_job_gives_way_to_two_short_ones_unless_it_was_promised() -> None:
    def with_two_short_jobs(*, admitted: bool) -> Snapshot:
        long = a_job_running_on_all_gpus("long", 3600, 950, admitted=admitted)
        jobs = cluster(
            long,
            a_dated_job("x", 1200, 620),
            a_dated_job("y", 1200, 620),
            gangs={0: Gang(members=((0, (0, 1, 2, 3)),))},
        )
        leg = {
            "job": 0,
            "start_s": NOW_S,
            "end_s": NOW_S + 900,
            "gpu_type": 0,
            "gpus": 4,
            "pipeline_degree": 1,
            "plan": 0,
        }
        return replace(jobs, legs=Legs.from_rows([leg])) if admitted else jobs

    assert gpus_of(decide_round(with_two_short_jobs(admitted=False)))[0] == 0
    outcome = decide_round(with_two_short_jobs(admitted=True))
    assert gpus_of(outcome) == [4, 0, 0]
    assert [d.admitted for d in outcome.decisions] == [True, False, False]


def test_a_job_outside_the_schedule_waits_and_runs_on_leftover_gpus() -> None:
    crowded = cluster(a_dated_job("a", 1200, 310, weight=2.0), a_dated_job("b", 1200, 310))
    refused = decide_round(crowded, AHEAD).decisions[1].reason
    assert refused is not None
    assert refused.code is ReasonCode.DEADLINE_REFUSED
    waits = decide_round(crowded).decisions[1].reason
    assert waits is not None
    assert not waits.code.name.startswith("DEADLINE")
    jobs = [
        a_dated_job(name, 500, 310, weight=w) for name, w in (("a", 2.0), ("b", 1.0), ("c", 2.0))
    ]
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2)]
    roomy = replace(
        a_snapshot(nodes=some_nodes((0, 1, 5)), jobs=jobs, estimates=estimates), now_s=NOW_S
    )
    assert gpus_of(decide_round(roomy)) == [2, 1, 2]
    assert gpus_of(decide_round(roomy, AHEAD))[1] == 0


def test_a_job_running_in_time_stays_on_its_cell_though_fewer_gpus_would_suffice() -> None:
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n**0.5) for n in (1, 2, 4)]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)),
        jobs=[a_job_running_on_all_gpus("a", 600, 2000)],
        estimates=estimates,
        gangs={0: Gang(members=((0, (0, 1, 2, 3)),))},
    )
    snapshot = replace(snapshot, now_s=NOW_S)
    admission = decide_round(snapshot).admission
    assert admission is not None
    assert admission.legs.gpus[admission.legs.job == 0].tolist() == [4]


def test_only_a_promise_reserves_time_for_a_restart() -> None:
    def reserves(policy: Policy, *, admitted: bool) -> list[bool]:
        job = a_dated_job("a", 600, 3000, restart_s=10, admitted=admitted)
        estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2, 4)]
        snapshot = a_snapshot(nodes=some_nodes((0, 2, 4)), jobs=[job], estimates=estimates)
        leg = {
            "job": 0,
            "start_s": NOW_S,
            "end_s": NOW_S + 900,
            "gpu_type": 0,
            "gpus": 4,
            "pipeline_degree": 1,
            "plan": 0,
        }
        legs = Legs.from_rows([leg]) if admitted else snapshot.legs
        snapshot = replace(snapshot, now_s=NOW_S, legs=legs)
        return [
            kept > 0
            for kept in look_ahead(*drafts_before_deadlines(snapshot, policy)).reserve_s.tolist()
        ]

    assert reserves(AHEAD, admitted=False) == [True]
    assert reserves(PLANNED, admitted=False) == [False]
    assert reserves(PLANNED, admitted=True) == [True]


def gpus_of_schedule(policy: Policy, job: dict[str, Any]) -> list[int]:
    """Return the GPUs of the legs of a job that is alone on 4 GPUs. The rate of n is sqrt(n)."""
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n**0.5) for n in (1, 2, 4)]
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 4)), jobs=[job], estimates=estimates)
    admission = decide_round(replace(snapshot, now_s=NOW_S), policy).admission
    assert admission is not None
    return [int(gpus) for gpus in admission.legs.gpus]


def test_unpromised_jobs_start_as_requested_or_fastest_and_promised_ones_on_the_leanest_cell() -> (
    None
):
    assert gpus_of_schedule(PLANNED, a_dated_job("a", 600, 2000, requested_gpus=2)) == [2]
    assert gpus_of_schedule(PLANNED, a_dated_job("a", 600, 310, requested_gpus=2)) == [4]
    assert gpus_of_schedule(AHEAD, a_dated_job("a", 600, 2000, requested_gpus=2)) == [1]


def test_a_round_runs_the_scheduled_cells_and_enlarges_only_promised_jobs() -> None:
    def a_running_round(*, admitted: bool) -> Snapshot:
        runs = a_dated_job(
            "a",
            600,
            2000,
            state=JobState.RUNNING,
            cell=(0, 1, 1),
            since_s=1.0,
            generation=1,
            admitted=admitted,
        )
        return cluster(runs, gangs={0: Gang(members=((0, (0,)),))})

    assert gpus_of(decide_round(a_running_round(admitted=False))) == [1]
    assert gpus_of(decide_round(a_running_round(admitted=True))) == [4]
