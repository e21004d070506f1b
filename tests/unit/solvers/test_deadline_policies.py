"""Deadline-aware schedulers (EDF, Arena with Eq. (6), ElasticFlow), and how look-ahead makes room."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.formulation.lifecycle import JobState
from tessera.formulation.lookahead import look_ahead, may_be_scattered
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.lookahead import admit
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.schedulers.arena_deadline import ArenaDeadline
from tessera.solvers.schedulers.base import PublishedScheduler, make_view
from tessera.solvers.schedulers.edf import Edf
from tessera.solvers.schedulers.elasticflow import ElasticFlow
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

NOW_S = 1200.0
AHEAD = Policy(deadlines="look-ahead")
NO_SEARCH = Budget(remaining_s=lambda: 0.0)


def a_dated_job(name: str, work_s: float, due_s: float, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds that is due ``due_s`` from now."""
    length = work_s / 256
    given = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, **(given | more))


def running_on(gpus: int) -> dict[str, Any]:
    """Return the fields of a job that has long run on ``gpus`` GPUs."""
    return {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 1.0, "generation": 1}


def cluster(*jobs: dict[str, Any], nodes: int = 1, gpus: int = 4, **more: Any) -> Snapshot:
    """Return nodes on which n of 1, 2 or 4 GPUs train n samples/s; running jobs hold the first GPUs."""
    gangs, first = {}, 0
    for j, job in enumerate(jobs):
        if count := job["current_gpus"]:
            gangs[j] = Gang(members=((0, tuple(range(first, first + count))),))
            first += count
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2, 4)]
    snapshot = a_snapshot(
        nodes=some_nodes((0, nodes, gpus)), jobs=jobs, estimates=estimates, gangs=gangs, **more
    )
    return replace(snapshot, now_s=NOW_S)


def gpus_of(policy: PublishedScheduler, snapshot: Snapshot) -> list[int]:
    view = make_view(snapshot, Policy())
    return [int(view.draft.gpus[c]) if c >= 0 else 0 for c in policy.choose(view).tolist()]


def test_edf_gives_the_earliest_deadline_its_request_and_suspends_a_later_one() -> None:
    late = a_dated_job("late", 400, 4000, requested_gpus=4, **running_on(4))
    early = a_dated_job("early", 4000, 1500, requested_gpus=4)
    assert gpus_of(Edf(), cluster(late, early)) == [0, 4]


def test_edf_takes_the_fastest_cell_in_time_if_the_request_is_too_slow() -> None:
    assert gpus_of(Edf(), cluster(a_dated_job("a", 4000, 1500, requested_gpus=1))) == [4]


def test_edf_does_not_start_a_late_job_but_lets_a_running_one_continue_if_there_is_room() -> None:
    hopeless = a_dated_job("hopeless", 40_000, 1500)
    assert gpus_of(Edf(), cluster(hopeless)) == [0]
    running = a_dated_job("running", 40_000, 1500, **running_on(2))
    assert gpus_of(Edf(), cluster(running)) == [2]
    assert gpus_of(Edf(), cluster(running, a_dated_job("b", 4000, 2000, requested_gpus=4))) == [
        0,
        4,
    ]


def test_arena_launches_only_on_cells_that_finish_in_time_including_a_restart() -> None:
    assert gpus_of(ArenaDeadline(), cluster(a_dated_job("a", 4000, 1000, requested_gpus=2))) == [4]
    late = a_dated_job("a", 4000, 1000, requested_gpus=2, restart_s=10.0)
    assert gpus_of(ArenaDeadline(), cluster(late)) == [0]


def test_arena_does_not_scale_a_job_beyond_its_deadline_for_another() -> None:
    tight = a_dated_job("tight", 4000, 1500, requested_gpus=4, **running_on(4))
    waiting = a_dated_job("waiting", 100, 9000, requested_gpus=2)
    assert gpus_of(ArenaDeadline(), cluster(tight, waiting)) == [4, 0]
    loose = a_dated_job("loose", 4000, 3000, requested_gpus=4, **running_on(4))
    assert gpus_of(ArenaDeadline(), cluster(loose, waiting)) == [2, 2]


def test_a_running_job_that_can_no_longer_be_in_time_continues_under_arena() -> None:
    assert gpus_of(ArenaDeadline(), cluster(a_dated_job("a", 40_000, 100, **running_on(4)))) == [4]


def test_elasticflow_enlarges_no_job_whose_restart_would_make_it_late() -> None:
    job = {"work_s": 1000.0, "due_s": 1010.0}
    assert gpus_of(
        ElasticFlow(), cluster(a_dated_job("a", **job, **running_on(1), restart_s=900.0))
    ) == [1]
    assert gpus_of(
        ElasticFlow(), cluster(a_dated_job("a", **job, **running_on(1), restart_s=10.0))
    ) == [4]


def test_a_restart_is_reserved_if_gpus_of_a_type_lie_on_several_nodes() -> None:
    job = a_dated_job("a", 1000, 2000, restart_s=60.0)
    apart, together = cluster(job, nodes=2, gpus=2), cluster(job, nodes=1, gpus=4)
    assert (may_be_scattered(apart.nodes), may_be_scattered(together.nodes)) == (True, False)
    assert look_ahead(*drafts_before_deadlines(apart, AHEAD)).reserve_s.tolist() == [60.0]
    assert look_ahead(*drafts_before_deadlines(together, AHEAD)).reserve_s.tolist() == [0.0]


def test_a_job_too_tight_for_a_reserve_is_promised_without_one() -> None:
    tight = cluster(a_dated_job("a", 1000, 325, restart_s=40.0), nodes=2, gpus=2)
    assert look_ahead(*drafts_before_deadlines(tight, AHEAD)).reserve_s.tolist() == [0.0]
    admission = admit(tight, AHEAD, Budget(remaining_s=lambda: math.inf))
    assert admission.admitted.tolist() == [True]
    assert np.all(admission.reserve_s == 0.0)


def test_a_job_may_move_for_another_only_if_it_has_its_restart_reserve() -> None:
    job = a_dated_job("a", 1000, 1100, restart_s=60.0, admitted=True, **running_on(1))
    for due_s, reserve_s in ((1100, 60.0), (1020, 0.0)):
        snapshot = cluster(job | {"deadline_s": NOW_S + due_s}, nodes=2, gpus=2)
        legs = admit(snapshot, AHEAD, NO_SEARCH).legs
        assert len(legs)
        admission = admit(replace(snapshot, legs=legs), AHEAD, NO_SEARCH)
        assert admission.reserve_s is not None
        assert admission.bare_work is not None
        # it trains 300 samples by the next slot, or 240 if it is moved first
        assert (admission.reserve_s[0], admission.bare_work[0] <= 240.0) == (
            reserve_s,
            reserve_s > 0,
        )
