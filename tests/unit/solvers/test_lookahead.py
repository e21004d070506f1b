"""Schedules over several rounds, their independent checker, and schedulers that know deadlines."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.lookahead_check import find_schedule_violations
from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.lookahead import Lookahead, look_ahead, slot_boundaries, slot_spacing
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.last_round import PlannedStarts, ScheduleSegments
from tessera.formulation.state.replans import charge_unsaved_training
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.lookahead import admit
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.rounds import plan
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.arena_deadline import ArenaDeadline
from tessera.solvers.schedulers.base import PublishedScheduler, make_view
from tessera.solvers.schedulers.edf import Edf
from tessera.solvers.schedulers.elasticflow import ElasticFlow
from tests.support.dated_jobs import NOW_S, a_cluster, a_dated_job, a_segment, running_on
from tests.support.driver import reason_of

AHEAD = Policy(deadlines="look-ahead")

ENDLESS = Budget(remaining_s=lambda: math.inf)


def some_segments(*segments: tuple[int, float, float, int]) -> ScheduleSegments:
    """Return segments of (job, start and end in seconds from now, GPUs)."""
    return ScheduleSegments.from_rows(
        [a_segment(start, end, gpus, job) for job, start, end, gpus in segments]
    )


def segment_tuples(segments: ScheduleSegments) -> list[tuple[int, float, float, int]]:
    rows = zip(
        segments.job, segments.start_s - NOW_S, segments.end_s - NOW_S, segments.gpus, strict=True
    )
    return [(int(j), float(s), float(e), int(n)) for j, s, e, n in rows]


def look_ahead_of(snapshot: Snapshot, policy: Policy = AHEAD) -> Lookahead:
    return look_ahead(*drafts_before_deadlines(snapshot, policy))


def all_promised(snapshot: Snapshot) -> np.ndarray:
    return np.ones(len(snapshot.jobs), dtype=np.bool_)


def broken_rules(snapshot: Snapshot, segments: ScheduleSegments) -> list[str]:
    return [v.rule for v in find_schedule_violations(snapshot, segments, all_promised(snapshot))]


def test_a_round_that_has_just_begun_gets_no_slot_of_its_own() -> None:
    assert slot_boundaries(1499.9999, 1500.0, 300.0).tolist() == [1499.9999, 1800.0]


@pytest.mark.parametrize(("distance", "rounds"), [(0.5, 1), (7.9, 1), (8, 2), (16, 4), (100, 16)])
def test_slot_lengths_double_with_the_distance(distance: float, rounds: int) -> None:
    assert slot_spacing(distance) == rounds


def a_running_pair() -> Snapshot:
    """Return a job that has run on two GPUs for 20 of its 50 restart seconds."""
    job = a_dated_job(
        "a", 1000, 900, restart_s=50, state=JobState.RUNNING, cell=(0, 2, 1), since_s=NOW_S - 20
    )
    return a_cluster(job, gangs={0: Gang(members=((0, (0, 1)),))})


def test_a_running_job_pays_only_the_rest_of_its_restart() -> None:
    ahead = look_ahead_of(a_running_pair())
    stays = int(np.flatnonzero(ahead.stays)[0])
    assert ahead.gain[stays, 0] == 2 * (300 - 30)
    assert ahead.cost[stays] == 0


def free_gpus(snapshot: Snapshot) -> list[int]:
    """Return the GPUs that are free for schedules in each slot."""
    return [int(gpus) for gpus in look_ahead_of(snapshot).capacity[0]]


def test_gpus_that_pass_from_a_job_to_a_planned_start_within_a_slot_count_once() -> None:
    """``old`` ends after 100 s on four GPUs, where ``new`` is planned to start then."""
    jobs = [a_dated_job("old", 400, math.inf, requested_gpus=4, **running_on(4))]
    jobs += [a_dated_job("a", 100, 500), a_dated_job("new", 400, math.inf)]
    start: dict[str, float] = {"job": 2, "gpu_type": 0, "gpus": 4, "pipeline_degree": 1, "plan": 0}
    start |= {"start_s": NOW_S + 100, "end_s": NOW_S + 310}
    snapshot = replace(a_cluster(*jobs, nodes=2), planned_starts=PlannedStarts.from_rows([start]))
    assert free_gpus(snapshot)[:3] == [4, 4, 8]


def test_a_grown_job_keeps_its_request_once_it_has_settled() -> None:
    """It started 50 s ago, and settles for five restart times of 100 s."""
    state = running_on(4) | {"since_s": NOW_S - 50, "restart_s": 100.0, "requested_gpus": 2}
    jobs = a_dated_job("grown", 1e6, math.inf, **state), a_dated_job("a", 100, 1000)
    assert free_gpus(a_cluster(*jobs, nodes=2))[:4] == [4, 4, 6, 6]


def test_a_segment_that_ends_after_the_deadline_still_counts_after_its_slot_is_split() -> None:
    snapshot = a_cluster(a_dated_job("a", 300, 21.2 * 300 - NOW_S, admitted=True))
    segments = some_segments((0, 20 * 300 - NOW_S, 24 * 300 - NOW_S, 1))
    assert 22 * 300 not in look_ahead_of(snapshot).boundary_s
    later = replace(snapshot, now_s=7 * 300.0, schedule_segments=segments)
    assert 22 * 300 in look_ahead_of(later).boundary_s
    admission = admit(later, AHEAD, Budget(remaining_s=lambda: 0.0))
    assert segment_tuples(admission.schedule_segments) == [
        (0, 20 * 300 - NOW_S, 22 * 300 - NOW_S, 1)
    ]


def test_a_valid_schedule_breaks_no_rule() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300), a_dated_job("b", 1150, 600, restart_s=10))
    assert broken_rules(snapshot, some_segments((0, 0, 300, 4), (1, 300, 600, 4))) == []


def test_the_checker_charges_the_restart() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300, restart_s=10))
    assert broken_rules(snapshot, some_segments((0, 0, 300, 4))) == ["deadline"]


def test_the_checker_charges_no_restart_to_a_continuing_job() -> None:
    assert broken_rules(a_running_pair(), some_segments((0, 0, 600, 2))) == []
    assert broken_rules(a_running_pair(), some_segments((0, 300, 900, 2))) == []
    assert broken_rules(a_running_pair(), some_segments((0, 0, 300, 2), (0, 600, 900, 2))) == []
    assert broken_rules(a_running_pair(), some_segments((0, 0, 500, 2))) == ["deadline"]


def test_the_checker_charges_unsaved_training_only_to_jobs_that_start_again() -> None:
    pair = a_running_pair()
    unsaved = replace(pair.jobs, unsaved_since_s=np.array([NOW_S - 100]))
    snapshot = charge_unsaved_training(replace(pair, jobs=unsaved))
    assert broken_rules(snapshot, some_segments((0, 0, 530, 2))) == []
    assert broken_rules(snapshot, some_segments((0, 10, 540, 2))) == ["deadline"]


def test_the_checker_lets_promised_jobs_keep_what_they_have_when_nodes_are_lost() -> None:
    running = {"state": JobState.RUNNING, "cell": (0, 2, 1)}
    jobs = [a_dated_job(name, 600, 900, **running) for name in ("a", "b")]
    snapshot = a_cluster(*jobs, a_dated_job("c", 600, 900), gpus=2)
    segments = (0, 0, 300, 2), (1, 0, 300, 2)
    assert broken_rules(snapshot, some_segments(*segments, (2, 300, 600, 2))) == []
    assert broken_rules(snapshot, some_segments(*segments, (2, 0, 300, 2))) == ["capacity"]


def test_the_checker_ignores_training_after_the_deadline() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 290))
    assert broken_rules(snapshot, some_segments((0, 0, 600, 4))) == ["deadline"]


def test_the_checker_checks_capacity_at_every_moment() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 900), a_dated_job("b", 600, 900))
    assert broken_rules(snapshot, some_segments((0, 0, 600, 4), (1, 300, 900, 2))) == ["capacity"]


def test_the_checker_finds_two_cells_of_a_job_at_once() -> None:
    snapshot = a_cluster(a_dated_job("a", 600, 900))
    assert broken_rules(snapshot, some_segments((0, 0, 600, 1), (0, 300, 900, 2))) == [
        "one Cell at a time"
    ]


def test_the_checker_refuses_a_missing_cell() -> None:
    assert "Cell exists" in broken_rules(
        a_cluster(a_dated_job("a", 6, 900)), some_segments((0, 0, 600, 3))
    )


def test_segments_of_a_job_without_a_promise_are_a_violation() -> None:
    snapshot = a_cluster(a_dated_job("a", 600, 900))
    violations = find_schedule_violations(
        snapshot, some_segments((0, 0, 600, 1)), np.zeros(1, np.bool_)
    )
    assert [v.rule for v in violations] == ["promised"]


def plan_snapshot(snapshot: Snapshot, policy: Policy = AHEAD) -> RoundOutcome:
    outcome = plan_round(snapshot, policy, Portfolio(), ENDLESS)
    assert outcome.violations == ()
    return outcome


def test_a_round_whose_promised_schedules_hold_is_decided() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300), a_dated_job("b", 1200, 600))
    outcome = plan_snapshot(snapshot)
    assert outcome.admission is not None
    assert segment_tuples(outcome.admission.schedule_segments) == [
        (0, 0.0, 300.0, 4),
        (1, 300.0, 600.0, 4),
    ]
    assert len(outcome.decisions) == 2


def test_a_round_whose_promised_schedule_is_broken_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def promise_too_little(snapshot: Snapshot, policy: Policy, budget: Budget) -> Admission:
        admission = admit(snapshot, policy, budget)
        return replace(admission, schedule_segments=some_segments((0, 0, 300, 4), (1, 300, 500, 4)))

    monkeypatch.setattr(plan, "admit", promise_too_little)
    snapshot = a_cluster(a_dated_job("a", 1200, 300), a_dated_job("b", 1200, 600))
    outcome = plan_round(snapshot, AHEAD, Portfolio(), ENDLESS)
    assert [(v.rule, v.detail) for v in outcome.violations] == [
        ("deadline", "b trains only 800 of 1200 samples by its deadline")
    ]
    assert outcome.decisions == ()


def admitted_names(snapshot: Snapshot, admission: Admission) -> list[str]:
    return [n for n, yes in zip(snapshot.jobs.name, admission.admitted, strict=True) if yes]


def test_without_search_time_promises_keep_their_schedule_and_new_jobs_fit_in_or_not() -> None:
    old = a_dated_job("old", 1200, 600, admitted=True)
    snapshot = a_cluster(old, a_dated_job("new", 1200, 300), a_dated_job("late", 1200, 600))
    snapshot = replace(snapshot, schedule_segments=some_segments((0, 0, 300, 4)))
    admission = admit(snapshot, AHEAD, Budget(remaining_s=lambda: 0.0))
    assert admitted_names(snapshot, admission) == ["old", "late"]
    assert (admission.proven, admission.work) == (True, 0.0)  # prices prove it


def test_lost_nodes_break_the_promises_of_least_weight() -> None:
    jobs = [a_dated_job(f"j{w}", 600, 300, admitted=True, weight=float(w)) for w in (3, 1, 2)]
    snapshot = a_cluster(*jobs)
    snapshot = replace(snapshot, schedule_segments=some_segments((0, 0, 300, 2), (2, 0, 300, 2)))
    admission = admit(snapshot, AHEAD, ENDLESS)
    assert admitted_names(snapshot, admission) == ["j3", "j2"]
    assert admission.given_up == frozenset({1})


def test_a_refused_job_gets_a_deadline_that_can_then_be_met() -> None:
    def with_second(due_s: float) -> Snapshot:
        first = a_dated_job("first", 2400, 600, admitted=True)
        snapshot = a_cluster(first, a_dated_job("second", 1200, due_s, restart_s=7))
        return replace(snapshot, schedule_segments=some_segments((0, 0, 600, 4)))

    refused = admit(with_second(700.0), AHEAD, ENDLESS)
    assert admitted_names(with_second(700.0), refused) == ["first"]
    due_s = float(refused.earliest_s[1]) - NOW_S
    assert due_s == pytest.approx(907.0, abs=2.0)
    assert admit(with_second(due_s), AHEAD, ENDLESS).admitted.all()


def test_the_reason_of_a_refused_job_names_the_deadline_that_would_be_met() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 310, weight=2.0), a_dated_job("b", 1200, 310))
    decision = plan_snapshot(snapshot).decisions[1]
    reason = reason_of(decision)
    assert reason.code is ReasonCode.DEADLINE_REFUSED
    assert dict(reason.evidence)["earliest_deadline"] == "1970-01-01T00:30:02Z"
    assert not decision.admitted


def test_an_admitted_job_that_starts_later_gets_a_reason_that_says_when() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300), a_dated_job("b", 1200, 600))
    first, second = plan_snapshot(snapshot).decisions
    assert (first.cell.gpus, first.admitted) == (4, True)
    assert second.admitted
    reason = reason_of(second)
    assert reason.code is ReasonCode.DEADLINE_PLANNED
    assert dict(reason.evidence)["start"] == "1970-01-01T00:25:00Z"


def test_a_round_of_recorded_work_zero_does_not_search() -> None:
    snapshot = a_cluster(*(a_dated_job(f"j{i}", 700 + 50 * i, 500 + 60 * i) for i in range(7)))
    admission = admit(
        snapshot, AHEAD, Budget(remaining_s=lambda: math.inf, work={"admission": 0.0})
    )
    assert (admission.proven, admission.work) == (False, 0.0)


NO_SEARCH = Budget(remaining_s=lambda: 0.0)


def gpus_of(policy: PublishedScheduler, snapshot: Snapshot) -> list[int]:
    view = make_view(snapshot, Policy())
    return [int(view.draft.gpus[c]) if c >= 0 else 0 for c in policy.choose(view).tolist()]


def test_edf_gives_the_earliest_deadline_its_request_and_suspends_a_later_one() -> None:
    late = a_dated_job("late", 400, 4000, requested_gpus=4, **running_on(4))
    early = a_dated_job("early", 4000, 1500, requested_gpus=4)
    assert gpus_of(Edf(), a_cluster(late, early)) == [0, 4]


def test_edf_does_not_start_a_late_job_but_lets_a_running_one_continue_if_there_is_room() -> None:
    hopeless = a_dated_job("hopeless", 40_000, 1500)
    assert gpus_of(Edf(), a_cluster(hopeless)) == [0]
    running = a_dated_job("running", 40_000, 1500, **running_on(2))
    assert gpus_of(Edf(), a_cluster(running)) == [2]
    assert gpus_of(Edf(), a_cluster(running, a_dated_job("b", 4000, 2000, requested_gpus=4))) == [
        0,
        4,
    ]


def test_arena_launches_only_on_cells_that_finish_in_time_including_a_restart() -> None:
    assert gpus_of(ArenaDeadline(), a_cluster(a_dated_job("a", 4000, 1000, requested_gpus=2))) == [
        4
    ]
    late = a_dated_job("a", 4000, 1000, requested_gpus=2, restart_s=10.0)
    assert gpus_of(ArenaDeadline(), a_cluster(late)) == [0]


def test_elasticflow_enlarges_no_job_whose_restart_would_make_it_late() -> None:
    job = {"work_s": 1000.0, "due_s": 1010.0}
    assert gpus_of(
        ElasticFlow(), a_cluster(a_dated_job("a", **job, **running_on(1), restart_s=900.0))
    ) == [1]
    assert gpus_of(
        ElasticFlow(), a_cluster(a_dated_job("a", **job, **running_on(1), restart_s=10.0))
    ) == [4]


def test_a_job_too_tight_for_a_reserve_is_promised_without_one() -> None:
    tight = a_cluster(a_dated_job("a", 1000, 325, restart_s=40.0), nodes=2, gpus=2)
    assert look_ahead(*drafts_before_deadlines(tight, AHEAD)).reserve_s.tolist() == [0.0]
    admission = admit(tight, AHEAD, Budget(remaining_s=lambda: math.inf))
    assert admission.admitted.tolist() == [True]
    assert np.all(admission.reserve_s == 0.0)


def test_a_job_may_move_for_another_only_if_it_has_its_restart_reserve() -> None:
    job = a_dated_job("a", 1000, 1100, restart_s=60.0, admitted=True, **running_on(1))
    for due_s, reserve_s in ((1100, 60.0), (1020, 0.0)):
        snapshot = a_cluster(job | {"deadline_s": NOW_S + due_s}, nodes=2, gpus=2)
        segments = admit(snapshot, AHEAD, NO_SEARCH).schedule_segments
        assert len(segments)
        admission = admit(replace(snapshot, schedule_segments=segments), AHEAD, NO_SEARCH)
        assert admission.reserve_s is not None
        assert admission.bare_work is not None
        # it trains 300 samples by the next slot, or 240 if it is moved first
        assert (admission.reserve_s[0], admission.bare_work[0] <= 240.0) == (
            reserve_s,
            reserve_s > 0,
        )
