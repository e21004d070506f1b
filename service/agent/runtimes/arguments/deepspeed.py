"""Arguments of DeepSpeed's launcher, and its configuration from an execution plan.

The launcher is ``deepspeed.launcher.launch``, which the program ``deepspeed`` starts on each node.
That program is left out. It drops CUDA_VISIBLE_DEVICES, needs a file of hosts for several nodes,
passes no signal on, and reports success if a signal ended what it started.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan, Offload, Precision, Recomputation
from tessera.formulation.job.runtimes import DEEPSPEED
from tessera.service.agent.keeper.spec import FILES, LaunchArguments
from tessera.service.agent.runtimes.arguments.layout import (
    PythonProgram,
    RankLayout,
    check_plan,
    read_program,
)
from tessera.service.agent.runtimes.arguments.words import fill_words

CONFIGURATION: Final = "deepspeed.json"
"""The name of the generated file. A command refers to it by ``{files}/deepspeed.json``."""

_OPTION: Final = "--deepspeed_config"
_OFFLOADS: Final = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params")
_PRECISIONS: Final = ("bf16", "bfloat16", "fp16", "torch_autocast")
_CPU: Final = {"device": "cpu", "pin_memory": True}


def deepspeed_arguments(
    layout: RankLayout,
    command: Sequence[str],
    plan: ExecutionPlan | None,
    global_batch: int,
    configuration: Mapping[str, Any] | None = None,
) -> LaunchArguments:
    """Return the command that starts DeepSpeed's launcher on a node.

    ``configuration`` is the content of the file that the command names (``find_configuration``), or
    None. The plan's values replace its own. A script gets the generated file where its command has
    ``{files}/deepspeed.json``, in place of its own file, or by ``--deepspeed --deepspeed_config``
    at the end. Without a plan, the command stays as it is.

    Raises:
        InvalidInput: the command, the plan, the configuration or a place holder cannot be used.
    """
    check_plan(DEEPSPEED, layout, plan, global_batch)
    program = read_program(DEEPSPEED, command)
    place = f"{FILES}/{CONFIGURATION}"
    own, words = find_configuration(program.arguments), fill_words(program.arguments, plan)
    is_placed = any(place in word for word in words)
    if own is not None and plan is not None:
        if configuration is None:
            raise InvalidInput(
                "command",
                f"names the configuration {own[:80]}, which could not be read; write {place} in its place,"
                " and state what it says in the script",
            )
        words = tuple(_renamed(word, own, place) for word in words)
    elif plan is not None and not is_placed:
        words = (*words, "--deepspeed", _OPTION, place)
    files = {}
    if plan is not None or is_placed:
        settings = deepspeed_configuration(plan, global_batch, configuration or {})
        files[CONFIGURATION] = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    return LaunchArguments(
        argv=_launcher_words(layout, replace(program, arguments=words)), files=files
    )


def find_configuration(words: Sequence[str]) -> str | None:
    """Return the configuration file that a command names itself, or None.

    It is the value of ``--deepspeed_config``, or of ``--deepspeed``, as Hugging Face's Trainer has
    it.
    """
    for option in (_OPTION, "--deepspeed-config", "--deepspeed"):
        values = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
        after = [value for word, value in pairwise(words) if word == option]
        values += [value for value in after if not value.startswith("-")]
        for value in values:
            if not value.startswith(FILES) and value.endswith(".json"):
                return value
    return None


def deepspeed_configuration(
    plan: ExecutionPlan | None, global_batch: int, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration ``own`` with the values of a plan, and with the global batch.

    What a plan does not decide, such as the optimizer, stays as it is.

    Raises:
        InvalidInput: a section of ``own`` is not an object, or without a plan it has another batch.
    """
    settings = dict(own)
    if plan is None:
        stated = settings.setdefault("train_batch_size", global_batch)
        if stated not in (global_batch, "auto"):
            raise InvalidInput(
                "train_batch_size", f"is {stated}, but the job's global batch is {global_batch}"
            )
        return settings
    (stage, *_) = plan.stages
    settings |= {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch // stage.dp,
        "gradient_accumulation_steps": plan.accumulation,
    }
    settings["zero_optimization"] = _zero_section(plan, _section(own, "zero_optimization"))
    for name in _PRECISIONS:
        settings.pop(name, None)
    for name, precision in (("bf16", Precision.BF16), ("fp16", Precision.F16)):
        is_on = plan.precision is precision
        settings[name] = {**(_section(own, name) if is_on else {}), "enabled": is_on}
    activations = _section(own, "activation_checkpointing")
    activations.pop("number_checkpoints", None)
    if plan.recomputation is Recomputation.FULL:
        activations["number_checkpoints"] = plan.layers
    settings.pop("activation_checkpointing", None)
    return settings | ({"activation_checkpointing": activations} if activations else {})


def _zero_section(plan: ExecutionPlan, own: Mapping[str, Any]) -> dict[str, Any]:
    section = {name: value for name, value in own.items() if name not in _OFFLOADS}
    section["stage"] = plan.zero.value
    if plan.offload is not Offload.NONE:
        section["offload_optimizer"] = dict(_CPU)
    if plan.offload is Offload.PARAMETERS:
        section["offload_param"] = dict(_CPU)
    return section


def _section(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = own.get(name, {})
    if not isinstance(section, Mapping):
        raise InvalidInput(name, "must be an object in DeepSpeed's configuration")
    return dict(section)


def _renamed(word: str, own: str, place: str) -> str:
    option, equals, value = word.partition("=")
    if word == own:
        return place
    return f"{option}={place}" if equals and value == own else word


def _launcher_words(layout: RankLayout, program: PythonProgram) -> tuple[str, ...]:
    """Return the launcher with a program.

    The launcher sets CUDA_VISIBLE_DEVICES to this node's part of ``--world_info``. Of other nodes
    it needs only the number of GPUs. Ranks find their local rank in LOCAL_RANK.
    """
    world: dict[str, list[str]] = {
        f"node-{rank}": [str(gpu) for gpu in range(gpus)]
        for rank, gpus in enumerate(layout.member_gpus)
    }
    if layout.devices:
        world[f"node-{layout.node_rank}"] = list(layout.devices)
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return (
        layout.python,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={encoded}",
        f"--node_rank={layout.node_rank}",
        f"--master_addr={layout.address}",
        f"--master_port={layout.port}",
        "--no_python",
        "--no_local_rank",
        *program.command(layout),
    )
