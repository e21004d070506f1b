"""Policies that know deadlines: EDF, Arena's with Eq. (6), ElasticFlow, and how look-ahead makes room."""

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


def dated(name: str, work_s: float, due_s: float, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds that is due ``due_s`` from now."""
    length = work_s / 256
    given = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, **(given | more))


def on(gpus: int) -> dict[str, Any]:
    """Return the fields of a job that has run on so many GPUs for long."""
    return {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 1.0, "generation": 1}


def cluster(*jobs: dict[str, Any], nodes: int = 1, gpus: int = 4, **more: Any) -> Snapshot:
    """Return nodes of GPUs on which 1, 2 or 4 GPUs train as many samples/s; what runs lies on the first."""
    gangs, first = {}, 0
    for j, job in enumerate(jobs):
        if count := job["current_gpus"]:
            gangs[j] = Gang(members=((0, tuple(range(first, first + count))),))
            first += count
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2, 4)]
    found = a_snapshot(
        nodes=some_nodes((0, nodes, gpus)), jobs=jobs, estimates=estimates, gangs=gangs, **more
    )
    return replace(found, now_s=NOW_S)


def gpus_of(policy: PublishedScheduler, snapshot: Snapshot) -> list[int]:
    view = make_view(snapshot, Policy())
    return [int(view.draft.gpus[c]) if c >= 0 else 0 for c in policy.choose(view).tolist()]


def test_edf_gives_the_earliest_deadline_what_it_asked_for_and_suspends_a_later_one() -> None:
    late = dated("late", 400, 4000, requested_gpus=4, **on(4))
    early = dated("early", 4000, 1500, requested_gpus=4)
    assert gpus_of(Edf(), cluster(late, early)) == [0, 4]


def test_edf_leaves_what_runs_in_time_as_it_is() -> None:
    assert gpus_of(Edf(), cluster(dated("a", 400, 4000, requested_gpus=4, **on(1)))) == [1]


def test_edf_takes_the_fastest_that_is_in_time_where_the_request_is_not() -> None:
    assert gpus_of(Edf(), cluster(dated("a", 4000, 1500, requested_gpus=1))) == [4]


def test_edf_does_not_start_what_would_be_late_and_lets_it_go_on_where_there_is_room() -> None:
    hopeless = dated("hopeless", 40_000, 1500)
    assert gpus_of(Edf(), cluster(hopeless)) == [0]
    running = dated("running", 40_000, 1500, **on(2))
    assert gpus_of(Edf(), cluster(running)) == [2]
    assert gpus_of(Edf(), cluster(running, dated("b", 4000, 2000, requested_gpus=4))) == [0, 4]


def test_arena_launches_only_on_cells_that_end_in_time_a_restart_included() -> None:
    assert gpus_of(ArenaDeadline(), cluster(dated("a", 4000, 1000, requested_gpus=2))) == [4]
    late = dated("a", 4000, 1000, requested_gpus=2, restart_s=10.0)
    assert gpus_of(ArenaDeadline(), cluster(late)) == [0]


def test_arena_does_not_scale_a_job_out_of_its_deadline_for_another() -> None:
    tight = dated("tight", 4000, 1500, requested_gpus=4, **on(4))
    waiting = dated("waiting", 100, 9000, requested_gpus=2)
    assert gpus_of(ArenaDeadline(), cluster(tight, waiting)) == [4, 0]
    loose = dated("loose", 4000, 3000, requested_gpus=4, **on(4))
    assert gpus_of(ArenaDeadline(), cluster(loose, waiting)) == [2, 2]


def test_a_running_job_that_cannot_be_in_time_any_more_goes_on_under_arena() -> None:
    assert gpus_of(ArenaDeadline(), cluster(dated("a", 40_000, 100, **on(4)))) == [4]


def test_elasticflow_grows_no_job_whose_restart_would_make_it_late() -> None:
    job = {"work_s": 1000.0, "due_s": 1010.0}
    assert gpus_of(ElasticFlow(), cluster(dated("a", **job, **on(1), restart_s=900.0))) == [1]
    assert gpus_of(ElasticFlow(), cluster(dated("a", **job, **on(1), restart_s=10.0))) == [4]


def test_a_promise_moves_for_a_new_job_that_is_due_earlier() -> None:
    """The first runs on all GPUs by a schedule from now on; the second needs them before it."""
    first = dated("first", 4 * 3000, 6000)
    before = admit(cluster(first), AHEAD, NO_SEARCH)
    both = cluster(first | {"admitted": True}, dated("second", 4 * 1200, 1200))
    after = admit(replace(both, legs=before.legs), AHEAD, NO_SEARCH)
    assert after.admitted.tolist() == [True, True]


def test_the_largest_new_job_gives_way_where_not_all_fit() -> None:
    jobs = [dated("large", 4 * 1100, 1200), dated("a", 4 * 700, 1500), dated("b", 4 * 700, 1501)]
    assert admit(cluster(*jobs), AHEAD, NO_SEARCH).admitted.tolist() == [False, True, True]


def test_a_restart_is_kept_in_reserve_where_gpus_of_a_type_lie_on_several_nodes() -> None:
    job = dated("a", 1000, 2000, restart_s=60.0)
    apart, together = cluster(job, nodes=2, gpus=2), cluster(job, nodes=1, gpus=4)
    assert (may_be_scattered(apart.nodes), may_be_scattered(together.nodes)) == (True, False)
    assert look_ahead(*drafts_before_deadlines(apart, AHEAD)).reserve_s.tolist() == [60.0]
    assert look_ahead(*drafts_before_deadlines(together, AHEAD)).reserve_s.tolist() == [0.0]


def test_a_job_too_tight_for_a_reserve_is_promised_without_one() -> None:
    tight = cluster(dated("a", 1000, 325, restart_s=40.0), nodes=2, gpus=2)
    assert look_ahead(*drafts_before_deadlines(tight, AHEAD)).reserve_s.tolist() == [0.0]
    found = admit(tight, AHEAD, Budget(remaining_s=lambda: math.inf))
    assert found.admitted.tolist() == [True]
    assert np.all(found.reserve_s == 0.0)


def test_a_job_that_has_its_reserve_may_move_for_another_and_one_without_may_not() -> None:
    job = dated("a", 1000, 1100, restart_s=60.0, admitted=True, **on(1))
    for due_s, reserve_s in ((1100, 60.0), (1020, 0.0)):
        snapshot = cluster(job | {"deadline_s": NOW_S + due_s}, nodes=2, gpus=2)
        legs = admit(snapshot, AHEAD, NO_SEARCH).legs
        assert len(legs)
        found = admit(replace(snapshot, legs=legs), AHEAD, NO_SEARCH)
        assert found.reserve_s is not None
        assert found.bare_work is not None
        # it trains 300 samples until the next slot, 240 if it is moved first
        assert (found.reserve_s[0], found.bare_work[0] <= 240.0) == (reserve_s, reserve_s > 0)
