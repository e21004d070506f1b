"""The runtimes that agents of this release include, and their abilities.

Runtimes are declared in this module only. Servers refuse at submission a job that no runtime can
run, rounds offer a job only the execution plans that its runtime can run, and agents include
exactly these runtimes. Agents import this module, so it stays light: it needs only the standard
library and light modules of this room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tessera.formulation.job.submeshes import refuse_nodes

REPLAY: Final = "replay"
"""Replays users' jobs, as a process that takes as long as training would but trains nothing."""

PROFILER: Final = "profile"
"""Measures layers, in the service's own tasks."""

COMMAND: Final = "command"
"""Runs any program, once on each node of the gang."""

TORCHRUN: Final = "torchrun"
"""Runs a PyTorch script once for each GPU, by PyTorch's own launcher: DDP or FSDP2."""

DEEPSPEED: Final = "deepspeed"
"""Runs a script once for each GPU, by DeepSpeed's launcher, with a configuration of DeepSpeed."""

MEGATRON: Final = "megatron"
"""Runs a script of Megatron-LM once for each GPU, with the plan as Megatron's arguments."""

JAX: Final = "jax"
"""Runs a script in JAX once on each node, which uses ``tessera.jax`` and can run most plans."""

ALPA: Final = "alpa"
"""Runs a script of Alpa 0.2.3, which sees all nodes as one Ray cluster, with the plan as its options."""

FAIL_AT: Final = "fail-at"
"""The only command of a replayed job, for testing failures.

``fail-at N`` fails once N iterations are done.
"""

MAX_DIGITS: Final = 15
"""Digits of N in ``fail-at N``."""


def fail_at(command: Sequence[str], field: str = "command") -> int | None:
    """Return the iteration at which ``command`` asks a replayed job to fail, or None.

    Raises:
        InvalidInput: the replay runtime does not know such a command.
    """
    if not command:
        return None
    if len(command) == 2 and command[0] == FAIL_AT and _is_count(command[1]):
        return int(command[1])
    raise InvalidInput(
        field,
        f"the replay runtime trains nothing, so it cannot run {_shown(command)}; submit the job with the"
        f" runtime {COMMAND!r}, or without a command",
    )


def _check_replayed(field: str, command: Sequence[str]) -> None:
    fail_at(command, field)


def _check_task(field: str, command: Sequence[str]) -> None:
    if len(command) != 1:
        raise InvalidInput(field, "must be one word, the name of the profiling task")


def _check_program(field: str, command: Sequence[str]) -> None:
    if not command or not command[0]:
        raise InvalidInput(field, "must name the program to run")


def _check_script(field: str, command: Sequence[str]) -> None:
    if not command or not command[0]:
        raise InvalidInput(field, "must name the script to run, e.g. train.py, or -m and a module")
    if command[0] in ("-m", "--module") and len(command) < 2:
        raise InvalidInput(field, "must name the module after -m")


def _refuse_nothing(_plan: ExecutionPlan) -> str:
    return ""


def _refuse_all_but_data_parallel(plan: ExecutionPlan) -> str:
    """Return why DDP and FSDP2 cannot run ``plan``, or ""."""
    if plan.pipeline_degree > 1:
        return f"has {plan.pipeline_degree} pipeline stages, and data parallelism has one"
    (stage, *_) = plan.stages
    if (stage.tp, stage.ep, stage.cp) != (1, 1, 1):
        return "divides tensors, experts or sequences, and data parallelism divides only samples"
    if plan.offload is not Offload.NONE:
        return "offloads, and the training script would have to do that itself"
    return ""


def _refuse_for_deepspeed(plan: ExecutionPlan) -> str:
    """Return why DeepSpeed's ZeRO cannot run ``plan``, or ""."""
    if plan.pipeline_degree > 1:
        return f"has {plan.pipeline_degree} pipeline stages, and ZeRO has one"
    (stage, *_) = plan.stages
    if (stage.tp, stage.ep, stage.cp) != (1, 1, 1):
        return "divides tensors, experts or sequences, and ZeRO divides only samples and states"
    if plan.offload is not Offload.NONE and plan.zero is ZeroStage.NONE:
        return "offloads undivided states, and DeepSpeed offloads from ZeRO stage 1"
    if plan.recomputation is Recomputation.SELECTIVE:
        return "recomputes attention alone, which DeepSpeed's configuration cannot state"
    if plan.precision is Precision.FP8:
        return "computes in fp8, which DeepSpeed's configuration cannot state"
    return ""


def _refuse_for_megatron(plan: ExecutionPlan) -> str:
    """Return why Megatron-LM cannot run ``plan``, or ""."""
    if len({stage.parallelism for stage in plan.stages}) > 1:
        return "has stages of different parallelism, and Megatron-LM has one for all"
    if divide_blocks(plan) is None:
        return "divides the model's blocks in a way for which Megatron-LM has no argument"
    if plan.schedule is Schedule.GPIPE and plan.pipeline_degree > 1:
        return "has the schedule GPipe, and Megatron-LM has 1F1B"
    if plan.zero not in (ZeroStage.NONE, ZeroStage.OPTIMIZER):
        return (
            f"has ZeRO stage {plan.zero.value}, and Megatron-LM's distributed optimizer is stage 1"
        )
    if plan.offload is not Offload.NONE and plan.zero is ZeroStage.NONE:
        return "offloads undivided states, and Megatron-LM offloads from ZeRO stage 1"
    return ""


def _refuse_for_jax(plan: ExecutionPlan) -> str:
    """Return why ``tessera.jax`` cannot run ``plan``, or ""."""
    if any(stage.cp > 1 for stage in plan.stages):
        return "divides sequences within attention (cp), which tessera.jax cannot"
    if plan.precision not in (Precision.F32, Precision.BF16):
        return f"computes in {plan.precision}, and tessera.jax in f32 or bf16"
    if plan.pipeline_degree > 1 and len(plan.shape) > 1:
        return "has pipeline stages on several nodes, and tessera.jax runs those on one"
    for stage in plan.stages:
        on_replicas = stage.dp % stage.ep == 0
        on_all = stage.ep % stage.dp == 0 and stage.tp % (stage.ep // stage.dp) == 0
        if not (on_replicas or on_all):
            return (
                f"divides experts over {stage.ep} GPUs, which do not form whole parts of"
                f" {stage.dp} x {stage.tp}"
            )
    return ""


def _refuse_for_alpa(plan: ExecutionPlan) -> str:
    """Return why Alpa 0.2.3 cannot run ``plan``, or ""."""
    if any(stage.ep > 1 or stage.cp > 1 or stage.sp for stage in plan.stages):
        return "states how experts or sequences are divided, which Alpa decides itself"
    if plan.zero is ZeroStage.OPTIMIZER:
        return "has ZeRO stage 1, and Alpa divides the optimizer's states only with the gradients"
    if plan.zero is ZeroStage.PARAMETERS and any(stage.tp > 1 for stage in plan.stages):
        return "has ZeRO stage 3 and divides tensors, and Alpa's stage 3 divides only samples"
    if plan.offload is not Offload.NONE:
        return "offloads, which Alpa cannot"
    if plan.schedule is Schedule.INTERLEAVED:
        return "has an interleaved schedule, and Alpa has 1F1B and GPipe"
    if plan.recomputation is Recomputation.SELECTIVE:
        return "recomputes attention alone, and Alpa recomputes whole layers"
    if plan.precision is Precision.FP8:
        return "computes in fp8, which is newer than Alpa"
    return refuse_nodes([stage.gpus for stage in plan.stages], plan.shape) if plan.shape else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """A runtime's abilities, by which servers judge jobs before they are queued.

    ``check_command`` raises InvalidInput for a command that the runtime cannot run, naming the
    field it is given. ``refuse_plan`` returns why the runtime cannot run an execution plan, as the
    end of a sentence that begins with the plan, or "" if it can. ``trains`` is true if the runtime
    trains the job's model. ``ranks_are_gpus`` is true if there is a rank for each GPU, and false if
    there is one for each node. ``is_for_users`` is true if a job may name the runtime.
    """

    trains: bool
    check_command: Callable[[str, Sequence[str]], None]
    refuse_plan: Callable[[ExecutionPlan], str] = _refuse_nothing
    runs_any_plan: bool = True
    """Whether ``refuse_plan`` never refuses, so that nobody has to ask."""
    pipelines: bool = True
    """Whether it can run plans of several pipeline stages. If not, ``refuse_plan`` refuses them all,
    so that a Cell of several stages is refused even if its plan was not recorded."""
    ranks_are_gpus: bool = False
    is_for_users: bool = True
    last_rank_reports: bool = False
    """Whether its programs print their progress on the last rank, and checkpoints on the first one."""
    tunes: bool = False
    """Whether its programs can try execution plans at launch and report the one they run by."""


RUNTIMES: Final[dict[str, Capabilities]] = {
    REPLAY: Capabilities(trains=False, check_command=_check_replayed),
    PROFILER: Capabilities(trains=False, check_command=_check_task, is_for_users=False),
    COMMAND: Capabilities(trains=True, check_command=_check_program),
    TORCHRUN: Capabilities(
        trains=True,
        check_command=_check_script,
        refuse_plan=_refuse_all_but_data_parallel,
        runs_any_plan=False,
        pipelines=False,
        ranks_are_gpus=True,
    ),
    DEEPSPEED: Capabilities(
        trains=True,
        check_command=_check_script,
        refuse_plan=_refuse_for_deepspeed,
        runs_any_plan=False,
        pipelines=False,
        ranks_are_gpus=True,
    ),
    MEGATRON: Capabilities(
        trains=True,
        check_command=_check_script,
        refuse_plan=_refuse_for_megatron,
        runs_any_plan=False,
        ranks_are_gpus=True,
        last_rank_reports=True,
    ),
    JAX: Capabilities(
        trains=True,
        check_command=_check_script,
        refuse_plan=_refuse_for_jax,
        runs_any_plan=False,
        tunes=True,
    ),
    ALPA: Capabilities(
        trains=True,
        check_command=_check_script,
        refuse_plan=_refuse_for_alpa,
        runs_any_plan=False,
    ),
}
"""The runtimes of this release, by name."""

RESTRICTED_RUNTIMES: Final = tuple(
    name for name, runtime in RUNTIMES.items() if not runtime.runs_any_plan
)
"""The runtimes that cannot run every execution plan."""


def implied_runtime(command: Sequence[str]) -> str:
    """Return the runtime of a job that names none: one that replays unless it has a program."""
    return COMMAND if command and command[0] != FAIL_AT else REPLAY


DEFAULT_RUNTIME: Final = REPLAY
"""The runtime of gangs that name none."""


def is_training(reported: str, requested: str) -> bool:
    """Return whether times from the runtime ``reported`` were measured on a job that trains.

    If the agent does not name a runtime (""), the one that the server requested counts. A runtime
    that this release does not know counts as one that does not train,
    because nothing is called measured that may not have been.
    """
    runtime = RUNTIMES.get(reported or requested)
    return runtime is not None and runtime.trains


def _is_count(text: str) -> bool:
    """Return whether ``text`` is a whole number of a size that iterations can have."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _shown(command: Sequence[str]) -> str:
    text = " ".join(command)
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
