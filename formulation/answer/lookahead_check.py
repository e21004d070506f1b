"""The independent checker of schedules that meet deadlines. It runs on every round with promises."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tessera.formulation.answer.check import Violation
from tessera.formulation.answer.placement import current_gangs
from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.lookahead.plan import WORK_TOLERANCE
from tessera.formulation.state.cell_cache import cached_cells
from tessera.formulation.state.cells import find_narrowest
from tessera.formulation.state.last_round import ScheduleSegments
from tessera.formulation.state.replans import start_duration_s
from tessera.formulation.state.snapshot import STATE_CODE, Snapshot

ROUNDING: Final = 1e-9
"""Share of a job's whole work by which two sums of the same seconds may differ."""


def find_schedule_violations(
    snapshot: Snapshot, segments: ScheduleSegments, promised: Bools
) -> list[Violation]:
    """Return every way in which ``segments`` fail to meet the deadlines of ``promised`` (bool[jobs]).

    The check is independent of the slots. Each job has one Cell at a time. Capacity holds at every
    moment. Each segment that does not continue what runs now is charged restart time. All work is done
    by the deadline.
    """
    if not promised.any() and not len(segments):
        return []
    names = snapshot.jobs.name
    violations = [
        Violation(rule="promised", detail=f"{names[job]} has segments but no promise")
        for job in np.unique(segments.job[~promised[segments.job]]).tolist()
    ]
    violations += _broken_deadlines(snapshot, segments, promised)
    return [*violations, *_overfull(snapshot, segments, promised)]


def _broken_deadlines(
    snapshot: Snapshot, segments: ScheduleSegments, promised: Bools
) -> list[Violation]:
    """Return the violations of each job's own segments, one job after another."""
    violations: list[Violation] = []
    (cells, _), gangs, jobs = cached_cells(snapshot), current_gangs(snapshot), snapshot.jobs
    known_cells = find_narrowest(cells)
    runs = np.isin(jobs.state, [STATE_CODE[state] for state in ACTIVE]) & ~snapshot.disturbed()
    starts_in_s = start_duration_s(snapshot)
    order: dict[int, list[int]] = {}
    for segment in np.argsort(segments.start_s, kind="stable").tolist():
        order.setdefault(int(segments.job[segment]), []).append(segment)
    for job in np.flatnonzero(promised).tolist():
        trained, ends_s = 0.0, -math.inf
        for segment in order.get(job, []):
            start_s = max(float(segments.start_s[segment]), snapshot.now_s)
            end_s = float(segments.end_s[segment])
            if start_s < ends_s - SAME_S:
                detail = f"{jobs.name[job]} has two Cells at {start_s:.3f}"
                violations.append(Violation(rule="one Cell at a time", detail=detail))
            ends_s = max(ends_s, end_s)
            spec = segments.key_at(segment)
            cell = known_cells.get((int(jobs.workload[job]), spec))
            if cell is None:
                violations.append(
                    Violation(rule="Cell exists", detail=f"{jobs.name[job]}: {tuple(spec)}")
                )
                continue
            rate, pause_s = float(cells.rate[cell]), float(jobs.restart_s[job])
            # A segment that continues what runs now pays only the rest of the last restart.
            if start_s - snapshot.now_s < SAME_S and runs[job] and jobs.key_at(job) == spec:
                if job in gangs:
                    rate = cells.rate_on(cell, gangs[job].nodes)
                since_s, takes_s = float(jobs.since_s[job]), float(starts_in_s[job])
                left_s = since_s + takes_s - snapshot.now_s if since_s > 0 else 0.0
                pause_s = min(max(0.0, left_s), takes_s)
            usable_s = min(end_s, float(jobs.deadline_s[job])) - start_s
            trained += rate * max(0.0, usable_s - pause_s)
        batch = snapshot.workloads[int(jobs.workload[job])].global_batch
        left = float(jobs.iterations_left[job]) * batch
        if trained < left - (WORK_TOLERANCE + ROUNDING) * float(jobs.iterations[job]) * batch:
            detail = (
                f"{jobs.name[job]} trains only {trained:.6g} of {left:.6g} samples by its deadline"
            )
            violations.append(Violation(rule="deadline", detail=detail))
    return violations


def _overfull(snapshot: Snapshot, segments: ScheduleSegments, promised: Bools) -> list[Violation]:
    """Return a violation where the segments together need more GPUs than are schedulable.

    There is one for each such moment and type. Use rises only where a segment starts, so only these
    moments are checked. Where nodes were lost, promised jobs may have more GPUs than are left.
    The round then decides who stops, so segments may use as many as these jobs have.
    """
    violations: list[Violation] = []
    schedulable, held = snapshot.schedulable_gpus(), _held_gpus(snapshot, promised)
    start_s = np.maximum(segments.start_s, snapshot.now_s)
    for kind in np.unique(segments.gpu_type).tolist():
        own = np.flatnonzero((segments.gpu_type == kind) & (segments.end_s > start_s))
        gpus, moments = segments.gpus[own], np.unique(start_s[own])
        begun = _sum_until(start_s[own], gpus, moments + SAME_S)
        ended = _sum_until(segments.end_s[own], gpus, moments + SAME_S)
        limit = max(int(schedulable[kind]), int(held[kind]))
        for at in np.flatnonzero(begun - ended > limit).tolist():
            detail = (
                f"{snapshot.gpu_types[kind].name}: {begun[at] - ended[at]} GPUs are used at"
                f" {moments[at]:.3f}, but only {limit} are schedulable"
            )
            violations.append(Violation(rule="capacity", detail=detail))
    return violations


def _held_gpus(snapshot: Snapshot, promised: Bools) -> Ints:
    """Return the GPUs that promised jobs have now, int64[types]."""
    jobs, held = snapshot.jobs, np.zeros(len(snapshot.gpu_types), dtype=np.int64)
    runs = promised & (jobs.current_gpus > 0) & (jobs.current_type >= 0)
    np.add.at(held, jobs.current_type[runs], jobs.current_gpus[runs])
    return held


def _sum_until(times_s: Floats, gpus: Ints, moments: Floats) -> Ints:
    """Return the sum of ``gpus`` whose time is not after each of ``moments``, int64[moments]."""
    order = np.argsort(times_s)
    sums = np.append(0, np.cumsum(gpus[order]))
    return sums[np.searchsorted(times_s[order], moments, side="right")]
