"""The execution plans that users state for their jobs, in any format that is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from tessera.estimator.models import Model, known_models, model_of
from tessera.estimator.plans import Shape
from tessera.estimator.stated.completion import PlanContext, complete_plan
from tessera.estimator.stated.formats import read_stated_plan
from tessera.estimator.stated.statement import StatedPlan
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, ZeroStage, check_fits, model_name
from tessera.formulation.records.estimates import ModelSpec

ModelsOf: TypeAlias = Callable[[], Sequence[ModelSpec]]
"""A function that returns the models that users of the cluster described."""


def read_job_plan(
    field: str, text: str, workload: Workload, gpus: int, models: ModelsOf
) -> ExecutionPlan:
    """Return the execution plan that a job states on ``gpus`` GPUs, wherever they are.

    A plan in another format than Tessera's own needs a model that the service knows, because it
    does not say in which stage each layer is.

    Raises:
        InvalidInput: the text is not a plan, or not one for this workload and number of GPUs.
    """
    try:
        return _read(field, text, workload, gpus, models)
    except InvalidInput as wrong:
        if wrong.field.startswith(field):
            raise
        raise InvalidInput(field, str(wrong)) from wrong  # it names the text's own field


def _read(field: str, text: str, workload: Workload, gpus: int, models: ModelsOf) -> ExecutionPlan:
    given = read_stated_plan(field, text)
    if isinstance(given, StatedPlan):
        model = model_of(field, workload, models())
        return _completed(given, model, workload, gpus)
    model_there = known_models([workload], models()).get(workload)
    layers = None if model_there is None else len(model_there.graph)
    check_fits(given, field, workload, gpus, layers)
    return given


def _completed(given: StatedPlan, model: Model, workload: Workload, gpus: int) -> ExecutionPlan:
    context = PlanContext(
        graph=model.graph,
        training=model.training.at(workload.global_batch),
        shape=Shape(nodes=1, gpus_per_node=gpus),
        zero=ZeroStage(model.zero),
        model=model_name(workload),
    )
    return replace(complete_plan(given, context), shape=())
