"""Deadlines in one round: promised, kept, planned for, refused and waived."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import RowKind
from tessera.formulation.round.promises.deadlines import certificates_are_kept
from tessera.formulation.round.starts.shares import running_shares
from tessera.formulation.round.statement import Statement, state_round
from tessera.formulation.state.last_round import NO_SEGMENTS, ScheduleSegments
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.dated_jobs import NOW_S, a_cluster, a_dated_job, a_segment, running_on
from tests.support.driver import decide_round, decision_kinds, reason_of, the_next_round

MYOPIC = Policy(deadlines="myopic")

AHEAD = Policy(deadlines="look-ahead")

RUNS: dict[str, Any] = {"state": JobState.RUNNING, "generation": 1}


def column_gpus(statement: Statement, job: int = 0) -> list[int]:
    """Return the GPUs of the columns that ``job`` may use."""
    problem = statement.problem
    return [int(problem.cells.gpus[problem.cell[c]]) for c in problem.columns_of(job)]


@pytest.mark.parametrize(
    ("due_s", "gpus_left"),
    [(1199, []), (1200, [4]), (2399, [4]), (2400, [2, 4]), (4800, [1, 2, 4])],
)
def test_only_columns_that_finish_in_time_are_left(due_s: float, gpus_left: list[int]) -> None:
    assert column_gpus(state_round(a_cluster(a_dated_job("a", 4800, due_s)), MYOPIC)) == gpus_left


def test_a_job_that_cannot_finish_in_time_is_rejected_with_the_time_when_it_would() -> None:
    (decision,) = decide_round(
        a_cluster(a_dated_job("a", 4800, 1100, restart_s=50)), MYOPIC, "portfolio"
    ).decisions
    assert decision.kind is DecisionKind.REJECT
    reason = reason_of(decision)
    assert reason.code is ReasonCode.DEADLINE_UNREACHABLE
    evidence = dict(reason.evidence)
    assert evidence["finish"] == evidence["earliest_deadline"] == "1970-01-01T00:40:50Z"
    assert "1970-01-01T00:40:50Z" in str(reason.next_step)


@pytest.mark.parametrize("policy", [MYOPIC, AHEAD], ids=["myopic", "look-ahead"])
def test_a_past_deadline_is_refused_and_the_round_continues(policy: Policy) -> None:
    first, second = decide_round(
        a_cluster(a_dated_job("a", 4800, -1), a_job("b")), policy, "portfolio"
    ).decisions
    assert first.kind is DecisionKind.REJECT
    assert reason_of(first).code is ReasonCode.DEADLINE_PAST
    assert second.kind is DecisionKind.START


@pytest.mark.parametrize("policy", [MYOPIC, AHEAD], ids=["myopic", "look-ahead"])
def test_a_job_that_only_lost_nodes_could_serve_waits_for_them(policy: Policy) -> None:
    snapshot = a_cluster(a_dated_job("a", 4800, 1100), nodes=2)
    lost = replace(snapshot.nodes, schedulable=np.array([True, False]))
    (decision,) = decide_round(replace(snapshot, nodes=lost), policy, "portfolio").decisions
    assert decision.kind is DecisionKind.WAIT
    assert reason_of(decision).code is ReasonCode.DEADLINE_UNREACHABLE


@pytest.mark.parametrize("policy", [MYOPIC, AHEAD], ids=["myopic", "look-ahead"])
def test_an_impossible_promise_is_waived_and_the_job_continues(policy: Policy) -> None:
    job = a_dated_job("a", 48000, 100, admitted=True, cell=(0, 4, 1), **RUNS)
    snapshot = a_cluster(job)
    outcome = decide_round(snapshot, policy, "portfolio")
    assert outcome.given_up == frozenset({0})
    assert (outcome.decisions[0].kind, outcome.decisions[0].admitted) == (DecisionKind.KEEP, False)


def test_a_promised_job_is_not_moved_if_a_restart_would_make_it_late() -> None:
    def movable(due_s: float) -> bool:
        job = a_dated_job("a", 4800, due_s, restart_s=100, cell=(0, 4, 1), **RUNS)
        return bool(state_round(a_cluster(job), MYOPIC).problem.movable[0])

    assert movable(1300)
    assert not movable(1299)


def a_certificate(*segments: tuple[float, float, int], work: float = 0.0) -> Admission:
    """Return the admission of job 0 with segments (start and end from now, GPUs) and a least ``work``."""
    rows = [a_segment(start, end, gpus) for start, end, gpus in segments]
    return Admission(
        admitted=np.array([True]),
        schedule_segments=ScheduleSegments.from_rows(rows) if rows else NO_SEGMENTS,
        least_work=np.array([work]),
        until_s=NOW_S + 300,
        earliest_s=np.array([np.nan]),
    )


def keep_certificate(
    snapshot: Snapshot, admission: Admission
) -> tuple[list[int], bool, float, bool]:
    """Return job 0's remaining GPU counts, whether it must run, its least rate, whether it may move."""
    _, draft = drafts_before_deadlines(snapshot, AHEAD)
    draft = certificates_are_kept(draft, admission)
    gpus = draft.gpus[draft.job == 0].tolist()
    return gpus, bool(draft.must_run[0]), float(draft.least_rate[0]), bool(draft.movable[0])


def test_any_column_that_trains_as_much_by_the_next_slot_is_allowed() -> None:
    snapshot = a_cluster(a_dated_job("a", 4800, 9000))
    gpus, must, least_rate, _ = keep_certificate(snapshot, a_certificate((0, 300, 2), work=600))
    assert (gpus, must) == ([2, 4], True)
    assert least_rate == pytest.approx(2.0)


def test_a_job_that_need_not_run_yet_may_wait_or_run_on_any_column() -> None:
    snapshot = a_cluster(a_dated_job("a", 4800, 9000))
    assert keep_certificate(snapshot, a_certificate((300, 600, 2)))[:2] == ([1, 2, 4], False)


def test_the_certificates_own_cell_is_always_allowed() -> None:
    snapshot = a_cluster(a_dated_job("a", 4800, 9000, restart_s=150))
    gpus, must, least_rate, _ = keep_certificate(snapshot, a_certificate((0, 900, 2), work=600))
    assert (gpus, must) == ([2], True)
    assert least_rate == pytest.approx(2.0)


def test_a_certified_job_that_cannot_afford_a_restart_keeps_its_gpus() -> None:
    job = a_dated_job("a", 4800, 9000, restart_s=150, admitted=True, cell=(0, 2, 1), **RUNS)
    snapshot = a_cluster(job)
    gpus, must, _, movable = keep_certificate(snapshot, a_certificate((0, 900, 2), work=500))
    assert (gpus, must, movable) == ([2, 4], True, False)
    assert keep_certificate(snapshot, a_certificate((0, 900, 2), work=290))[3]


@pytest.mark.parametrize("start_s", [0.0, 600.0], ids=["by the next slot", "later"])
def test_other_jobs_leave_a_schedule_its_gpus(start_s: float) -> None:
    """``long`` would hold its GPUs beyond the time at which the schedule needs all of them."""
    jobs = a_dated_job("a", 1200, 9000), a_job("long", requested_gpus=1, iterations_left=1e6)
    admission = a_certificate((start_s, 900, 4))
    admission = replace(
        admission,
        admitted=np.array([True, False]),
        least_work=np.zeros(2),
        earliest_s=np.full(2, np.nan),
    )
    statement = state_round(a_cluster(*jobs), replace(AHEAD, promise_starts=False), admission)
    (row,) = [row for row in statement.problem.rows if row.kind is RowKind.RESERVED]
    assert row.capacity == 0
    choice = np.array([-1, statement.problem.columns_of(1)[0]])
    assert statement.problem.used(choice).tolist()[-1] > 0


def test_a_running_job_leaves_what_its_schedule_does_not_need() -> None:
    snapshot = a_cluster(a_dated_job("a", 4800, 9000, admitted=True, **running_on(4)))
    snapshot = replace(
        snapshot,
        schedule_segments=ScheduleSegments.from_rows(
            [a_segment(-100, 600, 2), a_segment(600, 900, 4)]
        ),
    )
    _, draft = drafts_before_deadlines(snapshot, AHEAD)
    shares = running_shares(draft)
    assert (shares.gpus.tolist(), shares.all_until_s.tolist()) == ([4], [NOW_S])
    assert (shares.part.tolist(), shares.part_until_s.tolist()) == ([2], [NOW_S + 600])


def test_times_are_rounded_up_so_that_a_reported_deadline_is_late_enough() -> None:
    assert format_rfc3339(0.2) == "1970-01-01T00:00:01Z"
    assert format_rfc3339(math.inf) == "never"


def test_a_reason_shows_the_deadline_to_the_second_like_the_job() -> None:
    late = a_dated_job("late", 4800, 60.75)
    reason = state_round(a_cluster(late), MYOPIC).absent[0]
    assert dict(reason.evidence)["deadline"] == "1970-01-01T00:21:00Z"


DEFAULT = Policy()

IGNORING = Policy(deadlines="ignore")


def a_promised_round(due_s: float = 1300.0) -> tuple[Snapshot, RoundOutcome]:
    """Return the snapshot and outcome of a round that promised a 20-minute job its deadline."""
    first = a_cluster(a_dated_job("old", 4800, due_s))
    outcome = decide_round(first, AHEAD)
    assert outcome.decisions[0].admitted
    return first, outcome


HEAVY = a_job("new", weight=99.0, generation=0)


def snapshot_after(first: Snapshot, outcome: RoundOutcome, *arrivals: dict[str, Any]) -> Snapshot:
    """Return the snapshot of the round 30 s later, with the promise and its certificate."""
    second = the_next_round(first, outcome, 30.0, arrivals)
    jobs = replace(second.jobs, admitted=np.array([name == "old" for name in second.jobs.name]))
    return replace(second, jobs=jobs, schedule_segments=outcome.segments_after(first))


def test_a_promised_deadline_is_kept_by_a_round_that_follows_the_default_policy() -> None:
    second = snapshot_after(*a_promised_round(), HEAVY)
    outcome = decide_round(second, DEFAULT)
    assert decision_kinds(second, outcome)["old"] is DecisionKind.KEEP
    assert outcome.decisions[0].admitted
    assert outcome.given_up == frozenset()
    assert decision_kinds(second, decide_round(second, IGNORING))["old"] is not DecisionKind.KEEP


def test_a_promise_that_was_made_round_by_round_is_kept_too() -> None:
    first = a_cluster(a_dated_job("old", 4800, 1300.0))
    outcome = decide_round(first, Policy(deadlines="myopic"))
    assert outcome.decisions[0].admitted
    second = snapshot_after(first, outcome, HEAVY)
    assert len(second.schedule_segments) == 0
    assert decision_kinds(second, decide_round(second, DEFAULT))["old"] is DecisionKind.KEEP


@pytest.mark.parametrize("due_s", [100.0, 1300.0, 1e6])
def test_a_deadline_that_was_never_promised_changes_nothing(due_s: float) -> None:
    jobs = [a_dated_job("a", 4800, due_s), a_job("b", weight=0.5)]
    dated, plain = a_cluster(*jobs), a_cluster(jobs[0] | {"deadline_s": np.inf}, jobs[1])
    outcome, expected = decide_round(dated, DEFAULT), decide_round(plain, IGNORING)
    assert [d.kind for d in outcome.decisions] == [d.kind for d in expected.decisions]
    assert not any(d.admitted for d in outcome.decisions)


def test_a_new_deadline_is_neither_promised_nor_refused_next_to_a_promised_one() -> None:
    hopeless = a_dated_job("new", 4800, 60.0)
    second = snapshot_after(*a_promised_round(), hopeless | {"deadline_s": NOW_S + 60.0})
    outcome = decide_round(second, DEFAULT)
    new = outcome.decisions[second.jobs.name.index("new")]
    assert (new.kind, new.admitted) == (DecisionKind.WAIT, False)  # not rejected
    assert not reason_of(new).code.startswith("DEADLINE")


PLANNED = Policy(deadlines="planned")


def decide_planned(snapshot: Snapshot) -> RoundOutcome:
    return decide_round(snapshot, PLANNED, "portfolio")


def gpus_of(outcome: RoundOutcome) -> list[int]:
    return [decision.cell.gpus for decision in outcome.decisions]


def test_a_long_running_job_gives_way_to_two_short_ones_unless_it_was_promised() -> None:
    def with_two_short_jobs(*, admitted: bool) -> Snapshot:
        long = a_dated_job("long", 3600, 950, admitted=admitted, **running_on(4))
        jobs = a_cluster(
            long,
            a_dated_job("x", 1200, 620),
            a_dated_job("y", 1200, 620),
            gangs={0: Gang(members=((0, (0, 1, 2, 3)),))},
        )
        segment = a_segment(0, 900)
        return (
            replace(jobs, schedule_segments=ScheduleSegments.from_rows([segment]))
            if admitted
            else jobs
        )

    assert gpus_of(decide_planned(with_two_short_jobs(admitted=False)))[0] == 0
    outcome = decide_planned(with_two_short_jobs(admitted=True))
    assert gpus_of(outcome) == [4, 0, 0]
    assert [d.admitted for d in outcome.decisions] == [True, False, False]


def test_a_job_outside_the_schedule_waits_and_runs_on_leftover_gpus() -> None:
    crowded = a_cluster(a_dated_job("a", 1200, 310, weight=2.0), a_dated_job("b", 1200, 310))
    refused = decide_round(crowded, AHEAD, "portfolio").decisions[1].reason
    assert refused is not None
    assert refused.code is ReasonCode.DEADLINE_REFUSED
    waits = decide_planned(crowded).decisions[1].reason
    assert waits is not None
    assert not waits.code.name.startswith("DEADLINE")
    jobs = [
        a_dated_job(name, 500, 310, weight=w) for name, w in (("a", 2.0), ("b", 1.0), ("c", 2.0))
    ]
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2)]
    roomy = replace(
        a_snapshot(nodes=some_nodes((0, 1, 5)), jobs=jobs, estimates=estimates), now_s=NOW_S
    )
    assert gpus_of(decide_planned(roomy)) == [2, 1, 2]
    assert gpus_of(decide_round(roomy, AHEAD, "portfolio"))[1] == 0


def gpus_of_schedule(policy: Policy, job: dict[str, Any]) -> list[int]:
    """Return the GPUs of the segments of a job that is alone on 4 GPUs. The rate of n is sqrt(n)."""
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n**0.5) for n in (1, 2, 4)]
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 4)), jobs=[job], estimates=estimates)
    admission = decide_round(replace(snapshot, now_s=NOW_S), policy, "portfolio").admission
    assert admission is not None
    return [int(gpus) for gpus in admission.schedule_segments.gpus]


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
        return a_cluster(runs, gangs={0: Gang(members=((0, (0,)),))})

    assert gpus_of(decide_planned(a_running_round(admitted=False))) == [1]
    assert gpus_of(decide_planned(a_running_round(admitted=True))) == [4]
