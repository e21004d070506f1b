"""The conversion of training times where agents replay training faster than real time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tessera.formulation.answer.decisions import Decision
from tessera.formulation.state.snapshot import Snapshot


def to_real_pace(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with iteration times and restart durations in real seconds.

    All other times are already real: those of a snapshot (deadlines, ages, deadline schedules) and
    of a policy (the time to the next round, the run of jobs of unknown rate).
    """
    factor = snapshot.clock_factor
    if factor == 1.0:
        return snapshot
    estimates, jobs = snapshot.estimates, snapshot.jobs
    return replace(
        snapshot,
        estimates=replace(estimates, iter_time_s=estimates.iter_time_s / factor),
        jobs=replace(jobs, restart_s=jobs.restart_s / factor),
        clock_factor=1.0,
    )


def to_training_pace(decisions: Iterable[Decision], clock_factor: float) -> tuple[Decision, ...]:
    """Return decisions made at real pace, with their rates as estimates and agents state them."""
    if clock_factor == 1.0:
        return tuple(decisions)
    return tuple(decision._replace(rate=decision.rate / clock_factor) for decision in decisions)
