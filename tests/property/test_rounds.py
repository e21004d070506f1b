"""Laws of a whole round on any snapshot, however inconsistent, and of what-ifs about it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.check import score_solution
from tessera.formulation.answer.codec import decode, digest, encode
from tessera.formulation.answer.decisions import CHANGES_GPUS
from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.answer.hypotheses import (
    Hypothesis,
    append_jobs,
    apply_hypotheses,
    without_last_jobs,
)
from tessera.formulation.records.forecasts import EVENTS
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.rates import expected_rate, unit_rate
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.forecasts.calibration import learn_corrections
from tessera.simulator.forecasts.draws import History
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.run import Decider
from tessera.simulator.what_if.hours import COVERAGE, LEAST_PAIRS, Side, compare_hours, follow_pairs
from tessera.simulator.what_if.rounds import DecidedRound, compare_rounds
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.laws import examples
from tests.support.snapshots import snapshots


def budget(seed: int = 0, **work: float) -> Budget:
    return Budget(remaining_s=lambda: math.inf, seed=seed, work={"cp-sat": 0.1, "lp": 9.0, **work})


def outcome(snapshot: Snapshot, name: str = "portfolio", **options: float) -> RoundOutcome:
    return plan_round(snapshot, THROUGHPUT, make_solver(name), budget(**options))  # type: ignore[arg-type]


THROUGHPUT = Policy(objective="throughput")

LAW = examples(120)


@LAW
@given(snapshots())
def test_decisions_on_any_snapshot_break_no_rule(snapshot: Snapshot) -> None:
    result = outcome(snapshot)
    assert result.violations == ()
    assert [d.job for d in result.decisions] == list(range(len(snapshot.jobs)))
    assert all((d.gang is None) == (d.reason is not None) for d in result.decisions)


@LAW
@given(snapshots())
def test_the_objective_and_the_placed_score_are_never_below_greedy(snapshot: Snapshot) -> None:
    best, greedy = outcome(snapshot), outcome(snapshot, "greedy")
    assert best.solution.bound >= best.solution.objective
    assert best.placed_score >= greedy.placed_score - 1e-9


@LAW
@given(snapshots())
def test_the_same_snapshot_gives_the_same_decisions_also_after_a_trip_through_json(
    snapshot: Snapshot,
) -> None:
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert outcome(snapshot).decisions == outcome(again).decisions


@LAW
@given(snapshots())
def test_changed_jobs_pay_their_restart_and_unchanged_ones_pay_nothing(snapshot: Snapshot) -> None:
    result = outcome(snapshot)
    problem, choice = result.problem, result.solution.choice
    for decision in result.decisions:
        expected = 0.0
        if decision.kind in CHANGES_GPUS:
            unit = unit_rate(snapshot, problem.cells)[decision.job]
            likely_rate = expected_rate(snapshot, problem.cells, snapshot.jobs.weight)[decision.job]
            rate = problem.cells.rate[problem.cell[choice[decision.job]]]
            left_s = snapshot.jobs.iterations_left[decision.job] * 256 / likely_rate
            share = min(0.9, snapshot.jobs.restart_s[decision.job] / min(3600.0, left_s))
            expected = snapshot.jobs.weight[decision.job] * rate / unit * share
        assert decision.restart_price == pytest.approx(expected, abs=2e-6)


@LAW
@given(snapshots(), st.floats(1.0, 8.0))
def test_weights_only_scale_the_objective(snapshot: Snapshot, factor: float) -> None:
    power = 2.0 ** round(math.log2(factor))  # a power of two is exact
    heavier = replace(snapshot, jobs=replace(snapshot.jobs, weight=snapshot.jobs.weight * power))
    one, other = outcome(snapshot), outcome(heavier)
    assert np.isclose(
        other.solution.objective, one.solution.objective * power, rtol=1e-3, atol=10 * power
    )
    assert (
        score_solution(other.problem, other.solution)
        >= score_solution(one.problem, one.solution) - 1e-9
    )


OPTIONS = RoundOptions(objective="throughput", solver="pricing")

RHYTHM = RoundRhythm(spacing_s=60.0, period_s=300.0, horizon_s=900.0)


def decided(snapshot: Snapshot) -> DecidedRound:
    return DecidedRound(snapshot=snapshot, options=OPTIONS, outcome=Decider(OPTIONS)(snapshot))


@examples(60)
@given(snapshots())
def test_no_change_changes_nothing_now(snapshot: Snapshot) -> None:
    changed, options = apply_hypotheses(snapshot, OPTIONS, [])
    assert options == OPTIONS
    assert digest(changed) == digest(snapshot)
    found = compare_rounds(decided(snapshot), decided(changed))
    assert not found.jobs
    assert found.before == found.after
    assert found.unchanged == len(snapshot.jobs)


@examples(40)
@given(snapshots(), st.integers(0, 10**6))
def test_no_change_changes_nothing_over_the_next_hours(snapshot: Snapshot, seed: int) -> None:
    sides = (
        Side(snapshot=snapshot, decide=Decider(OPTIONS)),
        Side(snapshot=snapshot, decide=Decider(OPTIONS)),
    )
    history = History.of([], snapshot)
    one, other = follow_pairs(
        sides[0], [sides[1]], history, futures=LEAST_PAIRS, seed=seed, rhythm=RHYTHM
    )
    corrections = learn_corrections(dict.fromkeys(EVENTS, ()), COVERAGE)
    found = compare_hours(sides, (one, other), RHYTHM, corrections, shown=snapshot.jobs.name)
    assert found is not None
    for figure in (found.mean_wait_s, found.work, found.finished):
        assert (figure.low, figure.change, figure.high) == (0, 0, 0)
    for job in found.jobs:
        assert job.start_before == job.start_after
        assert job.finish_before == job.finish_after


@examples(60)
@given(snapshots())
def test_jobs_that_are_added_and_left_out_again_leave_the_snapshot_as_it_was(
    snapshot: Snapshot,
) -> None:
    jobs = snapshot.jobs
    if not len(jobs):
        return
    added = replace(jobs, name=tuple(f"new-{name}" for name in jobs.name))
    longer = append_jobs(snapshot, added)
    assert longer.jobs.name[: len(jobs)] == jobs.name
    assert digest(without_last_jobs(longer, len(jobs))) == digest(snapshot)


@examples(60)
@given(snapshots(), st.data())
def test_a_removed_job_runs_no_more_and_no_other_job_is_gone(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    if not len(snapshot.jobs):
        return
    name = data.draw(st.sampled_from(snapshot.jobs.name))
    removal = Hypothesis(change=Change(kind=ChangeKind.END, subject=name))
    changed, _ = apply_hypotheses(snapshot, OPTIONS, [removal])
    assert changed.jobs.name == snapshot.jobs.name
    outcome = Decider(OPTIONS)(changed)
    assert not outcome.violations
    assert outcome.decisions[changed.jobs.name.index(name)].gang is None
    found = compare_rounds(decided(snapshot), decided(changed), [name])
    assert found.after.running + found.after.waiting == len(snapshot.jobs) - 1
    (gone,) = (job for job in found.jobs if job.job == name)
    assert (gone.effect, gone.after) == ("removed", None)


@examples(40)
@given(snapshots(), st.integers(0, 10**6))
def test_waiting_and_work_add_up_to_what_the_future_did(snapshot: Snapshot, seed: int) -> None:
    """No job waits longer than the future lasts, and none trains more than it has left."""
    (found,) = follow_pairs(
        Side(snapshot=snapshot, decide=Decider(OPTIONS)),
        [],
        History.of([], snapshot),
        futures=1,
        seed=seed,
        rhythm=RHYTHM,
    )
    (waited_s,) = found.waited_s
    assert (waited_s >= -1e-6).all()
    assert (waited_s <= RHYTHM.horizon_s + 1e-6).all()
    assert math.isfinite(found.work[0])
    assert found.work[0] >= -1e-9
    assert found.finished[0] <= np.isfinite(found.finish_s).sum() + 1e-9
