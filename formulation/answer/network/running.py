"""The running jobs of a snapshot and the facts known of their traffic, for a network plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision
from tessera.formulation.answer.network.measured import TrafficMeasurement
from tessera.formulation.answer.placement import Gang, current_gangs
from tessera.formulation.base.values import CellKey
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job on its GPUs."""

    job: int
    generation: int
    gang: Gang
    cell: CellKey
    since_s: float  # start of its allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficObservations:
    """The measurements by agents of the allocations of running jobs, and the jobs to measure next.

    ``unmeasured`` has (seconds left, job) of jobs on several nodes that have no measurement yet but
    time left for it. The job that has waited longest is first. Agents measure a job only while no
    other job on its nodes sends. That is not known here, so the list has the jobs that should be
    measured.
    """

    seen: Mapping[int, TrafficMeasurement]  # by job
    unmeasured: Sequence[tuple[float, int]]


def running_after(snapshot: Snapshot, decisions: Iterable[Decision]) -> list[RunningJob]:
    """Return the jobs that run once a round's decisions are carried out."""
    generation, since_s = snapshot.jobs.generation, snapshot.jobs.since_s
    return [
        RunningJob(
            job=d.job,
            generation=int(generation[d.job]) + (d.kind in CHANGES_GPUS),
            gang=d.gang,
            cell=d.cell,
            since_s=snapshot.now_s if d.kind in CHANGES_GPUS else float(since_s[d.job]),
        )
        for d in decisions
        if d.gang is not None
    ]


def running_now(snapshot: Snapshot) -> list[RunningJob]:
    """Return the jobs that own GPUs."""
    jobs = snapshot.jobs
    active = jobs.among(ACTIVE)
    gangs = {job: g for job, g in sorted(current_gangs(snapshot).items()) if active[job]}
    cells = jobs.keys(np.array(list(gangs), dtype=np.int64))
    return [
        RunningJob(
            job=job,
            generation=int(jobs.generation[job]),
            gang=gang,
            cell=cell,
            since_s=float(jobs.since_s[job]),
        )
        for (job, gang), cell in zip(gangs.items(), cells, strict=True)
    ]


def observe_traffic(
    snapshot: Snapshot, running: Sequence[RunningJob], policy: Policy
) -> TrafficObservations:
    """Return the measurements of these jobs' traffic, and the jobs that should be measured."""
    m = snapshot.traffic_measurements
    now = {(r.job, r.generation) for r in running}
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for row, key in enumerate(zip(m.job.tolist(), m.generation.tolist(), strict=True)):
        if key in now:
            rows[key[0]].append(row)
    waiting = [
        (r.since_s + policy.network_measure_s - snapshot.now_s, r.job)
        for r in running
        if r.gang.nodes > 1 and r.job not in rows
    ]
    return TrafficObservations(
        seen={job: _seen(snapshot, of_job) for job, of_job in rows.items()},
        unmeasured=sorted((left_s, job) for left_s, job in waiting if left_s > 0),
    )


def _seen(snapshot: Snapshot, rows: list[int]) -> TrafficMeasurement:
    m = snapshot.traffic_measurements
    own = [row for row in rows if m.unhindered[row]]
    return TrafficMeasurement(
        sent_bytes={snapshot.nodes.name[m.node[row]]: float(m.sent_bytes[row]) for row in rows},
        period_s=float(np.median(m.period_s[own])) if own else None,
    )


def traffic_by_job(snapshot: Snapshot, running: Sequence[RunningJob]) -> dict[int, Traffic]:
    """Return the traffic of each running job's Cell, by job, if it is known.

    If a Cell has several shapes, the job's own is used, else the first, as execution plans differ
    little from shape to shape.
    """
    t, workload = snapshot.traffic, snapshot.jobs.workload
    needed = np.flatnonzero(
        np.isin(t.workload, workload[[r.job for r in running]] if running else [])
    )
    rows: defaultdict[tuple[int, CellKey], dict[int, int]] = defaultdict(dict)
    of = zip(needed.tolist(), t.workload[needed].tolist(), t.keys(needed), strict=True)
    for k, of_workload, cell in of:
        rows[of_workload, cell][int(t.nodes[k])] = k
    traffic: dict[int, Traffic] = {}
    for r in running:
        if shapes := rows.get((int(workload[r.job]), r.cell)):
            k = shapes.get(r.gang.nodes, next(iter(shapes.values())))
            traffic[r.job] = t.document[k].traffic
    return traffic
