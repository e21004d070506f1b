"""A family whose Cells are those of Arena's published profiles."""

from __future__ import annotations

import math

import numpy as np

from tessera.benchmarks.rounds.instances import NO_ALLOCATIONS, draw_queued
from tessera.formulation.base.values import Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.state.snapshot import Estimates, Nodes, Snapshot
from tessera.simulator.clusters import arena_table1
from tessera.simulator.data import require_data_file
from tessera.simulator.traces.profiles import read_profiles


def draw_profiled(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Snapshot:
    """Draw jobs of the profiled workloads on Arena's simulated cluster of 1,280 GPUs of 4 types.

    A job requests one of the GPU counts of its workload's Cells. If ``gpus`` is given, each type has
    about that share of its nodes, and at least one.

    Raises:
        MissingData: the profiles are not in the data folder.
    """
    path = require_data_file("arena", "alpa_optimal.csv")
    records = [r for r in read_profiles(path, complete=True) if math.isfinite(r.iter_time_s)]
    whole = sum(node.gpus for node in arena_table1()[1])
    gpu_types, nodes = arena_table1(gpus / whole if gpus else 1.0)
    code = {kind.name: t for t, kind in enumerate(gpu_types)}
    if len(gpu_types) != types:
        raise AssertionError("Arena's cluster has four types")
    workloads = sorted({r.workload for r in records}, key=lambda w: w.key)
    counts = [sorted({r.cell.gpus for r in records if r.workload == w}) for w in workloads]
    request = np.array([int(rng.choice(own)) for own in counts])
    return Snapshot(
        cluster="bench",
        epoch=1,
        round_number=1,
        now_s=0.0,
        gpu_types=tuple(gpu_types),
        nodes=Nodes(
            name=tuple(n.name for n in nodes),
            gpu_type=np.array([code[n.gpu_type] for n in nodes]),
            gpus=np.array([n.gpus for n in nodes]),
            rack=tuple(n.rack for n in nodes),
            schedulable=np.ones(len(nodes), np.bool_),
            version=np.ones(len(nodes), np.int64),
        ),
        workloads=tuple(workloads),
        plans=("",),
        estimates=_estimates([r for r in records if r.cell.gpu_type in code], workloads, code),
        jobs=draw_queued(rng, np.arange(jobs), request, "real"),
        allocations=NO_ALLOCATIONS,
    )


def _estimates(
    records: list[EstimateRecord], workloads: list[Workload], code: dict[str, int]
) -> Estimates:
    which = {workload: w for w, workload in enumerate(workloads)}
    return Estimates.from_rows(
        sorted(
            (
                {
                    "workload": which[r.workload],
                    "gpu_type": code[r.cell.gpu_type],
                    "gpus": r.cell.gpus,
                    "pipeline_degree": r.cell.pipeline_degree,
                    "plan": 0,
                    "nodes": r.cell.nodes,
                    "iter_time_s": r.iter_time_s,
                    "source": int(r.source),
                    "complete": r.complete,
                }
                for r in records
            ),
            key=lambda row: tuple(row.values())[:6],
        )
    )
