"""Arguments of programs that use ``tessera.jax``: one process on each node, for all of its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.runtimes import JAX
from tessera.service.agent.keeper.spec import LaunchArguments
from tessera.service.agent.runtimes.arguments.layout import RankLayout, check_plan, read_program
from tessera.service.agent.runtimes.arguments.words import fill_words


def jax_arguments(
    layout: RankLayout, command: Sequence[str], plan: ExecutionPlan | None, global_batch: int
) -> LaunchArguments:
    """Return the command that starts a script on a node, and where the nodes meet.

    The script reads the plan by ``tessera.jax``. Its own words may have place holders, too.

    Raises:
        InvalidInput: the command, the plan or a place holder cannot be used.
    """
    check_plan(JAX, layout, plan, global_batch)
    if plan is not None and plan.pipeline_degree > 1 and layout.nodes > 1:
        raise InvalidInput(
            "plan",
            f"has {plan.pipeline_degree} pipeline stages on {layout.nodes} nodes, and tessera.jax"
            " runs those on one; state a plan of one stage, or request fewer GPUs",
        )
    program = read_program(JAX, command)
    module = ("-m",) if program.is_module else ()
    filled = replace(program, arguments=fill_words(program.arguments, plan))
    return LaunchArguments(
        argv=(layout.python, "-u", *module, filled.name, *filled.arguments),
        environment=coordinator_variables(layout),
    )


def coordinator_variables(layout: RankLayout) -> dict[str, str]:
    """Return the variable by which the processes of several nodes find the first one."""
    if layout.nodes == 1:
        return {}
    address = f"[{layout.address}]" if ":" in layout.address else layout.address
    return {"TESSERA_COORDINATOR": f"{address}:{layout.port}"}
