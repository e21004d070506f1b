"""Estimates of the execution plans that users state for jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tessera.estimator.cell_estimator import MAX_PROVENANCE, Estimator
from tessera.estimator.plans import Shape, shape_on, shapes_of
from tessera.estimator.pricing.price import price_plan
from tessera.estimator.traffic import traffic_of
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import amounts_of, name_amounts
from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.records.estimates import EstimateRecord


def estimate_stated_plan(
    estimator: Estimator,
    workload: Workload,
    gpu_type: str,
    plan: ExecutionPlan,
    nodes: int | None = None,
) -> list[EstimateRecord]:
    """Return the estimate of a plan on each shape for which it may be used.

    A plan that names no shape is priced on those of our own plans, on up to ``nodes`` nodes. Its
    time is that of the cost model, without what measurements of other Cells teach. A plan that
    cannot run there is infeasible.
    """
    node_gpus = estimator.hardware[gpu_type].gpus_per_node
    return [
        _estimate_on(estimator, workload, gpu_type, plan, shape)
        for shape in _shapes(plan, node_gpus, nodes)
    ]


def _shapes(plan: ExecutionPlan, node_gpus: int, nodes: int | None) -> Iterator[Shape]:
    if not plan.shape:
        yield from shapes_of(plan.gpus, node_gpus, nodes)
        return
    shape = shape_on(plan.gpus, len(plan.shape), node_gpus)
    if shape is not None and shape.each_node == plan.shape and plan.shape[0] <= node_gpus:
        yield shape


def _estimate_on(
    estimator: Estimator, workload: Workload, gpu_type: str, plan: ExecutionPlan, shape: Shape
) -> EstimateRecord:
    cell = Cell(
        gpu_type=gpu_type,
        gpus=plan.gpus,
        pipeline_degree=plan.pipeline_degree,
        nodes=shape.nodes,
    )
    setting = estimator.setting(workload, gpu_type, shape)
    record = EstimateRecord(
        workload=workload,
        cell=cell,
        iter_time_s=math.inf,
        source=EstimateSource.PROFILED if setting.timed else EstimateSource.ANALYTIC,
    ).with_plan(plan)
    try:
        price = price_plan(setting, plan)
    except InvalidInput as wrong:
        return replace(record, provenance=f"stated: {wrong}"[:MAX_PROVENANCE])
    if price.overflow is not None:
        return replace(record, provenance=f"stated: {price.overflow}"[:MAX_PROVENANCE])
    return replace(
        record,
        iter_time_s=price.iter_time_s,
        provenance=f"stated: {plan}"[:MAX_PROVENANCE],
        traffic=traffic_of(setting, plan),
        **name_amounts(amounts_of(price.demand)),
    )
