"""The template of each runtime that runs programs: from a gang and its plan to arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.runtimes import ALPA, COMMAND, DEEPSPEED, JAX, MEGATRON, TORCHRUN
from tessera.service.agent.keeper.spec import LaunchArguments
from tessera.service.agent.runtimes.arguments.alpa import alpa_arguments
from tessera.service.agent.runtimes.arguments.deepspeed import deepspeed_arguments
from tessera.service.agent.runtimes.arguments.jax import jax_arguments
from tessera.service.agent.runtimes.arguments.layout import RankLayout
from tessera.service.agent.runtimes.arguments.megatron import megatron_arguments
from tessera.service.agent.runtimes.arguments.torchrun import torchrun_arguments
from tessera.service.agent.runtimes.arguments.words import fill_words

Template = Callable[[RankLayout, Sequence[str], ExecutionPlan | None, int], LaunchArguments]
"""A function of the layout, the job's command, its plan (or None) and its global batch."""


def command_arguments(
    _layout: RankLayout, command: Sequence[str], plan: ExecutionPlan | None, _global_batch: int
) -> LaunchArguments:
    """Return the job's own command, with the plan's values in its place holders.

    Raises:
        InvalidInput: a place holder is unknown, or the gang has no plan.
    """
    return LaunchArguments(argv=fill_words(command, plan))


TEMPLATES: Final[Mapping[str, Template]] = {
    COMMAND: command_arguments,
    TORCHRUN: torchrun_arguments,
    DEEPSPEED: deepspeed_arguments,
    MEGATRON: megatron_arguments,
    JAX: jax_arguments,
    ALPA: alpa_arguments,
}
"""The templates by runtime."""
