"""The times of the next rounds for promised deadline schedules if nothing happens before."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision
from tessera.formulation.answer.pace import to_real_pace
from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.values import CellKey
from tessera.formulation.round.rates import work_left
from tessera.formulation.state.cells import find_narrowest
from tessera.formulation.state.replans import charge_unsaved_training, start_duration_s
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.plan import RoundOutcome

_RELATIVE_ROUNDING = 1e-9
"""The share of a job's remaining work by which floating-point sums may be off."""

_Segment = tuple[float, float, float, bool]
"""Start, end (at the latest the deadline), samples/s, and whether the job is on this Cell now."""


def due_s(snapshot: Snapshot, outcome: RoundOutcome, round_s: float) -> float:
    """Return the time (s since 1970) of the last round that can still keep every promise.

    If no round is needed, return inf. Equation (29) keeps the promises until the first slot ends.
    After that, while all jobs stay as they were decided, a certificate holds at time t if

        W_j <= r_j (t - now - pause_j) + what its segments train from t on, restarts and the reserve included

    A job that runs on its own segment may therefore stay until the segment ends. A job that runs otherwise,
    or waits, may stay until its head start is used up. The time is rounded down to a whole round.
    This leaves a first slot in which a restart fits, so that jobs can be moved to make room.
    Schedules without a promise need no additional round, because they start jobs when others end.
    """
    admission = outcome.admission
    if admission is None or not len(admission.schedule_segments):
        return math.inf
    segments, left = admission.schedule_segments, work_left(snapshot)
    rates, factor = _rates(outcome), snapshot.clock_factor
    snapshot = charge_unsaved_training(to_real_pace(snapshot))
    takes_s = start_duration_s(snapshot)
    reserve_s = np.zeros(len(left)) if admission.reserve_s is None else admission.reserve_s
    by_job: dict[int, list[int]] = {}
    for segment in range(len(segments)):
        by_job.setdefault(int(segments.job[segment]), []).append(segment)
    earliest_s = math.inf
    for decision in outcome.decisions:
        rows = by_job.get(decision.job)
        if rows is None or not (admission.binding or snapshot.jobs.admitted[decision.job]):
            continue
        job = decision.job
        has = decision.cell if decision.gang is not None else None
        deadline_s, workload = (
            float(snapshot.jobs.deadline_s[job]),
            int(snapshot.jobs.workload[job]),
        )
        planned: list[_Segment] = []
        for segment in sorted(rows, key=lambda k: float(segments.start_s[k])):
            spec = segments.key_at(segment)
            end_s = min(float(segments.end_s[segment]), deadline_s)
            rate = rates.get((workload, spec), 0.0)
            planned.append((float(segments.start_s[segment]), end_s, rate, spec == has))
        lasts_s = _lasts_s(
            snapshot,
            decision._replace(rate=decision.rate * factor),
            float(left[job]),
            float(takes_s[job]),
            planned,
            admission.until_s,
            float(reserve_s[job]),
        )
        earliest_s = min(earliest_s, lasts_s)
    if math.isinf(earliest_s):
        return earliest_s
    return max(admission.until_s, math.floor(earliest_s / round_s + 1e-9) * round_s)


def next_start_s(snapshot: Snapshot, outcome: RoundOutcome) -> float:
    """Return the time (s since 1970) at which the next planned start is due, or inf."""
    if outcome.plan is None or outcome.violations:
        return math.inf
    start_s = outcome.plan.starts.start_s
    return float(start_s[start_s > snapshot.now_s + SAME_S].min(initial=math.inf))


def next_segment_s(snapshot: Snapshot, outcome: RoundOutcome) -> float:
    """Return the time (s since 1970) at which the next segment of a promised schedule begins, or inf.

    The promise may hold without a round at that time, but the schedule wants another Cell from
    then on.
    """
    admission = outcome.admission
    if admission is None or outcome.violations:
        return math.inf
    segments = admission.schedule_segments
    promised = admission.binding | snapshot.jobs.admitted[segments.job]
    to_come = segments.start_s[promised & (segments.start_s > snapshot.now_s + SAME_S)]
    return float(to_come.min(initial=math.inf))


def _rates(outcome: RoundOutcome) -> dict[tuple[int, CellKey], float]:
    """Return the samples/s of each (workload, Cell) on its fewest nodes."""
    cells = outcome.problem.cells
    return {key: float(cells.rate[row]) for key, row in find_narrowest(cells).items()}


def _lasts_s(
    snapshot: Snapshot,
    decision: Decision,
    left: float,
    takes_s: float,
    segments: list[_Segment],
    until_s: float,
    reserve_s: float,
) -> float:
    """Return the time until which a job may stay as it was decided, never before ``until_s``.

    ``takes_s`` is the duration of the start that it may still be in.
    """
    jobs, job = snapshot.jobs, decision.job
    restart_s = float(jobs.restart_s[job])
    rate = decision.rate if decision.gang is not None else 0.0
    ready_s = snapshot.now_s + restart_s
    if decision.gang is not None and decision.kind not in CHANGES_GPUS:
        ready_s = max(snapshot.now_s, float(jobs.since_s[job]) + takes_s)

    def short(at_s: float) -> bool:
        trained = rate * max(0.0, at_s - ready_s)
        return (
            left - trained - _trained_samples(segments, at_s, restart_s, ready_s, reserve_s)
            > _RELATIVE_ROUNDING * left
        )

    bends = {
        ready_s,
        *(
            s
            for segment in segments
            for s in (segment[0], segment[1], segment[1] - restart_s - reserve_s)
        ),
    }
    held_s = until_s
    for at_s in sorted(s for s in bends if s > until_s):
        if short(at_s):
            return _last_s(short, held_s, at_s)
        held_s = at_s
    return math.inf  # the job will have ended


def _last_s(short: Callable[[float], bool], held_s: float, short_s: float) -> float:
    """Return the last whole second at which a job is not ``short``, but at least ``held_s``."""
    low, high = held_s, short_s
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (low, middle) if short(middle) else (middle, high)
    return max(held_s, math.floor(low))


def _trained_samples(
    segments: list[_Segment], from_s: float, restart_s: float, ready_s: float, reserve_s: float
) -> float:
    """Return the samples that the segments train from a time on, if the job stays until then."""
    total = 0.0
    for start_s, end_s, rate, here in segments:
        if end_s > from_s:
            goes_on = here and start_s <= from_s
            begins_s = max(from_s, ready_s) if goes_on else max(start_s, from_s) + restart_s
            total += rate * max(0.0, end_s - begins_s - reserve_s)
    return total
