"""Rollouts of job lists with deadlines, from which a round's schedule is made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.lookahead import look_ahead
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.last_round import ScheduleSegments
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.lookahead import admit, rollout
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.lookahead.rollout import roll_out
from tessera.solvers.rounds.due import due_s
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

NOW_S = 1200.0
PLANNED = Policy(deadlines="planned")
ENDLESS = Budget(remaining_s=lambda: math.inf)
ScheduleSegment = tuple[int, float, float, int]


def a_dated_job(name: str, work_s: float, due_s: float, gpus: int, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds that asks for ``gpus`` and is due ``due_s`` from now."""
    length = work_s / 256
    given = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, requested_gpus=gpus, **(given | more))


def a_running_job(name: str, work_s: float, due_s: float, gpus: int, **more: Any) -> dict[str, Any]:
    runs = {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 1.0, "generation": 1}
    return a_dated_job(name, work_s, due_s, gpus, **(runs | more))


def cluster(*jobs: dict[str, Any], counts: tuple[int, ...] = (1, 2, 4), **more: Any) -> Snapshot:
    """Return 4 GPUs on one node, where n GPUs train n samples/s."""
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in counts]
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 4)), jobs=jobs, estimates=estimates, **more)
    return replace(snapshot, now_s=NOW_S)


def admit_jobs(snapshot: Snapshot) -> Admission:
    return admit(snapshot, PLANNED, ENDLESS)


def segments_of(admission: Admission) -> list[ScheduleSegment]:
    """Return (job, start and end in seconds from now, GPUs) of each segment."""
    segments = admission.schedule_segments
    rows = zip(
        segments.job, segments.start_s - NOW_S, segments.end_s - NOW_S, segments.gpus, strict=True
    )
    return sorted((int(j), round(float(s)), round(float(e)), int(n)) for j, s, e, n in rows)


def test_jobs_run_one_after_another_in_order_of_deadline() -> None:
    plan = admit_jobs(cluster(a_dated_job("a", 2000, 1400, 4), a_dated_job("b", 1600, 500, 4)))
    assert segments_of(plan) == [(0, 400, 900, 4), (1, 0, 400, 4)]
    assert plan.proven


def test_two_later_jobs_are_met_instead_of_the_one_due_first() -> None:
    jobs = (
        a_dated_job("large", 1600, 405, 4),
        a_dated_job("x", 800, 410, 2),
        a_dated_job("y", 800, 410, 2),
    )
    plan = admit_jobs(cluster(*jobs))
    assert plan.admitted.tolist() == [False, True, True]
    heavy = admit_jobs(cluster(a_dated_job("large", 1600, 405, 4, weight=3.0), *jobs[1:]))
    assert heavy.admitted.tolist() == [True, False, False]


def test_changes_of_an_order_find_schedules_that_no_fixed_order_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = ((1400, 1010, 2), (2000, 810, 4), (1600, 1010, 4), (500, 910, 1))
    snapshot = cluster(*(a_dated_job(f"j{k}", *need) for k, need in enumerate(needs)))
    assert admit_jobs(snapshot).admitted.sum() == 3
    monkeypatch.setattr(rollout, "TRIES", 0)
    assert admit_jobs(snapshot).admitted.sum() == 2


def test_a_displaced_job_resumes_later_after_another_restart() -> None:
    long = a_running_job("long", 3200, 1500, 4, restart_s=100)
    gangs = {0: Gang(members=((0, (0, 1, 2, 3)),))}
    plan = admit_jobs(cluster(long, a_dated_job("short", 1200, 320, 4), counts=(4,), gangs=gangs))
    assert segments_of(plan) == [(0, 300, 1200, 4), (1, 0, 300, 4)]


def test_only_running_jobs_are_bound_to_their_cell() -> None:
    plan = admit_jobs(cluster(a_dated_job("a", 2000, 1400, 4), a_dated_job("b", 1600, 500, 4)))
    assert (plan.least_work > 0).tolist() == [False, True]


def test_schedules_leave_promised_jobs_their_gpus_when_they_need_them() -> None:
    promised = a_dated_job("promised", 2400, 1260, 4, admitted=True)
    segment = {
        "job": 0,
        "start_s": NOW_S + 600,
        "end_s": NOW_S + 1200,
        "gpu_type": 0,
        "gpus": 4,
        "pipeline_degree": 1,
        "plan": 0,
    }

    def beside(work_s: float) -> Admission:
        jobs = cluster(promised, a_dated_job("new", work_s, 800, 4))
        return admit_jobs(replace(jobs, schedule_segments=ScheduleSegments.from_rows([segment])))

    assert beside(2300).admitted.tolist() == [True, True]
    assert beside(2700).admitted.tolist() == [True, False]
    assert (0, 600, 1200, 4) in segments_of(beside(2700))


def test_gpus_freed_before_the_next_round_are_used_from_that_round() -> None:
    jobs = (
        a_dated_job("a", 400, 150, 4),
        a_dated_job("b", 400, 320, 4),
        a_dated_job("c", 400, 420, 4),
    )
    assert admit_jobs(cluster(*jobs)).admitted.tolist() == [True, False, True]


def test_a_schedule_without_promises_needs_no_extra_round_but_one_with_a_promise_does() -> None:
    def due(policy: Policy) -> float:
        gangs = {0: Gang(members=((0, (0, 1, 2, 3)),))}
        jobs = (a_running_job("a", 1600, 500, 4), a_dated_job("b", 2000, 1400, 4))
        snapshot = cluster(*jobs, counts=(4,), gangs=gangs)
        outcome = plan_round(snapshot, policy, Portfolio(), ENDLESS)
        assert outcome.admission is not None
        assert set(outcome.admission.schedule_segments.job.tolist()) == {0, 1}
        return due_s(snapshot, outcome, 300.0)

    assert due(PLANNED) == math.inf
    assert due(Policy(deadlines="look-ahead")) < math.inf


def test_the_work_limit_of_a_round_bounds_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [a_dated_job(f"j{k}", 1200, 300 * (k + 1) + 10, 4) for k in range(4)]
    assert admit_jobs(cluster(*jobs)).admitted.all()
    monkeypatch.setattr(rollout, "MOST_VISITS", 16)
    assert admit_jobs(cluster(*jobs)).admitted.tolist() == [True, False, False, False]


def test_without_jobs_the_schedule_is_empty() -> None:
    snapshot = cluster(a_dated_job("a", 400, 900, 4))
    ahead = look_ahead(*drafts_before_deadlines(snapshot, PLANNED))
    nobody = np.zeros(1, dtype=np.bool_)
    plan = roll_out(ahead, snapshot.jobs, ahead.capacity, nobody, 300.0)
    assert not len(plan.schedule_segments(ahead))
