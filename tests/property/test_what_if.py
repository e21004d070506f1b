"""Laws of what-ifs: no change changes nothing, and both sides of a pair have the same chance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.codec import digest
from tessera.formulation.explanations.changes import Change, ChangeKind
from tessera.formulation.records.forecasts import EVENTS
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.what_if.hypotheses import (
    Hypothesis,
    append_jobs,
    apply_hypotheses,
    without_last_jobs,
)
from tessera.simulator.forecasts.calibration import learn_corrections
from tessera.simulator.forecasts.draws import History
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.run import Decider
from tessera.simulator.what_if.hours import COVERAGE, LEAST_PAIRS, Side, compare_hours, follow_pairs
from tessera.simulator.what_if.rounds import DecidedRound, compare_rounds
from tessera.solvers.rounds.options import RoundOptions
from tests.support.laws import examples
from tests.support.snapshots import snapshots

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
