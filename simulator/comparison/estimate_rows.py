"""Estimates as rows of plain values, so that they can be options and results of a sweep's tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import Cell, EstimateSource, Workload

EstimateRow: TypeAlias = tuple[str, str, int, str, int, int, str, int, float | None, int]
"""Model, parameters and batch; GPU type, GPUs, degree, plan and nodes; seconds of an iteration, None
if it does not run; source."""


def rows_of(records: Iterable[EstimateRecord]) -> tuple[EstimateRow, ...]:
    """Return the records as rows, without their plans, traffic and uncertainty."""
    return tuple(
        (
            e.workload.model,
            e.workload.params,
            e.workload.global_batch,
            e.cell.gpu_type,
            e.cell.gpus,
            e.cell.pipeline_degree,
            e.cell.plan,
            e.cell.nodes,
            e.iter_time_s if math.isfinite(e.iter_time_s) else None,
            int(e.source),
        )
        for e in records
    )


def records_of(rows: Iterable[EstimateRow]) -> list[EstimateRecord]:
    """Return the estimates of rows, which may have passed through JSON."""
    return [
        EstimateRecord(
            workload=Workload(model=model, params=params, global_batch=batch),
            cell=Cell(gpu_type=gpu_type, gpus=gpus, pipeline_degree=degree, plan=plan, nodes=nodes),
            iter_time_s=math.inf if seconds is None else seconds,
            source=EstimateSource(source),
        )
        for model, params, batch, gpu_type, gpus, degree, plan, nodes, seconds, source in rows
    ]
