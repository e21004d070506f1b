"""Deadlines in one round: columns that meet them, promised jobs and rejected jobs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.admission import Admission
from tessera.formulation.decisions import Decision, DecisionKind
from tessera.formulation.last_round import NO_LEGS, Legs
from tessera.formulation.lifecycle import JobState
from tessera.formulation.moments import format_rfc3339
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.promises.deadlines import certificates_are_kept
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import Statement, state_round
from tessera.solvers.base import Budget
from tessera.solvers.lookahead.admission import drafts_before_deadlines
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate

NOW_S = 1200.0
MYOPIC = Policy(deadlines="myopic")
AHEAD = Policy(deadlines="look-ahead")
RUNS: dict[str, Any] = {"state": JobState.RUNNING, "generation": 1}


def a_dated_job(name: str, work_s: float, due_s: float, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds, due in ``due_s``. A GPU trains one sample/s."""
    length = work_s / 256
    fields = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, **(fields | more))


def a_cluster(*jobs: dict[str, Any], away: int = 0, **more: Any) -> Snapshot:
    """Return a four-GPU node, where n GPUs train n samples/s, and a lost node of ``away`` GPUs."""
    nodes = [a_node("n0", gpus=4)] + [a_node("n1", gpus=away, schedulable=False)] * (away > 0)
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2, 4)]
    return replace(a_snapshot(nodes=nodes, jobs=jobs, estimates=estimates, **more), now_s=NOW_S)


def consecutive_gangs(*counts: int) -> dict[int, Gang]:
    """Return a gang for each count, on consecutive GPUs of node 0."""
    starts = np.cumsum([0, *counts])
    return {
        j: Gang(members=((0, tuple(range(starts[j], starts[j] + n))),))
        for j, n in enumerate(counts)
    }


def column_gpus(statement: Statement, job: int = 0) -> list[int]:
    """Return the GPUs of the columns that ``job`` may use."""
    problem = statement.problem
    return [int(problem.cells.gpus[problem.cell[c]]) for c in problem.columns_of(job)]


def decide_round(snapshot: Snapshot, policy: Policy = MYOPIC) -> tuple[Decision, ...]:
    outcome = plan_round(snapshot, policy, Portfolio(), Budget(remaining_s=lambda: math.inf))
    assert outcome.violations == ()
    return outcome.decisions


@pytest.mark.parametrize(
    ("due_s", "gpus_left"),
    [(1199, []), (1200, [4]), (2399, [4]), (2400, [2, 4]), (4800, [1, 2, 4])],
)
def test_only_columns_that_finish_in_time_are_left(due_s: float, gpus_left: list[int]) -> None:
    assert column_gpus(state_round(a_cluster(a_dated_job("a", 4800, due_s)), MYOPIC)) == gpus_left


def test_a_running_job_pays_only_the_rest_of_its_restart_time() -> None:
    def left(since_s: float) -> list[int]:
        job = a_dated_job("a", 4800, 2400, restart_s=100, cell=(0, 2, 1), since_s=since_s, **RUNS)
        return column_gpus(state_round(a_cluster(job, gangs=consecutive_gangs(2)), MYOPIC))

    assert left(NOW_S - 100) == [2, 4]
    assert left(NOW_S - 99) == [4]


def test_a_job_that_can_start_now_is_admitted() -> None:
    (decision,) = decide_round(a_cluster(a_dated_job("a", 4800, 2400)))
    assert (decision.kind, decision.admitted) == (DecisionKind.START, True)


def test_an_admitted_job_runs_whatever_the_value_of_others() -> None:
    old = a_dated_job("a", 4800, 1200, admitted=True, cell=(0, 4, 1), weight=0.01, **RUNS)
    snapshot = a_cluster(old, a_job("b", weight=99.0), gangs=consecutive_gangs(4))
    first, second = decide_round(snapshot)
    assert (first.kind, second.kind) == (DecisionKind.KEEP, DecisionKind.WAIT)


def test_a_job_that_cannot_finish_in_time_is_rejected_with_the_time_when_it_would() -> None:
    (decision,) = decide_round(a_cluster(a_dated_job("a", 4800, 1100, restart_s=50)))
    assert decision.kind is DecisionKind.REJECT
    assert decision.reason is not None
    assert decision.reason.code is ReasonCode.DEADLINE_UNREACHABLE
    evidence = dict(decision.reason.evidence)
    assert evidence["finish"] == evidence["earliest_deadline"] == "1970-01-01T00:40:50Z"
    assert "1970-01-01T00:40:50Z" in decision.reason.next_step


@pytest.mark.parametrize("policy", [MYOPIC, AHEAD], ids=["myopic", "look-ahead"])
def test_a_past_deadline_is_refused_and_the_round_continues(policy: Policy) -> None:
    first, second = decide_round(a_cluster(a_dated_job("a", 4800, -1), a_job("b")), policy)
    assert first.kind is DecisionKind.REJECT
    assert first.reason is not None
    assert first.reason.code is ReasonCode.DEADLINE_PAST
    assert second.kind is DecisionKind.START


@pytest.mark.parametrize("policy", [MYOPIC, AHEAD], ids=["myopic", "look-ahead"])
def test_a_job_that_only_lost_nodes_could_serve_waits_for_them(policy: Policy) -> None:
    (decision,) = decide_round(a_cluster(a_dated_job("a", 4800, 1100), away=4), policy)
    assert decision.kind is DecisionKind.WAIT
    assert decision.reason is not None
    assert decision.reason.code is ReasonCode.DEADLINE_UNREACHABLE


@pytest.mark.parametrize("policy", [MYOPIC, AHEAD], ids=["myopic", "look-ahead"])
def test_a_running_job_that_was_never_admitted_continues_past_its_deadline(policy: Policy) -> None:
    job = a_dated_job("a", 48000, 100, cell=(0, 4, 1), **RUNS)
    (decision,) = decide_round(a_cluster(job, gangs=consecutive_gangs(4)), policy)
    assert (decision.kind, decision.admitted) == (DecisionKind.KEEP, False)


@pytest.mark.parametrize("policy", [MYOPIC, AHEAD], ids=["myopic", "look-ahead"])
def test_an_impossible_promise_is_waived_and_the_job_continues(policy: Policy) -> None:
    job = a_dated_job("a", 48000, 100, admitted=True, cell=(0, 4, 1), **RUNS)
    snapshot = a_cluster(job, gangs=consecutive_gangs(4))
    outcome = plan_round(snapshot, policy, Portfolio(), Budget(remaining_s=lambda: math.inf))
    assert outcome.given_up == frozenset({0})
    assert (outcome.decisions[0].kind, outcome.decisions[0].admitted) == (DecisionKind.KEEP, False)


def test_a_job_whose_promise_is_waived_is_best_effort() -> None:
    job = a_dated_job("a", 4800, 1200, admitted=True)
    waived = state_round(a_cluster(job), MYOPIC, waived=frozenset({0}))
    assert column_gpus(waived) == [1, 2, 4]
    assert not waived.problem.must_run.any()


def test_a_promised_job_is_not_moved_if_a_restart_would_make_it_late() -> None:
    def movable(due_s: float) -> bool:
        job = a_dated_job("a", 4800, due_s, restart_s=100, cell=(0, 4, 1), **RUNS)
        return bool(
            state_round(a_cluster(job, gangs=consecutive_gangs(4)), MYOPIC).problem.movable[0]
        )

    assert movable(1300)
    assert not movable(1299)


def test_a_job_on_a_bad_shape_is_judged_by_its_actual_rate() -> None:
    estimates = [
        an_estimate(gpus=2, iter_time_s=128),
        an_estimate(gpus=2, nodes=2, iter_time_s=256),
    ]
    job = a_dated_job("a", 1000, 600, admitted=True, cell=(0, 2, 1), **RUNS)
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=4), a_node("n1", gpus=4)],
        jobs=[job],
        estimates=estimates,
        gangs={0: Gang(members=((0, (0,)), (1, (0,))))},
    )
    problem = state_round(replace(snapshot, now_s=NOW_S), MYOPIC).problem
    # At one sample/s the job would be late. At two, on one node, it is in time.
    assert problem.cells.nodes[problem.cell].tolist() == [1]
    assert problem.current[0] == -1
    late = replace(snapshot, now_s=NOW_S, estimates=snapshot.estimates.at(np.array([1])))
    assert state_round(late, MYOPIC).lapsed == frozenset({0})


def a_certificate(*legs: tuple[float, float, int], work: float = 0.0) -> Admission:
    """Return the admission of job 0 with legs (start and end from now, GPUs) and a least ``work``."""
    rows = [
        {
            "job": 0,
            "start_s": NOW_S + start,
            "end_s": NOW_S + end,
            "gpu_type": 0,
            "gpus": gpus,
            "pipeline_degree": 1,
            "plan": 0,
        }
        for start, end, gpus in legs
    ]
    return Admission(
        admitted=np.array([True]),
        legs=Legs.from_rows(rows) if rows else NO_LEGS,
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


def test_a_deadline_before_the_next_slot_leaves_less_time() -> None:
    snapshot = a_cluster(a_dated_job("a", 300, 150))
    assert keep_certificate(snapshot, a_certificate((0, 300, 2), work=300))[0] == [2, 4]


def test_a_certified_job_that_cannot_afford_a_restart_keeps_its_gpus() -> None:
    job = a_dated_job("a", 4800, 9000, restart_s=150, admitted=True, cell=(0, 2, 1), **RUNS)
    snapshot = a_cluster(job, gangs=consecutive_gangs(2))
    gpus, must, _, movable = keep_certificate(snapshot, a_certificate((0, 900, 2), work=500))
    assert (gpus, must, movable) == ([2, 4], True, False)
    assert keep_certificate(snapshot, a_certificate((0, 900, 2), work=290))[3]


def test_times_are_rounded_up_so_that_a_reported_deadline_is_late_enough() -> None:
    assert format_rfc3339(0.2) == "1970-01-01T00:00:01Z"
    assert format_rfc3339(math.inf) == "never"


def test_a_reason_shows_the_deadline_to_the_second_like_the_job() -> None:
    late = a_dated_job("late", 4800, 60.75)
    reason = state_round(a_cluster(late), MYOPIC).absent[0]
    assert dict(reason.evidence)["deadline"] == "1970-01-01T00:21:00Z"
