"""Arguments of jobs that train by Alpa 0.2.3: the runner, and the plan in Alpa's own options.

The document of the runner's standard input has keywords of Alpa's classes as they are named there,
so that the runner (``service/agent/programs/alpa_runner.py``) decides nothing. A stage of ``dp`` x
``tp`` GPUs becomes a logical mesh of that shape, whose first axis divides samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Recomputation,
    ZeroStage,
)
from tessera.formulation.job.runtimes import ALPA
from tessera.formulation.job.submeshes import refuse_nodes, slice_nodes
from tessera.service.agent.keeper.spec import LaunchArguments
from tessera.service.agent.runtimes.arguments.layout import RankLayout, check_plan, read_program
from tessera.service.agent.runtimes.arguments.words import fill_words

RUNNER: Final = str(Path(__file__).parents[2] / "programs" / "alpa_runner.py")
"""The program that drives Alpa. It is started by path, and never imported."""

REPORT_PREFIX: Final = "@tessera-report "
"""The beginning of a line in which the runner reports."""


def alpa_arguments(
    layout: RankLayout, command: Sequence[str], plan: ExecutionPlan | None, global_batch: int
) -> LaunchArguments:
    """Return the command that starts the runner on a node, with the plan on its standard input.

    Raises:
        InvalidInput: the command, the plan, the nodes or a place holder cannot be used.
    """
    check_plan(ALPA, layout, plan, global_batch)
    sizes = [layout.gpus] if plan is None else [stage.gpus for stage in plan.stages]
    if problem := refuse_nodes(sizes, layout.member_gpus):
        raise InvalidInput("plan", f"{problem}; state another plan, or request other GPUs")
    program = read_program(ALPA, command)
    module = ("-m",) if program.is_module else ()
    words = fill_words(program.arguments, plan)
    document = alpa_document(layout, plan)
    return LaunchArguments(
        argv=(layout.python, "-u", RUNNER, *module, program.name, *words),
        stdin=json.dumps(document, sort_keys=True) + "\n",
        report_prefix=REPORT_PREFIX,
    )


def alpa_document(layout: RankLayout, plan: ExecutionPlan | None) -> dict[str, Any]:
    """Return the document for the runner. The nodes of the layout fit the plan."""
    return {
        "method": _method_options(layout, plan),
        "cluster": {"num_nodes": layout.nodes, "num_devices_per_node": layout.node_gpus},
        "plan": None if plan is None else json.loads(plan.to_json()),
    }


def _method_options(layout: RankLayout, plan: ExecutionPlan | None) -> dict[str, Any]:
    if plan is None:
        return {
            "kind": "ShardParallel",
            "num_micro_batches": None,
            "logical_shape": None,
            "auto_sharding_option": {},
        }
    if plan.pipeline_degree > 1 or plan.recomputation is Recomputation.FULL:
        return _pipeline_options(layout, plan)
    (stage,) = plan.stages
    return {
        "kind": "ShardParallel",
        "num_micro_batches": plan.accumulation if plan.accumulation > 1 else None,
        "logical_shape": [stage.dp, stage.tp],
        "auto_sharding_option": sharding_options(stage, plan.zero),
    }


def _pipeline_options(layout: RankLayout, plan: ExecutionPlan) -> dict[str, Any]:
    """Return the options of stages. Only they can have layers computed again, one stage included."""
    sizes = [stage.gpus for stage in plan.stages]
    shapes = slice_nodes(sizes, layout.nodes, layout.node_gpus)
    if shapes is None:
        raise InvalidInput("plan", refuse_nodes(sizes, layout.member_gpus))
    return {
        "kind": "PipeshardParallel",
        "num_micro_batches": plan.accumulation,
        "pipeline_schedule": plan.schedule.value,
        "default_auto_sharding_option": {},
        "layer_option": {"remat_layer": plan.recomputation is Recomputation.FULL},
        "stage_option": {
            "forward_stage_layer_ids": [list(range(s.start, s.end)) for s in plan.stages],
            "submesh_physical_shapes": [list(shape) for shape in shapes],
            "submesh_logical_shapes": [[stage.dp, stage.tp] for stage in plan.stages],
            "submesh_autosharding_option_dicts": [
                sharding_options(stage, plan.zero) for stage in plan.stages
            ],
        },
    }


def sharding_options(stage: PlanStage, zero: ZeroStage) -> dict[str, Any]:
    """Return the options by which Alpa divides a stage as the plan says.

    Alpa's ZeRO-2 prefers to scatter gradients when it reduces them. Its ZeRO-3 implies that only
    samples are divided, which ``force_data_parallel`` forces otherwise.
    """
    if zero is ZeroStage.PARAMETERS:
        return {"force_zero_stage_3": True}
    scatters = zero is ZeroStage.GRADIENTS
    if stage.tp == 1:
        return {"force_data_parallel": True, "prefer_reduce_scatter": scatters}
    return {"force_batch_dim_to_mesh_dim": 0, "prefer_reduce_scatter": scatters}
