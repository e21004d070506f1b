"""Lists of jobs with deadlines, followed to their end: what the plan of a round is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.admission import Admission
from tessera.formulation.lifecycle import JobState
from tessera.formulation.lookahead import look_ahead
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Legs, Snapshot
from tessera.simulator.due_rounds import due_s
from tessera.solvers.base import Budget
from tessera.solvers.lookahead import admit, rollout
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.lookahead.rollout import roll_out
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

NOW_S = 1200.0
PLANNED = Policy(deadlines="planned")
ENDLESS = Budget(remaining_s=lambda: math.inf)
Leg = tuple[int, float, float, int]


def dated(name: str, work_s: float, due_s: float, gpus: int, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds that asks for ``gpus`` and is due ``due_s`` from now."""
    length = work_s / 256
    given = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, requested_gpus=gpus, **(given | more))


def running(name: str, work_s: float, due_s: float, gpus: int, **more: Any) -> dict[str, Any]:
    runs = {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 1.0, "generation": 1}
    return dated(name, work_s, due_s, gpus, **(runs | more))


def cluster(*jobs: dict[str, Any], counts: tuple[int, ...] = (1, 2, 4), **more: Any) -> Snapshot:
    """Return 4 GPUs on one node, of which n train n samples/s."""
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in counts]
    found = a_snapshot(nodes=some_nodes((0, 1, 4)), jobs=jobs, estimates=estimates, **more)
    return replace(found, now_s=NOW_S)


def planned(snapshot: Snapshot) -> Admission:
    return admit(snapshot, PLANNED, ENDLESS)


def legs_of(admission: Admission) -> list[Leg]:
    """Return (job, start and end in seconds from now, GPUs) of each leg."""
    legs = admission.legs
    rows = zip(legs.job, legs.start_s - NOW_S, legs.end_s - NOW_S, legs.gpus, strict=True)
    return sorted((int(j), round(float(s)), round(float(e)), int(n)) for j, s, e, n in rows)


def test_jobs_run_by_deadline_one_after_the_end_of_another() -> None:
    plan = planned(cluster(dated("a", 2000, 1400, 4), dated("b", 1600, 500, 4)))
    assert legs_of(plan) == [(0, 400, 900, 4), (1, 0, 400, 4)]
    assert plan.proven


def test_two_later_jobs_are_met_rather_than_the_one_that_is_due_first() -> None:
    jobs = (dated("large", 1600, 405, 4), dated("x", 800, 410, 2), dated("y", 800, 410, 2))
    plan = planned(cluster(*jobs))
    assert plan.admitted.tolist() == [False, True, True]
    heavy = planned(cluster(dated("large", 1600, 405, 4, weight=3.0), *jobs[1:]))
    assert heavy.admitted.tolist() == [True, False, False]


def test_changes_of_a_list_find_what_no_list_has(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ((1400, 1010, 2), (2000, 810, 4), (1600, 1010, 4), (500, 910, 1))
    snapshot = cluster(*(dated(f"j{k}", *need) for k, need in enumerate(needs)))
    assert planned(snapshot).admitted.sum() == 3
    monkeypatch.setattr(rollout, "TRIES", 0)
    assert planned(snapshot).admitted.sum() == 2


def test_a_job_that_makes_room_goes_on_later_after_another_restart() -> None:
    long = running("long", 3200, 1500, 4, restart_s=100)
    gangs = {0: Gang(members=((0, (0, 1, 2, 3)),))}
    plan = planned(cluster(long, dated("short", 1200, 320, 4), counts=(4,), gangs=gangs))
    assert legs_of(plan) == [(0, 300, 1200, 4), (1, 0, 300, 4)]


def test_only_what_runs_now_is_bound_to_its_cell() -> None:
    plan = planned(cluster(dated("a", 2000, 1400, 4), dated("b", 1600, 500, 4)))
    assert (plan.least_work > 0).tolist() == [False, True]


def test_plans_leave_what_was_promised_its_gpus_when_it_needs_them() -> None:
    promised = dated("promised", 2400, 1260, 4, admitted=True)
    leg = {
        "job": 0,
        "start_s": NOW_S + 600,
        "end_s": NOW_S + 1200,
        "gpu_type": 0,
        "gpus": 4,
        "pipeline_degree": 1,
        "plan": 0,
    }

    def beside(work_s: float) -> Admission:
        jobs = cluster(promised, dated("new", work_s, 800, 4))
        return planned(replace(jobs, legs=Legs.from_rows([leg])))

    assert beside(2300).admitted.tolist() == [True, True]
    assert beside(2700).admitted.tolist() == [True, False]
    assert (0, 600, 1200, 4) in legs_of(beside(2700))


def test_ends_that_come_before_the_next_round_wait_for_it() -> None:
    jobs = (dated("a", 400, 150, 4), dated("b", 400, 320, 4), dated("c", 400, 420, 4))
    assert planned(cluster(*jobs)).admitted.tolist() == [True, False, True]


def test_a_plan_that_promises_nothing_needs_no_round_of_its_own_and_a_promise_does() -> None:
    def due(policy: Policy) -> float:
        gangs = {0: Gang(members=((0, (0, 1, 2, 3)),))}
        jobs = (running("a", 1600, 500, 4), dated("b", 2000, 1400, 4))
        snapshot = cluster(*jobs, counts=(4,), gangs=gangs)
        outcome = plan_round(snapshot, policy, Portfolio(), ENDLESS)
        assert outcome.admission is not None
        assert set(outcome.admission.legs.job.tolist()) == {0, 1}
        return due_s(snapshot, outcome, 300.0)

    assert due(PLANNED) == math.inf
    assert due(Policy(deadlines="look-ahead")) < math.inf


def test_what_a_round_may_spend_bounds_how_far_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [dated(f"j{k}", 1200, 300 * (k + 1) + 10, 4) for k in range(4)]
    assert planned(cluster(*jobs)).admitted.all()
    monkeypatch.setattr(rollout, "MOST_VISITS", 40)
    assert planned(cluster(*jobs)).admitted.tolist() == [True, False, False, False]


def test_nobody_to_plan_for_is_an_empty_plan() -> None:
    snapshot = cluster(dated("a", 400, 900, 4))
    ahead = look_ahead(*drafts_before_deadlines(snapshot, PLANNED))
    nobody = np.zeros(1, dtype=np.bool_)
    plan = roll_out(ahead, snapshot.jobs, ahead.capacity, nobody, 300.0)
    assert not len(plan.legs(ahead))
