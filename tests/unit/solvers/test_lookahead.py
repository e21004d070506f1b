"""Schedules over several rounds, their independent checker, and schedulers that know deadlines."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.admission import Admission
from tessera.formulation.last_round import Legs
from tessera.formulation.lifecycle import JobState
from tessera.formulation.lookahead import (
    Lookahead,
    find_schedule_violations,
    legs_of,
    look_ahead,
    may_be_scattered,
    picks_of,
    resource_usage,
    slot_boundaries,
    slot_spacing,
    spare_gpus,
    trained_samples,
)
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.lookahead import admit
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.arena_deadline import ArenaDeadline
from tessera.solvers.schedulers.base import PublishedScheduler, make_view
from tessera.solvers.schedulers.edf import Edf
from tessera.solvers.schedulers.elasticflow import ElasticFlow
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.dated_jobs import NOW_S, a_cluster, a_dated_job, a_leg, running_on

AHEAD = Policy(deadlines="look-ahead")

ENDLESS = Budget(remaining_s=lambda: math.inf)


def some_legs(*legs: tuple[int, float, float, int]) -> Legs:
    """Return legs of (job, start and end in seconds from now, GPUs)."""
    return Legs.from_rows([a_leg(start, end, gpus, job) for job, start, end, gpus in legs])


def leg_tuples(legs: Legs) -> list[tuple[int, float, float, int]]:
    rows = zip(legs.job, legs.start_s - NOW_S, legs.end_s - NOW_S, legs.gpus, strict=True)
    return [(int(j), float(s), float(e), int(n)) for j, s, e, n in rows]


def look_ahead_of(snapshot: Snapshot, policy: Policy = AHEAD) -> Lookahead:
    return look_ahead(*drafts_before_deadlines(snapshot, policy))


def all_promised(snapshot: Snapshot) -> np.ndarray:
    return np.ones(len(snapshot.jobs), dtype=np.bool_)


def broken_rules(snapshot: Snapshot, legs: Legs) -> list[str]:
    return [v.rule for v in find_schedule_violations(snapshot, legs, all_promised(snapshot))]


def test_slots_start_at_one_round_and_never_exceed_a_quarter_of_their_distance() -> None:
    boundaries = slot_boundaries(NOW_S, NOW_S + 400 * 300, 300.0)
    ends = (boundaries[1:] - NOW_S) / 300
    lengths = np.diff(boundaries) / 300
    assert lengths[:7].tolist() == [1.0] * 7
    assert np.all(lengths[7:] <= ends[7:] / 4 + 1)
    assert len(lengths) < 40


def test_the_first_slot_ends_at_the_next_multiple_of_the_round_length() -> None:
    assert slot_boundaries(1299.0, 1300.0, 300.0).tolist() == [1299.0, 1500.0]


def test_a_round_that_has_just_begun_gets_no_slot_of_its_own() -> None:
    assert slot_boundaries(1499.9999, 1500.0, 300.0).tolist() == [1499.9999, 1800.0]


@pytest.mark.parametrize(("distance", "rounds"), [(0.5, 1), (7.9, 1), (8, 2), (16, 4), (100, 16)])
def test_slot_lengths_double_with_the_distance(distance: float, rounds: int) -> None:
    assert slot_spacing(distance) == rounds


def test_each_start_costs_a_restart_and_continuing_costs_none() -> None:
    ahead = look_ahead_of(a_cluster(a_dated_job("a", 1000, 1500, restart_s=50)))
    one = int(np.flatnonzero(ahead.rate == 1.0)[0])
    together = np.array([one, one, -1, -1, -1, -1])[: ahead.slots]
    apart = np.array([one, -1, one, -1, -1, -1])[: ahead.slots]
    assert trained_samples(ahead, 0, together) == 550.0
    assert trained_samples(ahead, 0, apart) == 500.0


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


def test_a_running_job_is_not_restarted_on_its_own_cell() -> None:
    ahead = look_ahead_of(a_running_pair())
    anew = (ahead.rate == 2.0) & ~ahead.stays
    assert not ahead.allowed()[anew, 0].any()
    assert ahead.allowed()[anew, 1].all()


def test_a_badly_placed_job_continues_at_its_actual_rate() -> None:
    estimates = [
        an_estimate(gpus=2, iter_time_s=128),
        an_estimate(gpus=2, nodes=2, iter_time_s=256),
    ]
    job = a_dated_job("a", 100, 900, state=JobState.RUNNING, cell=(0, 2, 1))
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        jobs=[job],
        estimates=estimates,
        gangs={0: Gang(members=((0, (0,)), (1, (0,))))},
    )
    ahead = look_ahead_of(replace(snapshot, now_s=NOW_S))
    assert ahead.rate[ahead.stays].tolist() == [1.0]
    assert ahead.rate[~ahead.stays].tolist() == [2.0]


def test_the_past_part_of_a_leg_is_cut_off() -> None:
    snapshot = a_cluster(a_dated_job("a", 1000, 1800))
    ahead = look_ahead_of(snapshot)
    legs = some_legs((0, -600, -300, 2), (0, -300, 600, 4))
    assert leg_tuples(legs_of(ahead, picks_of(ahead, legs))) == [(0, 0.0, 600.0, 4)]


def test_a_leg_that_ends_after_the_deadline_still_counts_after_its_slot_is_split() -> None:
    snapshot = a_cluster(a_dated_job("a", 300, 21.2 * 300 - NOW_S, admitted=True))
    legs = some_legs((0, 20 * 300 - NOW_S, 24 * 300 - NOW_S, 1))
    assert 22 * 300 not in look_ahead_of(snapshot).boundary_s
    later = replace(snapshot, now_s=7 * 300.0, legs=legs)
    assert 22 * 300 in look_ahead_of(later).boundary_s
    admission = admit(later, AHEAD, Budget(remaining_s=lambda: 0.0))
    assert leg_tuples(admission.legs) == [(0, 20 * 300 - NOW_S, 22 * 300 - NOW_S, 1)]


def test_a_valid_schedule_breaks_no_rule() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300), a_dated_job("b", 1150, 600, restart_s=10))
    assert broken_rules(snapshot, some_legs((0, 0, 300, 4), (1, 300, 600, 4))) == []


def test_the_checker_charges_the_restart() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300, restart_s=10))
    assert broken_rules(snapshot, some_legs((0, 0, 300, 4))) == ["deadline"]


def test_the_checker_charges_no_restart_to_a_continuing_job() -> None:
    assert broken_rules(a_running_pair(), some_legs((0, 0, 600, 2))) == []
    assert broken_rules(a_running_pair(), some_legs((0, 300, 900, 2))) == []
    assert broken_rules(a_running_pair(), some_legs((0, 0, 300, 2), (0, 600, 900, 2))) == []
    assert broken_rules(a_running_pair(), some_legs((0, 0, 500, 2))) == ["deadline"]


def test_the_checker_ignores_training_after_the_deadline() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 290))
    assert broken_rules(snapshot, some_legs((0, 0, 600, 4))) == ["deadline"]


def test_the_checker_checks_capacity_at_every_moment() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 900), a_dated_job("b", 600, 900))
    assert broken_rules(snapshot, some_legs((0, 0, 600, 4), (1, 300, 900, 2))) == ["capacity"]
    held = find_schedule_violations(
        snapshot, some_legs((0, 0, 600, 2), (1, 0, 600, 2)), all_promised(snapshot), {0: 1}
    )
    assert [v.rule for v in held] == ["capacity"]


def test_the_checker_finds_two_cells_of_a_job_at_once() -> None:
    snapshot = a_cluster(a_dated_job("a", 600, 900))
    assert broken_rules(snapshot, some_legs((0, 0, 600, 1), (0, 300, 900, 2))) == [
        "one Cell at a time"
    ]


def test_the_checker_refuses_a_missing_cell() -> None:
    assert "Cell exists" in broken_rules(
        a_cluster(a_dated_job("a", 6, 900)), some_legs((0, 0, 600, 3))
    )


def test_legs_of_a_job_without_a_promise_are_a_violation() -> None:
    snapshot = a_cluster(a_dated_job("a", 600, 900))
    violations = find_schedule_violations(
        snapshot, some_legs((0, 0, 600, 1)), np.zeros(1, np.bool_)
    )
    assert [v.rule for v in violations] == ["promised"]


def plan_snapshot(snapshot: Snapshot, policy: Policy = AHEAD) -> RoundOutcome:
    outcome = plan_round(snapshot, policy, Portfolio(), ENDLESS)
    assert outcome.violations == ()
    return outcome


def admitted_names(snapshot: Snapshot, admission: Admission) -> list[str]:
    return [n for n, yes in zip(snapshot.jobs.name, admission.admitted, strict=True) if yes]


def test_a_promise_is_moved_in_time_to_admit_a_new_job() -> None:
    old = a_dated_job("old", 1200, 600, admitted=True)
    snapshot = a_cluster(old, a_dated_job("new", 1200, 300))
    snapshot = replace(snapshot, legs=some_legs((0, 0, 300, 4)))
    admission = admit(snapshot, AHEAD, ENDLESS)
    assert admitted_names(snapshot, admission) == ["old", "new"]
    assert leg_tuples(admission.legs) == [(0, 300.0, 600.0, 4), (1, 0.0, 300.0, 4)]


def test_without_search_time_promises_keep_their_schedule_and_new_jobs_fit_in_or_not() -> None:
    old = a_dated_job("old", 1200, 600, admitted=True)
    snapshot = a_cluster(old, a_dated_job("new", 1200, 300), a_dated_job("late", 1200, 600))
    snapshot = replace(snapshot, legs=some_legs((0, 0, 300, 4)))
    admission = admit(snapshot, AHEAD, Budget(remaining_s=lambda: 0.0))
    assert admitted_names(snapshot, admission) == ["old", "late"]
    assert (admission.proven, admission.work) == (True, 0.0)  # prices prove it


def test_lost_nodes_break_the_promises_of_least_weight() -> None:
    jobs = [a_dated_job(f"j{w}", 600, 300, admitted=True, weight=float(w)) for w in (3, 1, 2)]
    snapshot = a_cluster(*jobs)
    snapshot = replace(snapshot, legs=some_legs((0, 0, 300, 2), (2, 0, 300, 2)))
    admission = admit(snapshot, AHEAD, ENDLESS)
    assert admitted_names(snapshot, admission) == ["j3", "j2"]
    assert admission.given_up == frozenset({1})


def test_a_refused_job_gets_a_deadline_that_can_then_be_met() -> None:
    def with_second(due_s: float) -> Snapshot:
        first = a_dated_job("first", 2400, 600, admitted=True)
        snapshot = a_cluster(first, a_dated_job("second", 1200, due_s, restart_s=7))
        return replace(snapshot, legs=some_legs((0, 0, 600, 4)))

    refused = admit(with_second(700.0), AHEAD, ENDLESS)
    assert admitted_names(with_second(700.0), refused) == ["first"]
    due_s = float(refused.earliest_s[1]) - NOW_S
    assert due_s == pytest.approx(907.0, abs=2.0)
    assert admit(with_second(due_s), AHEAD, ENDLESS).admitted.all()


def test_the_reason_of_a_refused_job_names_the_deadline_that_would_be_met() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 310, weight=2.0), a_dated_job("b", 1200, 310))
    decision = plan_snapshot(snapshot).decisions[1]
    assert decision.reason is not None
    assert decision.reason.code is ReasonCode.DEADLINE_REFUSED
    assert dict(decision.reason.evidence)["earliest_deadline"] == "1970-01-01T00:30:02Z"
    assert not decision.admitted


def test_an_admitted_job_that_starts_later_gets_a_reason_that_says_when() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300), a_dated_job("b", 1200, 600))
    first, second = plan_snapshot(snapshot).decisions
    assert (first.cell.gpus, first.admitted) == (4, True)
    assert second.admitted
    assert second.reason is not None
    assert second.reason.code is ReasonCode.DEADLINE_PLANNED
    assert dict(second.reason.evidence)["start"] == "1970-01-01T00:25:00Z"


def test_a_best_effort_job_gets_only_gpus_that_the_certificates_do_not_need_now() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 300), a_job("b", weight=50.0))
    first, second = plan_snapshot(snapshot).decisions
    assert (first.cell.gpus, second.cell.gpus) == (4, 0)


def gpus_before_a_later_certificate(gpus: int, *, guaranteed: bool) -> int:
    """Return the number of GPUs on which a job starts one round before a promised job needs four."""
    promised = a_dated_job("a", 1200, 600, admitted=True, restart_s=0)
    other = a_job("g", guaranteed=guaranteed, requested_gpus=1, weight=90.0)
    snapshot = a_cluster(promised, other, gpus=gpus)
    held = replace(snapshot, legs=some_legs((0, 300, 600, 4)))
    outcome = plan_snapshot(held)
    assert outcome.admission is not None
    assert leg_tuples(outcome.admission.legs) == [(0, 300.0, 600.0, 4)]
    return outcome.decisions[1].cell.gpus


def test_a_guaranteed_job_starts_only_on_gpus_that_no_certificate_will_need() -> None:
    assert gpus_before_a_later_certificate(4, guaranteed=True) == 0
    assert gpus_before_a_later_certificate(5, guaranteed=True) >= 1
    assert gpus_before_a_later_certificate(4, guaranteed=False) >= 1


def test_spare_gpus_are_not_needed_by_any_leg_at_any_time() -> None:
    snapshot = a_cluster(a_dated_job("a", 1200, 900), a_dated_job("b", 600, 900))
    _, draft = drafts_before_deadlines(snapshot, AHEAD)
    assert spare_gpus(draft, some_legs((0, 0, 300, 1), (1, 600, 900, 2))).tolist() == [2]
    assert spare_gpus(draft, some_legs((0, 0, 300, 1), (1, 0, 300, 2))).tolist() == [1]


def test_a_launched_guaranteed_job_keeps_its_smallest_cell_in_every_slot() -> None:
    holder = a_job("g", guaranteed=True, requested_gpus=2, state=JobState.RUNNING, cell=(0, 4, 1))
    snapshot = a_cluster(
        holder, a_dated_job("a", 1200, 900), gangs={0: Gang(members=((0, (0, 1, 2, 3)),))}
    )
    ahead = look_ahead_of(snapshot)
    assert set(ahead.capacity[0].tolist()) == {2}
    assert admit(snapshot, AHEAD, ENDLESS).admitted.tolist() == [False, True]


def test_a_guaranteed_job_with_a_deadline_keeps_gpus_from_its_start_to_the_end() -> None:
    snapshot = a_cluster(a_dated_job("a", 300, 300, guaranteed=True, requested_gpus=1))
    ahead = look_ahead_of(snapshot)
    picks = np.full((1, ahead.slots), -1)
    picks[0, 0] = np.flatnonzero(ahead.rate == 2.0)[0]
    assert resource_usage(ahead, picks)[0].tolist() == [2, *([1] * (ahead.slots - 1))]


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


def test_edf_takes_the_fastest_cell_in_time_if_the_request_is_too_slow() -> None:
    assert gpus_of(Edf(), a_cluster(a_dated_job("a", 4000, 1500, requested_gpus=1))) == [4]


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


def test_a_running_job_that_can_no_longer_be_in_time_continues_under_arena() -> None:
    assert gpus_of(ArenaDeadline(), a_cluster(a_dated_job("a", 40_000, 100, **running_on(4)))) == [
        4
    ]


def test_elasticflow_enlarges_no_job_whose_restart_would_make_it_late() -> None:
    job = {"work_s": 1000.0, "due_s": 1010.0}
    assert gpus_of(
        ElasticFlow(), a_cluster(a_dated_job("a", **job, **running_on(1), restart_s=900.0))
    ) == [1]
    assert gpus_of(
        ElasticFlow(), a_cluster(a_dated_job("a", **job, **running_on(1), restart_s=10.0))
    ) == [4]


def test_a_restart_is_reserved_if_gpus_of_a_type_lie_on_several_nodes() -> None:
    job = a_dated_job("a", 1000, 2000, restart_s=60.0)
    apart, together = a_cluster(job, nodes=2, gpus=2), a_cluster(job, nodes=1, gpus=4)
    assert (may_be_scattered(apart.nodes), may_be_scattered(together.nodes)) == (True, False)
    assert look_ahead(*drafts_before_deadlines(apart, AHEAD)).reserve_s.tolist() == [60.0]
    assert look_ahead(*drafts_before_deadlines(together, AHEAD)).reserve_s.tolist() == [0.0]


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
