"""Workloads, Cells and their estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import HOST_RESOURCES, amounts_of, name_amounts
from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.job.execution_plan import (
    DIGEST,
    ExecutionPlan,
    check_fits,
    read_execution_plan,
)
from tessera.formulation.records.estimates import CellFilter, EstimateRecord
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.networks import of_traffic, to_traffic
from tessera.v1 import estimates_pb2 as pb

MIN_ITER_TIME_S, MAX_ITER_TIME_S = 1e-6, 1e7
"""Range of iteration times in seconds. Others have a wrong unit and would drown the objective."""
MAX_SD: Final = 5.0
"""Largest standard deviation. A time that may be 150 times as long is not an estimate; most likely
the value is in per cent.
"""

_SOURCES: Final = {
    pb.EstimateSource.MEASURED: EstimateSource.MEASURED,
    pb.EstimateSource.PROFILED: EstimateSource.PROFILED,
    pb.EstimateSource.ANALYTIC: EstimateSource.ANALYTIC,
}
"""The sources that an estimate may have."""
_NUMBERS: Final[Mapping[EstimateSource | None, pb.EstimateSource.ValueType]] = {
    None: pb.EstimateSource.ESTIMATE_SOURCE_UNSPECIFIED,
    EstimateSource.REPLAYED: pb.EstimateSource.REPLAYED,
    **{source: number for number, source in _SOURCES.items()},
}


def to_workload(field: str, message: pb.Workload) -> Workload:
    """Return the workload of a message."""
    params = fields.require_text(f"{field}.params", message.params, 100)
    if "/" in params:
        raise InvalidInput(f"{field}.params", "must not contain '/'")
    return Workload(
        model=fields.require_text(f"{field}.model", message.model, 200, required=True),
        params=params,
        global_batch=fields.require_whole(
            f"{field}.global_batch", message.global_batch, 1, limits.MAX_BATCH
        ),
    )


def to_cell_filter(request: pb.DeleteCellsRequest) -> CellFilter:
    """Return the filter for the Cells that a call deletes.

    Raises:
        InvalidInput: it has no filter, or it has both ``all`` and another filter.
    """
    partial = bool(request.workload.model or request.gpu_type or request.gpus)
    if partial == request.all:
        problem = (
            "cannot be combined with other filters"
            if partial
            else "must be set if no filter is set"
        )
        raise InvalidInput("all", f"{problem} (workload, gpu_type, gpus)")
    return CellFilter(
        workload=to_workload("workload", request.workload) if request.workload.model else None,
        gpu_type=request.gpu_type and names.require_gpu_type("gpu_type", request.gpu_type),
        gpus=fields.require_whole("gpus", request.gpus, 0, limits.MAX_GPUS),
    )


def to_model_name(field: str, message: pb.ModelName) -> tuple[str, str]:
    """Return (model, params)."""
    params = fields.require_text(f"{field}.params", message.params, 100)
    return fields.require_text(f"{field}.model", message.model, 200, required=True), params


def of_workload(workload: Workload) -> pb.Workload:
    """Return the message of ``workload``."""
    return pb.Workload(
        model=workload.model, params=workload.params, global_batch=workload.global_batch
    )


def of_cell(cell: Cell) -> pb.Cell:
    """Return the message of a Cell, which does not contain the number of nodes."""
    return pb.Cell(
        gpu_type=cell.gpu_type, gpus=cell.gpus, pipeline_degree=cell.pipeline_degree, plan=cell.plan
    )


def to_estimate(
    field: str, message: pb.CellEstimate, workload_of_job: Callable[[str, str], Workload]
) -> EstimateRecord:
    """Return the estimate.

    ``workload_of_job(field, name)`` returns the workload of the job that a Cell names.
    """
    if bool(message.job) == message.HasField("workload"):
        raise InvalidInput(field, "set exactly one of workload and job")
    workload = (
        workload_of_job(f"{field}.job", message.job)
        if message.job
        else to_workload(f"{field}.workload", message.workload)
    )
    cell, of = message.cell, f"{field}.cell"
    gpus = fields.require_whole(f"{of}.gpus", cell.gpus, 1, limits.MAX_GPUS)
    record = EstimateRecord(
        workload=workload,
        cell=Cell(
            gpu_type=names.require_gpu_type(f"{of}.gpu_type", cell.gpu_type),
            gpus=gpus,
            nodes=fields.require_whole(f"{field}.nodes", message.nodes, 0, gpus),
            pipeline_degree=fields.require_whole(
                f"{of}.pipeline_degree", cell.pipeline_degree, 0, gpus
            ),
            plan=_digest(f"{of}.plan", cell.plan),
        ),
        iter_time_s=_iter_time_s(field, message),
        source=_source(f"{field}.source", message.source),
        provenance=fields.require_text(f"{field}.provenance", message.provenance, 1000),
        sd=_sd(f"{field}.sd", message),
        complete=message.complete,
        traffic=to_traffic(f"{field}.traffic", message.traffic, gpus)
        if message.HasField("traffic")
        else None,
        **name_amounts(
            fields.require_whole(f"{field}.{r.name}", getattr(message, r.name), 0, r.max_needed)
            for r in HOST_RESOURCES
        ),
    )
    if not message.execution_plan:
        return record
    plan = read_execution_plan(f"{field}.execution_plan", message.execution_plan)
    check_fits(plan, f"{field}.execution_plan", workload, gpus)
    _require_same(f"{of}.plan", cell.plan, plan.digest)
    _require_same(f"{of}.pipeline_degree", cell.pipeline_degree, plan.pipeline_degree)
    return record.with_plan(plan)


def of_estimate(record: EstimateRecord) -> pb.CellEstimate:
    """Return the message of a stored estimate."""
    runs = math.isfinite(record.iter_time_s)
    return pb.CellEstimate(
        workload=of_workload(record.workload),
        cell=of_cell(record.cell),
        nodes=record.cell.nodes,
        iter_time_s=record.iter_time_s if runs else 0.0,
        infeasible=not runs,
        source=source_number(record.source),
        provenance=record.provenance,
        sd=record.sd,
        complete=record.complete,
        traffic=of_traffic(record.traffic),
        execution_plan=of_plan(record.plan),
        **name_amounts(amounts_of(record)),
    )


def of_plan(plan: ExecutionPlan | None) -> str:
    """Return the JSON of an execution plan, or "" without one."""
    return "" if plan is None else plan.to_json()


def _digest(field: str, text: str) -> str:
    """Return the digest of an execution plan, or "" without a plan."""
    if text and not DIGEST.fullmatch(text):
        raise InvalidInput(
            field,
            f"{text[:80]!r} is not the digest of an execution plan (64 hexadecimal digits); set"
            " execution_plan to the plan itself, or leave both empty if the best plan is meant",
        )
    return text


def _require_same(field: str, stated: object, planned: object) -> None:
    """Check that a value is that of the execution plan, or not stated."""
    if stated and stated != planned:
        raise InvalidInput(
            field, f"is {stated}, but the execution plan has {planned}; leave it empty"
        )


def _iter_time_s(field: str, message: pb.CellEstimate) -> float:
    if message.infeasible:
        if message.iter_time_s != 0:  # also NaN
            raise InvalidInput(field, "set exactly one of iter_time_s and infeasible")
        return math.inf
    return fields.require_real(
        f"{field}.iter_time_s", message.iter_time_s, MIN_ITER_TIME_S, MAX_ITER_TIME_S
    )


def _sd(field: str, message: pb.CellEstimate) -> float | None:
    if not message.HasField("sd"):
        return None
    if message.infeasible:
        raise InvalidInput(field, "has no meaning for an infeasible Cell; leave it unset")
    return fields.require_real(field, message.sd, 0.0, MAX_SD)


def source_number(source: EstimateSource | None) -> pb.EstimateSource.ValueType:
    """Return the number of a source. None is ESTIMATE_SOURCE_UNSPECIFIED."""
    return _NUMBERS[source]


def _source(field: str, source: pb.EstimateSource.ValueType) -> EstimateSource:
    if source not in _SOURCES:
        raise InvalidInput(field, "must be MEASURED, PROFILED or ANALYTIC")
    return _SOURCES[source]
