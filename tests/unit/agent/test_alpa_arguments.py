"""Plans in Alpa's own options, and the gangs and plans that are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tessera.formulation.runtimes import ALPA, RUNTIMES
from tessera.formulation.submeshes import slice_nodes
from tessera.service.agent.runtimes.arguments.alpa import (
    REPORT_PREFIX,
    RUNNER,
    alpa_arguments,
    alpa_document,
)
from tessera.service.agent.runtimes.arguments.layout import RankLayout
from tests.support.alpa_image.alpa_record import signature_of
from tests.support.execution_plans import execution_plans
from tests.support.laws import examples

SCRIPT = "train.py"


def a_layout(*gpus: int, node_rank: int = 0) -> RankLayout:
    """Return nodes with these numbers of GPUs."""
    return RankLayout(
        node_rank=node_rank,
        member_gpus=gpus,
        address="10.0.0.1",
        port="29500",
        python="/opt/alpa/bin/python",
    )


def a_plan(*degrees: tuple[int, int], layers: int = 2, **changes: Any) -> ExecutionPlan:
    """Return a plan with a stage for each pair of ``dp`` and ``tp``, for a batch of 16."""
    stages = tuple(
        PlanStage(start=layers * i, end=layers * (i + 1), dp=dp, tp=tp)
        for i, (dp, tp) in enumerate(degrees)
    )
    values: dict[str, Any] = {"stages": stages, "micro_batch": 8, "accumulation": 2}
    return ExecutionPlan(**(values | changes))


def method_of(layout: RankLayout, plan: ExecutionPlan | None) -> dict[str, Any]:
    arguments = alpa_arguments(layout, (SCRIPT,), plan, 16)
    method: dict[str, Any] = json.loads(arguments.stdin)["method"]
    return method


def test_the_runner_gets_the_plan_on_its_standard_input() -> None:
    plan = a_plan((2, 2))
    arguments = alpa_arguments(a_layout(4), ("-m", "lab.train", "--tp", "{plan.tp}"), plan, 16)
    assert arguments.argv == (
        *("/opt/alpa/bin/python", "-u", RUNNER, "-m", "lab.train", "--tp", "2"),
    )
    assert arguments.report_prefix == REPORT_PREFIX
    document = json.loads(arguments.stdin)
    assert document["plan"] == json.loads(plan.to_json())
    assert document["cluster"] == {"num_nodes": 1, "num_devices_per_node": 4}


def test_the_runner_exists_and_begins_its_reports_with_the_prefix() -> None:
    assert f'REPORT = "{REPORT_PREFIX}"' in Path(RUNNER).read_text()


def test_a_plan_of_one_stage_is_a_logical_mesh() -> None:
    assert method_of(a_layout(4), a_plan((2, 2))) == {
        "kind": "ShardParallel",
        "num_micro_batches": 2,
        "logical_shape": [2, 2],
        "auto_sharding_option": {
            "force_batch_dim_to_mesh_dim": 0,
            "prefer_reduce_scatter": False,
        },
    }


def test_a_plan_of_unequal_stages_keeps_each_stages_layers_gpus_and_degrees() -> None:
    plan = a_plan((4, 1), (1, 2), (2, 1), zero=ZeroStage.GRADIENTS, schedule=Schedule.GPIPE)
    method = method_of(a_layout(8), plan)
    assert method["pipeline_schedule"] == "gpipe"
    assert method["num_micro_batches"] == 2
    assert method["layer_option"] == {"remat_layer": False}
    assert method["stage_option"] == {
        "forward_stage_layer_ids": [[0, 1], [2, 3], [4, 5]],
        "submesh_physical_shapes": [[1, 4], [1, 2], [1, 2]],
        "submesh_logical_shapes": [[4, 1], [1, 2], [2, 1]],
        "submesh_autosharding_option_dicts": [
            {"force_data_parallel": True, "prefer_reduce_scatter": True},
            {"force_batch_dim_to_mesh_dim": 0, "prefer_reduce_scatter": True},
            {"force_data_parallel": True, "prefer_reduce_scatter": True},
        ],
    }


def test_stages_on_several_nodes_get_whole_nodes_or_parts_of_one() -> None:
    method = method_of(a_layout(4, 4, 4, node_rank=1), a_plan((2, 1), (8, 1), (1, 2)))
    assert method["stage_option"]["submesh_physical_shapes"] == [[1, 2], [2, 4], [1, 2]]


def test_one_stage_that_computes_layers_again_is_a_pipeline_of_one() -> None:
    method = method_of(a_layout(4, 4), a_plan((4, 2), recomputation=Recomputation.FULL))
    assert method["kind"] == "PipeshardParallel"
    assert method["layer_option"] == {"remat_layer": True}
    assert method["stage_option"]["submesh_physical_shapes"] == [[2, 4]]
    assert method["stage_option"]["submesh_logical_shapes"] == [[4, 2]]


def test_zero_3_is_alpas_own() -> None:
    method = method_of(a_layout(4), a_plan((4, 1), zero=ZeroStage.PARAMETERS))
    assert method["auto_sharding_option"] == {"force_zero_stage_3": True}


@examples(300)
@given(execution_plans(), st.sampled_from([1, 2, 4]))
def test_every_plan_is_refused_or_stated_in_options_that_alpa_takes(
    plan: ExecutionPlan, nodes: int
) -> None:
    gpus = plan.gpus
    if RUNTIMES[ALPA].refuse_plan(plan) or gpus % nodes:
        return
    layout = a_layout(*[gpus // nodes] * nodes)
    sizes = [stage.gpus for stage in plan.stages]
    if slice_nodes(sizes, nodes, gpus // nodes) is None:
        assert nodes > 1  # parts of one node always fit
        with pytest.raises(InvalidInput, match="largest stage first"):
            alpa_arguments(layout, (SCRIPT,), plan, plan.global_batch)
        return
    arguments = alpa_arguments(layout, (SCRIPT,), plan, plan.global_batch)
    method = json.loads(arguments.stdin)["method"]
    options = method.get("stage_option", {}).get("submesh_autosharding_option_dicts", [])
    for values in (*options, method.get("auto_sharding_option", {})):
        signature_of("AutoShardingOption").bind(**values)
    if method["kind"] == "ShardParallel":
        assert method["logical_shape"] == [plan.stages[0].dp, plan.stages[0].tp]
        return
    signature_of("ManualLayerOption").bind(**method["layer_option"])
    signature_of("ManualStageOption").bind(**method["stage_option"])
    stages = method["stage_option"]
    assert list(chain(*stages["forward_stage_layer_ids"])) == list(range(plan.layers))
    shapes = zip(stages["submesh_physical_shapes"], stages["submesh_logical_shapes"], strict=True)
    for (hosts, devices), (dp, tp) in shapes:
        assert hosts * devices == dp * tp


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (a_plan((4, 1), zero=ZeroStage.OPTIMIZER), "ZeRO stage 1"),
        (a_plan((2, 2), zero=ZeroStage.PARAMETERS), "ZeRO stage 3 and divides tensors"),
        (a_plan((4, 1), zero=ZeroStage.GRADIENTS, offload=Offload.OPTIMIZER), "offloads"),
        (a_plan((4, 1), recomputation=Recomputation.SELECTIVE), "recomputes attention alone"),
        (a_plan((4, 1), precision=Precision.FP8), "fp8"),
        (
            a_plan((1, 1), (1, 1), (1, 1), (1, 1), schedule=Schedule.INTERLEAVED, chunks=2),
            "interleaved",
        ),
        (a_plan((4, 1), (2, 1), shape=(4, 2)), "different numbers of GPUs"),
        (a_plan((2, 3), (2, 1), shape=(4, 4)), "stages of 6, 2 GPUs on 2 nodes of 4"),
    ],
)
def test_a_plan_that_alpa_cannot_run_is_refused(plan: ExecutionPlan, problem: str) -> None:
    assert problem in RUNTIMES[ALPA].refuse_plan(plan)


@pytest.mark.parametrize("stage", [{"ep": 2}, {"cp": 2}, {"tp": 2, "sp": True}])
def test_a_division_that_alpa_decides_itself_is_refused(stage: dict[str, Any]) -> None:
    plan = ExecutionPlan(stages=(PlanStage(start=0, end=3, **({"dp": 2} | stage)),), micro_batch=2)
    assert "which Alpa decides itself" in RUNTIMES[ALPA].refuse_plan(plan)


@pytest.mark.parametrize(
    ("gpus", "plan", "problem"),
    [
        ((4, 2), None, "different numbers of GPUs"),
        ((2, 2), a_plan((3, 1), (1, 1), micro_batch=24), "stages of 3, 1 GPUs on 2 nodes of 2"),
        ((8,), a_plan((4, 1)), "is for 4 GPUs, but the gang has 8"),
    ],
)
def test_a_gang_that_does_not_fit_is_refused(
    gpus: Sequence[int], plan: ExecutionPlan | None, problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        alpa_arguments(a_layout(*gpus), (SCRIPT,), plan, plan.global_batch if plan else 16)


def test_without_a_plan_alpa_chooses() -> None:
    document = alpa_document(a_layout(4, 4), None)
    assert document["method"]["kind"] == "ShardParallel"
    assert document["method"]["auto_sharding_option"] == {}
    assert document["plan"] is None
