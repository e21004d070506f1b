"""Small random snapshots: jobs of five Cells each on two GPU types."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tessera.formulation.base.values import EstimateSource, GpuType, Hold, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.snapshot import (
    STATE_CODE,
    Allocations,
    Estimates,
    Jobs,
    Nodes,
    Snapshot,
)
from tessera.formulation.state.tenants import Tenants

GPU_COUNTS: Final = (1, 2, 3, 4, 6, 8)
NOW_S: Final = 1e6


def draw_snapshot(rng: np.random.Generator, jobs: int, gpus: int = 8) -> Snapshot:
    """Return a snapshot of ``gpus`` GPUs in nodes of 4, and 3/4 as many of another type in pairs.

    Each job has a separate workload with 5 Cells, some of them dominated. About half of the jobs
    run. Tenants and jobs have weights; jobs have ages, service and restart seconds, and half of
    them have deadlines.
    """
    sizes, total = (4, 2), (gpus // 4 * 4, max(2, gpus * 3 // 8 * 2))
    nodes = [
        {
            "name": f"n{t}-{i}",
            "gpu_type": t,
            "gpus": sizes[t],
            "rack": "r",
            "schedulable": True,
            "version": 1,
        }
        for t in (0, 1)
        for i in range(total[t] // sizes[t])
    ]
    cells = [_cells(rng) for _ in range(jobs)]
    free = [
        [(n, g) for n, node in enumerate(nodes) if node["gpu_type"] == t for g in range(sizes[t])]
        for t in (0, 1)
    ]
    rows, held = [], []
    for job in range(jobs):
        gpu_type, count, degree, rate = cells[job][int(rng.integers(5))]
        runs = bool(rng.random() < 0.5) and count <= len(free[gpu_type])
        if runs:
            taken, free[gpu_type] = free[gpu_type][:count], free[gpu_type][count:]
            held += [
                {"job": job, "node": n, "gpu": g, "hold": int(Hold.HELD), "generation": 1}
                for n, g in taken
            ]
        current = (gpu_type, count, degree) if runs else (-1, 0, 0)
        rows.append(_job(rng, job, cells[job], current, rate))
    return Snapshot(
        cluster="bench",
        epoch=1,
        round_number=1,
        now_s=NOW_S,
        gpu_types=(
            GpuType(name="a", memory_bytes=2**35, dollars_per_hour=2.5, watts=400.0),
            GpuType(name="b", memory_bytes=2**35, dollars_per_hour=1.1, watts=250.0),
        ),
        nodes=Nodes.from_rows(nodes),
        workloads=tuple(Workload(model="m", params=f"{j}B", global_batch=8) for j in range(jobs)),
        plans=("",),
        estimates=Estimates.from_rows(
            [
                {
                    "workload": job,
                    "gpu_type": t,
                    "gpus": n,
                    "nodes": -(-n // sizes[t]),
                    "pipeline_degree": d,
                    "plan": 0,
                    "iter_time_s": 8 / rate,
                    "source": int(EstimateSource.MEASURED),
                }
                for job in range(jobs)
                for t, n, d, rate in sorted(cells[job])
            ]
        ),
        jobs=Jobs.from_rows(rows),
        allocations=Allocations.from_rows(held),
        tenants=Tenants.from_rows(
            [
                {"name": f"t{i}", "weight": w, "borrow_gpus": -1, "keeps_idle_quota": False}
                for i, w in enumerate((0.5, 1.0, 2.0))
            ]
        ),
    )


_Cell = tuple[int, int, int, float]
"""(GPU type, GPUs, degree, samples/s)."""


def _cells(rng: np.random.Generator) -> list[_Cell]:
    every = [(t, n, d) for t in (0, 1) for n in GPU_COUNTS for d in (1, 2)]
    picked = rng.choice(len(every), size=5, replace=False)
    base, speed = rng.uniform(1, 10), rng.uniform(0.4, 2.5, size=2)
    return [
        (t, n, d, float(base * speed[t] * n ** rng.uniform(0.5, 1.0)))
        for t, n, d in (every[i] for i in picked.tolist())
    ]


def _job(
    rng: np.random.Generator,
    job: int,
    cells: list[_Cell],
    current: tuple[int, int, int],
    rate: float,
) -> dict[str, Any]:
    runs = current[1] > 0
    left_s = float(rng.choice([60, 600, 6_000, 60_000])) * rng.uniform(0.5, 2.0)
    left = left_s * cells[0][3] / 8  # iterations
    age_s = float(rng.uniform(0, 50_000))
    restart_s = float(rng.choice([0.0, 30.0, 120.0, 400.0]))
    due_s = NOW_S + left_s * rng.uniform(0.3, 4.0) if rng.random() < 0.5 else math.inf
    in_time = left * 8 <= rate * (due_s - NOW_S)
    return {
        "name": f"job-{job}",
        "workload": job,
        "state": STATE_CODE[JobState.RUNNING if runs else JobState.QUEUED],
        "iterations": left * rng.uniform(1.0, 3.0),
        "iterations_left": left,
        "requested_gpus": int(rng.choice(GPU_COUNTS)),
        "tenant": f"t{int(rng.integers(4))}",
        "weight": float(rng.choice([0.5, 1.0, 2.0])),
        "deadline_s": due_s,
        "admitted": runs and math.isfinite(due_s) and in_time and bool(rng.random() < 0.5),
        "submit_s": NOW_S - age_s,
        "queued_s": NOW_S - age_s,
        "since_s": NOW_S - age_s / 2 if runs else 0.0,
        "service_gpu_s": float(rng.uniform(0, 1e5)),
        "restart_s": restart_s,
        "generation": int(runs),
        "current_type": current[0],
        "current_gpus": current[1],
        "current_degree": current[2],
    }


def with_equal_shares(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot in which jobs with unequal numbers of GPUs on nodes wait instead."""
    allocations, jobs = snapshot.allocations, snapshot.jobs
    count = np.zeros((len(jobs), len(snapshot.nodes)), np.int64)
    np.add.at(count, (allocations.job, allocations.node), 1)
    waits = (count != count.max(axis=1, keepdims=True)) & (count > 0)
    is_uneven = waits.any(axis=1)
    is_even = ~is_uneven[allocations.job]
    fields = {
        name: getattr(allocations, name)[is_even]
        for name in ("job", "node", "gpu", "hold", "generation")
    }
    return replace(
        snapshot,
        allocations=Allocations(**fields),
        jobs=replace(
            jobs,
            state=np.where(is_uneven, STATE_CODE[JobState.QUEUED], jobs.state),
            current_type=np.where(is_uneven, -1, jobs.current_type),
            current_gpus=np.where(is_uneven, 0, jobs.current_gpus),
            current_degree=np.where(is_uneven, 0, jobs.current_degree),
            since_s=np.where(is_uneven, 0.0, jobs.since_s),
            generation=np.where(is_uneven, 0, jobs.generation),
            admitted=jobs.admitted & ~is_uneven,
        ),
    )
