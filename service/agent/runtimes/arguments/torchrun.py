"""Arguments of PyTorch's launcher, ``torchrun``, from release 2.0 on.

Nodes may have different numbers of GPUs: torchrun adds them up when its nodes meet
(``_assign_worker_ranks`` in ``torch/distributed/elastic/agent/server/api.py``), unless a variable
says that they are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.runtimes import TORCHRUN
from tessera.service.agent.keeper.spec import LaunchArguments
from tessera.service.agent.runtimes.arguments.layout import (
    PythonProgram,
    RankLayout,
    check_plan,
    read_program,
)
from tessera.service.agent.runtimes.arguments.words import fill_words


def torchrun_arguments(
    layout: RankLayout, command: Sequence[str], plan: ExecutionPlan | None, global_batch: int
) -> LaunchArguments:
    """Return the command that starts torchrun on a node.

    The script sees the plan in its own words, where these have place holders, and in the file of
    TESSERA_PLAN_FILE.

    Raises:
        InvalidInput: the command, the plan or a place holder cannot be used.
    """
    check_plan(TORCHRUN, layout, plan, global_batch)
    program = read_program(TORCHRUN, command)
    filled = replace(program, arguments=fill_words(program.arguments, plan))
    return LaunchArguments(
        argv=launcher_words(layout, filled), environment=launcher_variables(layout)
    )


def launcher_words(layout: RankLayout, program: PythonProgram) -> tuple[str, ...]:
    """Return torchrun with a program. A gang that fails is started again by Tessera alone.

    torchrun takes all but the first word of a program for templates (``string.Template``), so that
    ``$$`` would reach the program as ``$``. Words are escaped, and reach it as they are written.
    """
    address = f"[{layout.address}]" if ":" in layout.address else layout.address
    first, *words = program.command(layout)
    return (
        layout.python,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(layout.nodes),
        "--node-rank",
        str(layout.node_rank),
        "--nproc-per-node",
        str(layout.node_gpus),
        "--master-addr",
        address,
        "--master-port",
        str(layout.port),
        "--max-restarts",
        "0",
        "--no-python",
        first,
        *(word.replace("$", "$$") for word in words),
    )


def launcher_variables(layout: RankLayout) -> dict[str, str]:
    """Return the variables that torchrun reads."""
    variables = {}
    if len(set(layout.member_gpus)) > 1:  # otherwise ranks would be counted wrongly
        variables["TORCH_ELASTIC_WORKER_IDENTICAL"] = "0"
    if layout.stop_grace_s > 0:  # its own default is 30 s, after which it kills
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(layout.stop_grace_s))
    return variables
