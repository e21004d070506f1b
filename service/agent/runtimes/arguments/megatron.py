"""Arguments of Megatron-LM from an execution plan, for a script that torchrun starts.

The names and the rules are those of ``megatron/training/arguments.py``, releases 0.12 to 0.16. A
command may state what the plan decides if it states the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.blocks import divide_blocks
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tessera.formulation.job.runtimes import MEGATRON
from tessera.service.agent.keeper.spec import LaunchArguments
from tessera.service.agent.runtimes.arguments.layout import RankLayout, check_plan, read_program
from tessera.service.agent.runtimes.arguments.torchrun import launcher_variables, launcher_words
from tessera.service.agent.runtimes.arguments.words import fill_words, read_flags

_BATCH: Final = "--global-batch-size"
_OTHER_NAMES: Final = frozenset(
    {
        "--num-layers-per-virtual-pipeline-stage",
        "--pipeline-model-parallel-layout",
        "--recompute-activations",
        "--recompute-modules",
        "--fp8-hybrid",
        "--fp8-e4m3",
        "--use-megatron-fsdp",
        "--use-custom-fsdp",
        "--use-torch-fsdp2",
        "--data-parallel-sharding-strategy",
        "--rampup-batch-size",
        "--decrease-batch-size-if-needed",
    }
)
"""Arguments with which a command would decide what the plan decides by others."""

DECIDED: Final = frozenset(
    {
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--sequence-parallel",
        "--num-virtual-stages-per-pipeline-rank",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--micro-batch-size",
        _BATCH,
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
        "--use-distributed-optimizer",
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction",
        "--bf16",
        "--fp16",
        "--fp8-format",
        *_OTHER_NAMES,
    }
)
"""Arguments that a plan decides, by their values or by their absence."""


def megatron_arguments(
    layout: RankLayout, command: Sequence[str], plan: ExecutionPlan | None, global_batch: int
) -> LaunchArguments:
    """Return the command that starts torchrun with a script of Megatron-LM on a node.

    Without a plan, only the global batch is added.

    Raises:
        InvalidInput: the command contradicts the plan or the batch, or something else about the
            command, the plan or a place holder cannot be used.
    """
    check_plan(MEGATRON, layout, plan, global_batch)
    program = read_program(MEGATRON, command)
    words = fill_words(program.arguments, plan)
    stated = read_flags(words)
    variables = launcher_variables(layout)
    if plan is None:
        wanted, decided = {_BATCH: str(global_batch)}, frozenset({_BATCH})
    else:
        wanted, decided = dict(_plan_flags(plan, "--num-experts" in stated)), DECIDED
        _check_layers(plan, stated)
        (stage, *_) = plan.stages
        if stage.tp > 1 or stage.cp > 1:  # Megatron-LM insists on it, up to Hopper
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    _check_stated(stated, wanted, decided)
    added = [
        word
        for name, value in wanted.items()
        if name not in stated
        for word in ((name, value) if value else (name,))
    ]
    argv = launcher_words(layout, replace(program, arguments=(*words, *added)))
    return LaunchArguments(argv=argv, environment=variables)


def _check_stated(
    stated: Mapping[str, str], wanted: Mapping[str, str], decided: frozenset[str]
) -> None:
    """Refuse a command that states other values of what is decided. Raises InvalidInput."""
    for name, value in stated.items():
        if name not in decided or wanted.get(name) == value:
            continue
        if name == _BATCH:
            problem = f"is {value}, but the job's global batch is {wanted[name]}; leave it out"
        elif name in wanted:
            shown = f" {wanted[name]}" if wanted[name] else ""
            problem = f"contradicts the execution plan, which has {name}{shown}; leave it out"
        else:
            problem = "is not in the execution plan, which decides it; leave it out"
        raise InvalidInput(f"command: {name}", problem)


def _check_layers(plan: ExecutionPlan, stated: Mapping[str, str]) -> None:
    """Refuse a command whose model the plan's stages do not divide. Raises InvalidInput."""
    blocks, name = str(plan.layers - 2), "--num-layers"
    if plan.pipeline_degree > 1 and stated.get(name, blocks) != blocks:
        raise InvalidInput(
            f"command: {name}",
            f"is {stated[name]}, but the execution plan has {blocks} layers, apart from the embedding and"
            " the head; state the model that the plan is for",
        )


def _plan_flags(plan: ExecutionPlan, has_experts: bool) -> Iterator[tuple[str, str]]:
    """Yield a plan's arguments with their values. A flag has the value ""."""
    (stage, *_) = plan.stages
    yield "--tensor-model-parallel-size", str(stage.tp)
    yield "--pipeline-model-parallel-size", str(plan.pipeline_degree)
    yield "--context-parallel-size", str(stage.cp)
    if stage.ep > 1 or has_experts:  # a plan's experts are never divided themselves
        yield "--expert-model-parallel-size", str(stage.ep)
        yield "--expert-tensor-parallel-size", "1"
    if stage.sp:
        yield "--sequence-parallel", ""
    yield from _division_flags(plan)
    yield "--micro-batch-size", str(plan.micro_batch // stage.dp)
    yield _BATCH, str(plan.global_batch)
    yield from _memory_flags(plan)
    yield from _precision_flags(plan)


def _division_flags(plan: ExecutionPlan) -> Iterator[tuple[str, str]]:
    if plan.schedule is Schedule.INTERLEAVED:
        yield "--num-virtual-stages-per-pipeline-rank", str(plan.chunks)
    division = divide_blocks(plan)
    if plan.pipeline_degree == 1 or division is None:  # check_plan refused the latter
        return
    if division.counts_ends:
        yield "--account-for-embedding-in-pipeline-split", ""
        yield "--account-for-loss-in-pipeline-split", ""
    if division.first is not None:
        yield "--decoder-first-pipeline-num-layers", str(division.first)
    if division.last is not None:
        yield "--decoder-last-pipeline-num-layers", str(division.last)


def _memory_flags(plan: ExecutionPlan) -> Iterator[tuple[str, str]]:
    if plan.recomputation is not Recomputation.NONE:
        yield "--recompute-granularity", plan.recomputation.value
    if plan.recomputation is Recomputation.FULL:
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", "1"
    if plan.zero is ZeroStage.OPTIMIZER:
        yield "--use-distributed-optimizer", ""
    if plan.offload is Offload.OPTIMIZER:
        yield "--optimizer-cpu-offload", ""
        yield "--optimizer-offload-fraction", "1.0"
        yield "--use-precision-aware-optimizer", ""  # offloading needs it


def _precision_flags(plan: ExecutionPlan) -> Iterator[tuple[str, str]]:
    if plan.precision is Precision.F16:
        yield "--fp16", ""
    elif plan.precision is not Precision.F32:
        yield "--bf16", ""
    if plan.precision is Precision.FP8:
        yield "--fp8-format", "hybrid"
