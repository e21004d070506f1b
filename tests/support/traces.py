"""Builders of jobs and other parts of traces."""

from __future__ import annotations

import math
from typing import Any

from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.trace import Arrival, DurationJob


def a_workload(model: str = "bert", params: str = "1.3B", batch: int = 256) -> Workload:
    return Workload(model=model, params=params, global_batch=batch)


def a_record(
    gpus: int = 1,
    gpu_type: str = "a100",
    iter_time_s: float = 1.0,
    nodes: int = 1,
    work: Workload | None = None,
    plan: str = "",
) -> EstimateRecord:
    return EstimateRecord(
        workload=work or a_workload(),
        cell=Cell(gpu_type=gpu_type, gpus=gpus, pipeline_degree=1, plan=plan, nodes=nodes),
        iter_time_s=iter_time_s,
        source=EstimateSource.MEASURED,
    )


def an_arrival(
    name: str = "j",
    at_s: float = 0.0,
    iterations: int = 100,
    gpus: int = 1,
    gpu_type: str = "a100",
    work: Workload | None = None,
    **rest: Any,
) -> Arrival:
    return Arrival(
        at_s,
        JobSpec(
            name=name,
            workload=work or a_workload(),
            iterations=iterations,
            requested_gpus=gpus,
            requested_gpu_type=gpu_type,
            **rest,
        ),
    )


def an_asked(
    name: str = "j", at_s: float = 0.0, duration_s: float = 100.0, gpus: int = 1
) -> DurationJob:
    spec = JobSpec(name=name, workload=a_workload("", "", 1), iterations=1, requested_gpus=gpus)
    return DurationJob(at_s, duration_s, spec)


def some_arrivals(count: int, gap_s: float = 60.0, **rest: Any) -> list[Arrival]:
    return [an_arrival(f"j{i}", i * gap_s, **rest) for i in range(count)]


def a_cluster(gpu_type: str = "a100", nodes: int = 2, gpus: int = 4) -> list[NodeSpec]:
    return [NodeSpec(name=f"{gpu_type}-{i}", gpu_type=gpu_type, gpus=gpus) for i in range(nodes)]


def a_type(name: str = "a100") -> GpuType:
    return GpuType(name=name, memory_bytes=2**35)


def deadlines(arrivals: list[Arrival]) -> list[float]:
    return [a.spec.deadline_s for a in arrivals if math.isfinite(a.spec.deadline_s)]
