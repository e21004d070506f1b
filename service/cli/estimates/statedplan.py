"""The options that state an execution plan, alone or together with a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from tessera.estimator.files.userfiles import read_text
from tessera.estimator.stated.completion import PlanContext, complete_plan
from tessera.estimator.stated.formats import read_stated_plan
from tessera.estimator.stated.statement import STATED_FIELDS, StatedPlan, combine
from tessera.formulation.base import limits
from tessera.formulation.base.documents import STATED_PLAN
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)

GivenPlan = StatedPlan | ExecutionPlan
"""What a user stated: a part of a plan, or a whole one in Tessera's JSON."""

_Command = TypeVar("_Command", bound=Callable[..., None])
_PANEL: Final = "Execution plan"


class PipelineSchedule(StrEnum):
    """The schedules of an option. Chunks make a schedule interleaved."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=_PANEL, **rest)


def _degree(text: str, name: str) -> Any:
    return _option(text, name, min=1, max=limits.MAX_GPUS)


def plan_options(
    *,
    plan: Annotated[
        Path | None,
        _option(
            "Price the plan in a file and compare it with ours: Tessera's JSON, or a command line of"
            " Megatron-LM. Options below add what the file leaves open.",
            metavar="FILE",
        ),
    ] = None,
    dp: Annotated[int | None, _degree("Replicas. Default: the remaining GPUs.", "--dp")] = None,
    tp: Annotated[int | None, _degree("Tensor degree. Default: 1.", "--tp")] = None,
    pp: Annotated[int | None, _degree("Pipeline degree. Default: 1.", "--pp")] = None,
    vp: Annotated[
        int | None,
        _degree(
            "Chunks of layers on each stage's GPUs, for an interleaved schedule. Default: 1.",
            "--vp",
        ),
    ] = None,
    cp: Annotated[
        int | None, _degree("GPUs that divide each sequence. Default: 1.", "--cp")
    ] = None,
    ep: Annotated[
        int | None, _degree("GPUs over which experts are divided. Default: 1.", "--ep")
    ] = None,
    sp: Annotated[
        bool | None,
        _option(
            "Divide activations by sequence within tensor groups. Default: no.", "--sp/--no-sp"
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        _option(
            "Samples of a micro-batch in each replica. Default: from --micro-batches.",
            min=1,
            max=limits.MAX_BATCH,
        ),
    ] = None,
    recompute: Annotated[
        Recomputation | None,
        _option("Activations to recompute. Default: as --checkpointing says."),
    ] = None,
    offload: Annotated[
        Offload | None, _option("States in the host's memory. Default: none.")
    ] = None,
    cpus_per_gpu: Annotated[
        int | None,
        _option(
            "CPU cores for each GPU that update offloaded states. Default: all of the host's.",
            "--cpus-per-gpu",
            min=1,
            max=limits.MAX_GPUS,
        ),
    ] = None,
    precision: Annotated[
        Precision | None, _option("Data type of products. Default: as --dtype says.")
    ] = None,
    schedule: Annotated[
        PipelineSchedule | None, _option("Order of a pipeline's passes. Default: 1f1b.")
    ] = None,
) -> GivenPlan | None:
    """Return what the options and the file state. If they state nothing, return None."""
    from_options = _named(
        {
            "dp": ("--dp", dp),
            "tp": ("--tp", tp),
            "pp": ("--pp", pp),
            "chunks": ("--vp", vp),
            "cp": ("--cp", cp),
            "ep": ("--ep", ep),
            "sp": ("--sp", sp),
            "micro_batch": ("--micro-batch", micro_batch),
            "recomputation": ("--recompute", recompute),
            "offload": ("--offload", offload),
            "cpus_per_gpu": ("--cpus-per-gpu", cpus_per_gpu),
            "precision": ("--precision", precision),
            "schedule": ("--schedule", None if schedule is None else Schedule(schedule.value)),
        }
    )
    if plan is None:
        return None if from_options.states_nothing else from_options
    from_file = read_stated_plan(plan.name, read_text(plan, STATED_PLAN.size_bytes))
    if isinstance(from_file, StatedPlan):
        return combine([from_file, from_options])
    if not from_options.states_nothing:
        stated = [f for f in STATED_FIELDS if getattr(from_options, f) is not None]
        given = ", ".join(from_options.name(field) for field in stated)
        raise InvalidInput(
            given, f"cannot change the whole plan in {plan.name}; remove one of them"
        )
    return from_file


def _named(values: Mapping[str, tuple[str, Any]]) -> StatedPlan:
    """Return the statement of the options that were given."""
    given = {field: value for field, (_, value) in values.items() if value is not None}
    names = {field: name for field, (name, _) in values.items()}
    return StatedPlan(**given, names=names)


def training_statement(values: Mapping[str, Any]) -> StatedPlan:
    """Return what the options of the training state about a plan, by their parameters' names."""
    zero, checkpointing = values["zero"], values["checkpointing"]
    recomputation = Recomputation.FULL if checkpointing else Recomputation.NONE
    return _named(
        {
            "zero": ("--zero", None if zero is None else ZeroStage(zero)),
            "recomputation": ("--checkpointing", None if checkpointing is None else recomputation),
            "accumulation": ("--micro-batches", values["micro_batches"]),
            "precision": ("--dtype", _precision(values["dtype"])),
        }
    )


def _precision(dtype: str | None) -> Precision | None:
    return Precision(dtype) if dtype in tuple(Precision) else None


def with_plan(command: _Command) -> Callable[..., None]:
    """Return ``command`` with the options of a plan in place of its parameter ``plan``.

    The plan may state the batch and the number of GPUs, which are then optional.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    stated = inspect.signature(plan_options, eval_str=True).parameters
    del own["plan"]
    for name in ("batch", "count"):
        own[name] = own[name].replace(default=None, annotation=_optional(own[name].annotation))

    def run(**given: Any) -> None:
        plan = plan_options(**{name: given.pop(name) for name in stated})
        if isinstance(plan, StatedPlan):
            plan = combine([plan, training_statement(given)])
            given["sequence"] = _sequence(given, plan)
        given["batch"] = _number("--batch", given["batch"], _batch_of(plan))
        given["count"] = _number("--count", given["count"], _gpus_of(plan))
        command(plan=plan, **given)

    run.__name__, run.__module__, run.__doc__ = (
        command.__name__,
        command.__module__,
        command.__doc__,
    )
    parameters = [*own.values(), *stated.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _optional(annotation: Any) -> Any:
    """Return the annotation of an option that may be left out."""
    return Annotated[annotation.__origin__ | None, *annotation.__metadata__]


def _number(option: str, given: int | None, stated: int | None) -> int:
    if given is not None:
        return given
    if stated is None:
        raise InvalidInput(option, "is required, or a plan that states it")
    return stated


def _sequence(given: Mapping[str, Any], plan: StatedPlan) -> int | None:
    """Return the tokens of a sample. Where an option or a model's file leaves them open, the plan counts."""
    stated: int | None = given["sequence"]
    if plan.sequence is None or not (given["architecture"] or given["hf"]):
        return stated
    if stated is not None and stated != plan.sequence:
        raise InvalidInput(
            "--sequence",
            f"states {stated}, but {plan.name('sequence')} states {plan.sequence}; state one of them",
        )
    return plan.sequence


def _batch_of(plan: GivenPlan | None) -> int | None:
    if plan is None or isinstance(plan, ExecutionPlan):
        return None if plan is None else plan.global_batch
    if plan.global_batch is None and plan.dp and plan.micro_batch and plan.accumulation:
        return plan.dp * plan.micro_batch * plan.accumulation
    return plan.global_batch


def _gpus_of(plan: GivenPlan | None) -> int | None:
    if plan is None or isinstance(plan, ExecutionPlan):
        return None if plan is None else plan.gpus
    if plan.gpus is None and plan.dp is not None:
        gpus: int = plan.dp * plan.value("tp", 1) * plan.value("pp", 1) * plan.value("cp", 1)
        return gpus
    return plan.gpus


def execution_plan(plan: GivenPlan, context: PlanContext) -> ExecutionPlan:
    """Return the whole plan that was stated. Raises InvalidInput."""
    return complete_plan(plan, context) if isinstance(plan, StatedPlan) else plan
