"""Small clusters whose jobs have deadlines, and their state after some training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.tables import Bools
from tessera.formulation.base.values import Hold
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.last_round import ScheduleSegments
from tessera.formulation.state.snapshot import STATE_CODE, Allocations, Snapshot
from tessera.solvers.base import Budget
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

NOW_S = 1200.0
ENDLESS = Budget(remaining_s=lambda: math.inf)


def a_dated_job(name: str, work_s: float, due_s: float, **more: Any) -> dict[str, Any]:
    """Return a job of ``work_s`` GPU-seconds that is due ``due_s`` from now; a GPU trains one sample/s."""
    length = work_s / 256
    given = {"iterations": length, "iterations_left": length, "deadline_s": NOW_S + due_s}
    return a_job(name, **(given | more))


def running_on(gpus: int) -> dict[str, Any]:
    """Return the fields of a job that has long run on ``gpus`` GPUs."""
    return {"state": JobState.RUNNING, "cell": (0, gpus, 1), "since_s": 1.0, "generation": 1}


def a_cluster(*jobs: dict[str, Any], gpus: int = 4, nodes: int = 1, **more: Any) -> Snapshot:
    """Return nodes of ``gpus`` GPUs, where n of 1, 2 or 4 GPUs train n samples/s.

    Unless ``gangs`` are given, running jobs hold the first GPUs of the first node, in their order.
    """
    taken, gangs = 0, {}
    for j, job in enumerate(jobs):
        if count := job["current_gpus"]:
            gangs[j] = Gang(members=((0, tuple(range(taken, taken + count))),))
            taken += count
    estimates = [an_estimate(gpus=n, iter_time_s=256 / n) for n in (1, 2, 4)]
    stated: dict[str, Any] = {
        "nodes": some_nodes((0, nodes, gpus)),
        "estimates": estimates,
        "gangs": gangs,
    }
    return replace(a_snapshot(jobs=jobs, **stated | more), now_s=NOW_S)


def a_segment(start_s: float, end_s: float, gpus: int = 4, job: int = 0) -> dict[str, Any]:
    """Return the row of a job's segment, with its start and end in seconds from now."""
    return {
        "job": job,
        "start_s": NOW_S + start_s,
        "end_s": NOW_S + end_s,
        "gpu_type": 0,
        "gpus": gpus,
        "pipeline_degree": 1,
        "plan": 0,
    }


@st.composite
def snapshots(
    draw: st.DrawFn,
    *,
    jobs: int,
    slots: int,
    counts: tuple[int, ...] = (1, 2, 4),
    guaranteed: bool = True,
    whole_slots: bool = False,
) -> Snapshot:
    """Draw a small cluster of two GPU types, and jobs that are due within ``slots`` rounds."""
    rate = {
        (w, t, n): draw(st.sampled_from([1.0, 1.5, 2.5])) * n**0.8
        for w in (0, 1)
        for t in (0, 1)
        for n in counts
    }
    rows = []
    for j in range(draw(st.integers(1, jobs))):
        workload = draw(st.integers(0, 1))
        due = draw(st.integers(1, slots)) if whole_slots else draw(st.floats(0.5, slots))
        size = draw(st.floats(0.2, 0.9)) * 300 * due * max(rate[workload, t, 2] for t in (0, 1))
        rows.append(
            a_job(
                f"j{j}",
                workload,
                iterations=size,
                iterations_left=size,
                deadline_s=NOW_S + 300 * due,
                restart_s=draw(st.sampled_from([0.0, 40.0])),
                weight=float(draw(st.integers(1, 3))),
                requested_gpus=1,
                guaranteed=guaranteed and draw(st.integers(0, 4)) == 0,
            )
        )
    estimates = [an_estimate(w, t, n, iter_time_s=1 / r) for (w, t, n), r in rate.items()]
    nodes = some_nodes((0, 1, draw(st.integers(2, 4))), (1, 1, draw(st.integers(1, 4))))
    snapshot = a_snapshot(nodes=nodes, jobs=rows, estimates=estimates, workloads=2, batch=1)
    return replace(snapshot, now_s=NOW_S)


def train_until(
    snapshot: Snapshot, segments: ScheduleSegments, admitted: Bools, now_s: float
) -> Snapshot:
    """Return the snapshot at ``now_s``, in which jobs run on their segments that have begun."""
    jobs, e = snapshot.jobs, snapshot.estimates
    column: dict[str, Any] = {
        name: np.array(getattr(jobs, name))
        for name in (
            "iterations_left",
            "state",
            "current_type",
            "current_gpus",
            "current_degree",
            "since_s",
            "generation",
        )
    }
    rows, taken = [], [0] * len(snapshot.gpu_types)
    for segment in np.flatnonzero(segments.start_s <= snapshot.now_s).tolist():
        job, kind, gpus = (
            int(segments.job[segment]),
            int(segments.gpu_type[segment]),
            int(segments.gpus[segment]),
        )
        (at,) = np.flatnonzero(
            (e.workload == jobs.workload[job]) & (e.gpu_type == kind) & (e.gpus == gpus)
        )
        busy_s = max(0.0, now_s - snapshot.now_s - float(jobs.restart_s[job]))
        column["iterations_left"][job] -= min(
            busy_s / float(e.iter_time_s[at]), column["iterations_left"][job]
        )
        column["state"][job] = STATE_CODE[JobState.RUNNING]
        column["current_type"][job], column["current_gpus"][job] = kind, gpus
        column["current_degree"][job], column["since_s"][job] = 1, snapshot.now_s
        column["generation"][job] = 1
        for _ in range(gpus):
            rows.append(
                {
                    "job": job,
                    "node": kind,
                    "gpu": taken[kind],
                    "hold": int(Hold.HELD),
                    "generation": 1,
                }
            )
            taken[kind] += 1
    return replace(
        snapshot,
        now_s=now_s,
        jobs=replace(jobs, admitted=admitted, **column),
        schedule_segments=segments,
        allocations=Allocations.from_rows(rows),
    )
