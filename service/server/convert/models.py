"""Models and planned Cells."""

from __future__ import annotations

from itertools import cycle
from typing import Final

from tessera.estimator.cell_estimator import CellEstimate
from tessera.estimator.models import Model
from tessera.estimator.pricing.price import PlanPrice
from tessera.estimator.profiling.tasks import arguments_of
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.estimates import ModelSpec
from tessera.service import fields
from tessera.service.server.convert.estimates import of_estimate
from tessera.v1 import estimates_pb2 as pb

MAX_STEP: Final = 200
MAX_ARGUMENTS: Final = 64
_DEFAULTS: Final = ModelSpec(model="", params="", architecture="")


def to_model(field: str, message: pb.Model) -> ModelSpec:
    """Return the model. Its architecture is not parsed yet."""
    params = fields.require_text(f"{field}.params", message.params, 100)
    if "/" in params:
        raise InvalidInput(f"{field}.params", "must not contain '/'")
    if not 1 <= len(message.architecture) <= limits.MAX_ARCHITECTURE:
        raise InvalidInput(
            f"{field}.architecture",
            f"must be a text of 1 to {limits.MAX_ARCHITECTURE:,} characters",
        )
    if message.dtype and message.dtype not in limits.DTYPES:
        raise InvalidInput(f"{field}.dtype", f"must be one of {', '.join(limits.DTYPES)}, or empty")
    for name in ("parameters", "published"):
        if getattr(message, name):
            raise InvalidInput(f"{field}.{name}", "is output only; leave it unset")
    micro_batches = message.micro_batches or _DEFAULTS.micro_batches
    state_bytes = message.state_bytes or _DEFAULTS.state_bytes
    return ModelSpec(
        model=fields.require_text(f"{field}.model", message.model, 200, required=True),
        params=params,
        architecture=message.architecture,
        sequence=fields.require_whole(
            f"{field}.sequence", message.sequence, 0, limits.MAX_SEQUENCE
        ),
        dtype=message.dtype,
        flash=message.flash,
        micro_batches=fields.require_whole(
            f"{field}.micro_batches", micro_batches, 1, limits.MAX_MICRO_BATCHES
        ),
        state_bytes=fields.require_real(
            f"{field}.state_bytes", state_bytes, 1.0, limits.MAX_STATE_BYTES
        ),
        checkpointing=message.checkpointing,
        zero=fields.require_whole(f"{field}.zero", message.zero, 0, 3),
        step=_step(f"{field}.step", message),
        step_arguments=tuple(message.step_arguments),
    )


def of_model(spec: ModelSpec, model: Model, *, published: bool = False) -> pb.Model:
    """Return the message of a model, with the facts of its parsed architecture."""
    return pb.Model(
        model=spec.model,
        params=spec.params,
        architecture=spec.architecture,
        sequence=spec.sequence,
        dtype=model.graph.dtype,
        flash=spec.flash,
        micro_batches=spec.micro_batches,
        state_bytes=spec.state_bytes,
        checkpointing=spec.checkpointing,
        zero=spec.zero,
        parameters=model.graph.parameters,
        published=published,
        step=spec.step,
        step_arguments=spec.step_arguments,
    )


def _step(field: str, message: pb.Model) -> str:
    """Return the step that profiling measures, or "" if the model has no step."""
    step = fields.require_text(field, message.step, MAX_STEP)
    if len(message.step_arguments) > MAX_ARGUMENTS:
        raise InvalidInput(f"{field}_arguments", f"must have at most {MAX_ARGUMENTS} entries")
    for i, text in enumerate(message.step_arguments):
        fields.require_text(f"{field}_arguments[{i}]", text, MAX_STEP)
    if arguments_of(f"{field}_arguments", message.step_arguments) and not step:
        raise InvalidInput(f"{field}_arguments", "has a meaning only with a step; set step, too")
    module, colon, function = step.partition(":")
    if step and not (colon and function.isidentifier() and _is_module(module)):
        raise InvalidInput(field, f"{step!r} is not a step; write module:function")
    return step


def _is_module(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def of_published(key: tuple[str, str], model: Model) -> pb.Model:
    """Return the message of a published model."""
    training = model.training
    spec = ModelSpec(
        model=key[0],
        params=key[1],
        architecture="",
        micro_batches=training.micro_batches,
        state_bytes=training.state_bytes,
        checkpointing=training.checkpointing,
        zero=model.zero,
    )
    return of_model(spec, model, published=True)


def of_cell(found: CellEstimate) -> pb.PlannedCell:
    """Return the message of an estimate with its execution plan."""
    message = pb.PlannedCell(estimate=of_estimate(found.record))
    if found.price is not None:
        message.micro_batches = found.price.plan.accumulation
        message.stages.extend(_stages(found.price))
    return message


def _stages(price: PlanPrice) -> list[pb.PlannedStage]:
    return [
        pb.PlannedStage(
            first_layer=s.start,
            end_layer=s.end,
            data_parallel=s.dp,
            tensor_parallel=s.tp,
            expert_parallel=s.ep,
            sequence_parallel=s.sp,
            memory_bytes=memory_bytes,
        )
        for s, memory_bytes in zip(price.plan.stages, cycle(price.memory_bytes), strict=False)
    ]
