"""A benchmark of stating a round, from a snapshot's arrays to the problem's."""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import numpy as np
import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Allocations, Estimates, Jobs, Nodes, Snapshot
from tessera.formulation.statement import build_problem
from tessera.formulation.values import EstimateSource, GpuType, Workload
from tessera.simulator.figures import Report

GPU_COUNTS = (1, 2, 4, 8, 16)
DEGREES = (1, 2, 4)
GPU_TYPES = 4


@register_case("build", smoke={"jobs": 1000, "workloads": 20, "repeats": 2}, build_s=("<=", 3.0))
def time_statement(
    jobs: Annotated[int, typer.Option(help="Number of queued jobs.")] = 100_000,
    workloads: Annotated[
        int, typer.Option(help="Number of workloads that they share, with 60 Cells each.")
    ] = 1_000,
    repeats: Annotated[int, typer.Option(help="Number of repetitions.")] = 5,
    seed: int = 0,
) -> Report:
    """Time the statement of a round with 60 Cells for each workload and noisy sub-linear speed-ups.

    ``build_s`` is the median; 3 s is a hundredth of a round. Dominated Cells never become columns.
    """
    snapshot = crowded_cluster(jobs, workloads, seed)
    took, columns = [], 0
    for _ in track_steps(repeats, "builds"):
        started_s = time.perf_counter()
        columns = len(build_problem(snapshot, Policy()).cell)
        took.append(time.perf_counter() - started_s)
    figures = {
        "build_s": statistics.median(took),
        "jobs": jobs,
        "cells": len(snapshot.estimates) // workloads * jobs,
        "columns": columns,
    }
    return Report(seed=seed, figures=figures)


def crowded_cluster(jobs: int, workloads: int, seed: int) -> Snapshot:
    """Return a cluster of 8,000 GPUs with ``jobs`` queued jobs."""
    rng = np.random.default_rng(seed)
    axes = np.meshgrid(
        np.arange(workloads), np.arange(GPU_TYPES), GPU_COUNTS, DEGREES, indexing="ij", copy=False
    )
    workload, gpu_type, gpus, degree = (a.ravel() for a in axes)
    speed = (
        rng.uniform(5, 50, workloads)[workload]
        * rng.uniform(0.5, 2, (workloads, GPU_TYPES))[workload, gpu_type]
    )
    rate = speed * gpus ** rng.uniform(0.7, 0.95, len(gpus)) * rng.uniform(0.8, 1.0, len(gpus))
    none = np.zeros(0, np.int64)
    return Snapshot(
        cluster="bench",
        epoch=1,
        round_number=1,
        now_s=0.0,
        gpu_types=tuple(GpuType(name=f"t{t}", memory_bytes=2**35) for t in range(GPU_TYPES)),
        nodes=Nodes(
            name=tuple(f"n{n}" for n in range(1000)),
            gpu_type=np.arange(1000) % GPU_TYPES,
            gpus=np.full(1000, 8),
            rack=("r",) * 1000,
            schedulable=np.ones(1000, np.bool_),
            version=np.ones(1000, np.int64),
        ),
        workloads=tuple(
            Workload(model="m", params=str(w), global_batch=256) for w in range(workloads)
        ),
        plans=("",),
        estimates=Estimates(
            workload=workload,
            gpu_type=gpu_type,
            gpus=gpus,
            nodes=-(-gpus // 8),
            pipeline_degree=degree,
            plan=np.zeros_like(gpus),
            iter_time_s=256 / rate,
            source=np.full_like(gpus, EstimateSource.ANALYTIC),
        ),
        jobs=Jobs(
            name=tuple(f"j{j}" for j in range(jobs)),
            tenant=("t",) * jobs,
            workload=rng.integers(0, workloads, jobs),
            iterations=np.full(jobs, 1e5),
            iterations_left=rng.uniform(1e2, 1e5, jobs),
            requested_gpus=rng.choice(GPU_COUNTS, jobs),
            submit_s=np.arange(jobs, dtype=np.float64),
            queued_s=np.arange(jobs, dtype=np.float64),
        ),
        allocations=Allocations(job=none, node=none, gpu=none, hold=none, generation=none),
    )
