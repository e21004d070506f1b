"""Execution plans, as the scheduler reads them and compares them with jobs.

The class itself is in ``tessera.plans``, which training programs also import.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from tessera.formulation.base.documents import EXECUTION_PLAN, read_json
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.plans import (
    MAX_COUNT,
    ExecutionPlan,
    InvalidPlan,
    Offload,
    PlanStage,
    PlanSwitches,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
    plan_from_plain,
)

__all__ = [
    "DIGEST",
    "MAX_COUNT",
    "ExecutionPlan",
    "InvalidPlan",
    "Offload",
    "PlanStage",
    "PlanSwitches",
    "Precision",
    "Recomputation",
    "Schedule",
    "ZeroStage",
    "check_fits",
    "execution_plan_of",
    "join_chunks",
    "model_name",
    "read_execution_plan",
]

DIGEST: Final = re.compile("[0-9a-f]{64}")
"""The form of a plan's digest."""


def check_fits(
    plan: ExecutionPlan,
    field: str,
    workload: Workload,
    gpus: int | None = None,
    layers: int | None = None,
) -> None:
    """Refuse a plan for a workload, a number of GPUs or a model that it was not made for.

    ``gpus`` and ``layers`` are not checked if they are None.

    Raises:
        InvalidInput: names ``field``.
    """
    name = model_name(workload)
    if plan.model and plan.model != name:
        raise InvalidInput(
            field,
            f"was made for the model {plan.model}, not for {name}; use a plan of this model",
        )
    if plan.global_batch != workload.global_batch:
        raise InvalidInput(
            field,
            f"has {plan.accumulation} micro-batches of {plan.micro_batch} samples, i.e."
            f" {plan.global_batch} an iteration, but the workload's global batch is"
            f" {workload.global_batch}; a plan never changes the global batch",
        )
    if gpus is not None and gpus != plan.gpus:
        raise InvalidInput(field, f"is for {plan.gpus} GPUs, not for {gpus}")
    if layers is not None and layers != plan.layers:
        raise InvalidInput(
            field, f"ends at layer {plan.layers}, but the model {name} has {layers} layers"
        )


def join_chunks(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with one stage for each stage's chunks, with as many layers as they have."""
    if plan.chunks == 1:
        return plan
    degree = plan.pipeline_degree
    stages: list[PlanStage] = []
    for index, stage in enumerate(plan.stages[:degree]):
        start = stages[-1].end if stages else 0
        layers = sum(part.end - part.start for part in plan.stages[index::degree])
        stages.append(replace(stage, start=start, end=start + layers))
    return replace(plan, stages=tuple(stages), chunks=1, schedule=Schedule.ONE_F_ONE_B)


def model_name(workload: Workload) -> str:
    """Return the name of a workload's model in plans, ``model/params``."""
    return f"{workload.model}/{workload.params}"


def read_execution_plan(field: str, text: str | bytes) -> ExecutionPlan:
    """Return the plan of a JSON text, canonical or not.

    Raises:
        InvalidInput: it is not JSON, has an unknown field, or could not be launched. The error
            names the field below ``field``.
    """
    return execution_plan_of(field, read_json(field, text, EXECUTION_PLAN))


def execution_plan_of(field: str, plain: object) -> ExecutionPlan:
    """Return the plan of JSON's plain values. Raises InvalidInput as :func:`read_execution_plan`."""
    try:
        return plan_from_plain(field, plain)
    except InvalidPlan as wrong:
        raise InvalidInput(wrong.field, wrong.problem) from wrong
