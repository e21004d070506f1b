"""The traffic of execution plans: bytes of small plans computed by hand, and senders and receivers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tessera.estimator.architectures.published import published_models
from tessera.estimator.cells import Setting, data_sheet_setting, execution_plan_of, plan_cells
from tessera.estimator.hardware import CATALOGUE
from tessera.estimator.memory import States
from tessera.estimator.plans import Shape
from tessera.estimator.traffic import traffic_of
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
    Schedule,
    ZeroStage,
)
from tessera.formulation.state.traffic import CellTraffic, Pattern, StageTraffic, parse_cell_traffic

A100 = next(kind for kind in CATALOGUE if kind.name == "a100")
BERT = published_models()["bert", "1.3B"]


BATCH = 256


def a_setting(zero: int = 0) -> Setting:
    training = BERT.training.at(BATCH)
    return data_sheet_setting(
        BERT.graph, training, A100, Shape(nodes=2, gpus_per_node=4), States(zero=zero)
    )


def one_stage(setting: Setting, *, dp: int, tp: int, ep: int = 1) -> ExecutionPlan:
    """Return an execution plan with one stage of all layers."""
    return ExecutionPlan(
        stages=(PlanStage(start=0, end=len(setting.graph), dp=dp, tp=tp, ep=ep),),
        micro_batch=setting.training.micro_batch,
        accumulation=setting.training.micro_batches,
        zero=ZeroStage(setting.runtime.states.zero),
        recomputation=setting.training.recomputation,
        precision=Precision(setting.graph.dtype),
    )


def plans_of(setting: Setting, degrees: list[int]) -> dict[ExecutionPlan, float]:
    """Return the plans of pipeline degrees with their times."""
    plans = plan_cells(setting, degrees).values()
    return {execution_plan_of(setting, plan): plan.iter_time_s for plan in plans}


def traffic(setting: Setting, plan: ExecutionPlan) -> CellTraffic:
    """Return the traffic of a plan that does not divide sequences."""
    cell = traffic_of(setting, plan)
    assert cell is not None
    return cell


def test_replicas_send_twice_their_gradients_less_their_own_share() -> None:
    setting = a_setting()
    found = traffic(setting, one_stage(setting, dp=8, tp=1)).stages[0]
    parameter_bytes = setting.graph.parameters * setting.graph.element_bytes
    assert found.data[0] == pytest.approx(2 * parameter_bytes * 7 / 8)
    assert found.data[1] == 2 * 7
    assert (found.tensor, found.pipeline) == ((0.0, 0), (0.0, 0))


def test_zero_3_gathers_weights_before_each_pass_and_reduces_gradients_after_it() -> None:
    plain, zero = a_setting(), a_setting(zero=3)
    sent = [traffic(each, one_stage(each, dp=8, tp=1)).stages[0].data[0] for each in (plain, zero)]
    training = plain.training
    rounds = training.micro_batches * (1 + training.forwards + 1)
    assert sent[1] / sent[0] == pytest.approx(rounds / 2)


def test_work_does_not_depend_on_the_plan_and_communication_starts_during_compute() -> None:
    setting = a_setting()
    plans = plans_of(setting, [1, 2, 4])
    found = [traffic(setting, plan) for plan in plans]
    assert len({round(each.work_flop) for each in found}) == 1
    assert found[0].work_flop == pytest.approx(
        (setting.training.forwards + 2) * setting.graph.flops.sum() * BATCH
    )
    assert all(0 <= each.start_s <= each.compute_s for each in found)
    for cell, time_s in zip(found, plans.values(), strict=True):
        assert cell.compute_s <= time_s * (1 + 1e-9)
        assert cell.gpus == 8


def test_only_gradients_wait_for_the_last_backward_pass() -> None:
    setting = a_setting()
    data = traffic(setting, one_stage(setting, dp=8, tp=1))
    tensor = traffic(setting, one_stage(setting, dp=1, tp=8))
    assert data.start_s > 0.5 * data.compute_s
    assert tensor.start_s == 0


def test_chunks_of_layers_are_joined_in_their_stages() -> None:
    setting = a_setting()
    whole = one_stage(setting, dp=8, tp=1)
    ends = [0, 7, 13, 19, len(setting.graph)]
    stages = tuple(PlanStage(start=a, end=b, dp=2, tp=2) for a, b in pairwise(ends))
    plan = replace(whole, stages=stages, chunks=2, schedule=Schedule.INTERLEAVED)
    cell = traffic(setting, plan)
    assert [stage.gpus for stage in cell.stages] == [4, 4]
    assert cell.work_flop == pytest.approx(traffic(setting, whole).work_flop)


def test_traffic_inside_divided_sequences_is_not_known() -> None:
    setting = a_setting()
    stage = PlanStage(start=0, end=len(setting.graph), dp=4, tp=1, cp=2)
    plan = replace(one_stage(setting, dp=8, tp=1), stages=(stage,))
    assert traffic_of(setting, plan) is None


def test_a_plan_that_cannot_run_has_no_traffic() -> None:
    setting = a_setting()
    with pytest.raises(InvalidInput, match="the model has no experts") as refused:
        traffic_of(setting, one_stage(setting, dp=8, tp=1, ep=2))
    assert refused.value.field == "stages[0].ep"


def test_ranks_are_ordered_by_stage_replica_and_tensor_part() -> None:
    stage = StageTraffic(dp=2, tp=2, tensor=(1.0, 1), data=(2.0, 2), pipeline=(3.0, 4))
    last = StageTraffic(dp=2, tp=2, tensor=(5.0, 1))
    cell = CellTraffic(work_flop=1.0, compute_s=1.0, start_s=0.5, stages=(stage, last))
    found = {
        (each.pattern, each.sent_bytes): each.members.tolist() for each in cell.traffic().exchanges
    }
    assert found == {
        (Pattern.RING, 1.0): [[0, 1], [2, 3]],
        (Pattern.RING, 2.0): [[0, 2], [1, 3]],
        (Pattern.CHAIN, 3.0): [[0, 4], [1, 5], [2, 6], [3, 7]],
        (Pattern.RING, 5.0): [[4, 5], [6, 7]],
    }


def test_written_traffic_reads_back() -> None:
    setting = a_setting()
    for plan in plans_of(setting, [1, 2, 4]):
        cell = traffic(setting, plan)
        assert parse_cell_traffic(cell.to_json()) == cell


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"work_flop":1,"compute_s":1,"start_s":2,"stages":[{"dp":1,"tp":1}]}',
        '{"work_flop":1,"compute_s":1,"start_s":0,"stages":[{"dp":1,"tp":1,"data":[1]}]}',
        '{"work_flop":1,"compute_s":1,"start_s":0,"stages":[{"dp":1,"tp":1,"what":1}]}',
        '{"work_flop":NaN,"compute_s":1,"start_s":0,"stages":[{"dp":1,"tp":1}]}',
    ],
)
def test_malformed_traffic_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_cell_traffic(text)


def test_a_smaller_stage_splits_its_traffic_over_several_partners() -> None:
    stage = StageTraffic(dp=2, tp=1, pipeline=(4.0, 1))
    cell = CellTraffic(
        work_flop=1.0, compute_s=1.0, start_s=0.0, stages=(stage, StageTraffic(dp=4, tp=1))
    )
    (chain,) = cell.traffic().exchanges
    assert chain.members.tolist() == [[0, 2], [0, 3], [1, 4], [1, 5]]
    assert chain.sent_bytes * len(chain.members) == 2 * 4.0


def test_expert_traffic_goes_to_every_other_gpu_of_its_group() -> None:
    stage = StageTraffic(dp=4, tp=1, ep=2, expert=(1.0, 2), expert_data=(7.0, 2))
    cell = CellTraffic(work_flop=1.0, compute_s=1.0, start_s=0.0, stages=(stage,))
    found = {each.pattern: each.members.tolist() for each in cell.traffic().exchanges}
    assert found == {Pattern.RING: [[0, 2], [1, 3]], Pattern.ALL: [[0, 1], [2, 3]]}


@pytest.mark.parametrize(
    "stages", [(), (StageTraffic(dp=0, tp=1),), (StageTraffic(dp=2, tp=1, ep=3),)]
)
def test_invalid_stages_are_refused(stages: tuple[StageTraffic, ...]) -> None:
    with pytest.raises(InvalidInput):
        CellTraffic(work_flop=1.0, compute_s=1.0, start_s=0.0, stages=stages)


def test_traffic_of_all_the_gpus_of_a_job_is_finite_for_every_model() -> None:
    for key, model in published_models().items():
        training = model.training.at(max(64, model.training.micro_batches))
        shape = Shape(nodes=4, gpus_per_node=8)
        setting = data_sheet_setting(model.graph, training, A100, shape, States(zero=model.zero))
        for plan in plans_of(setting, [1, 4]):
            cell = traffic(setting, plan)
            sent = [each.sent_bytes for each in cell.traffic().exchanges]
            assert np.isfinite(sent).all(), key
            assert cell.gpus == 32
