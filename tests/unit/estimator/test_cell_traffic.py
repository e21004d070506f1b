"""The traffic of execution plans: bytes of small plans computed by hand, and senders and receivers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.estimator.architectures.published import published_models
from tessera.estimator.cells import Setting, data_sheet_setting, plan_cells
from tessera.estimator.hardware import CATALOGUE
from tessera.estimator.memory import States
from tessera.estimator.plans import PricedPlan, Shape
from tessera.estimator.traffic import traffic_of
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import PlanStage
from tessera.formulation.network.traffic import (
    CellTraffic,
    Pattern,
    StageTraffic,
    parse_cell_traffic,
)

A100 = next(kind for kind in CATALOGUE if kind.name == "a100")
BERT = published_models()["bert", "1.3B"]


BATCH = 256


def a_setting(zero: int = 0) -> Setting:
    training = BERT.training.at(BATCH)
    return data_sheet_setting(
        BERT.graph, training, A100, Shape(nodes=2, gpus_per_node=4), States(zero=zero)
    )


def one_stage(setting: Setting, *, dp: int, tp: int) -> PricedPlan:
    """Return an execution plan with one stage of all layers."""
    stage = PlanStage(start=0, end=len(setting.graph), dp=dp, tp=tp)
    return PricedPlan(
        stages=(stage,),
        micro_batches=setting.training.micro_batches,
        iter_time_s=1.0,
        memory_bytes=(0.0,),
        merged_layers=16,
    )


def test_replicas_send_twice_their_gradients_less_their_own_share() -> None:
    setting = a_setting()
    found = traffic_of(setting, one_stage(setting, dp=8, tp=1)).stages[0]
    parameter_bytes = setting.graph.parameters * setting.graph.element_bytes
    assert found.data[0] == pytest.approx(2 * parameter_bytes * 7 / 8)
    assert found.data[1] == 2 * 7
    assert (found.tensor, found.handed) == ((0.0, 0), (0.0, 0))


def test_zero_3_gathers_weights_before_each_pass_and_reduces_gradients_after_it() -> None:
    plain, zero = a_setting(), a_setting(zero=3)
    sent = [
        traffic_of(each, one_stage(each, dp=8, tp=1)).stages[0].data[0] for each in (plain, zero)
    ]
    training = plain.training
    rounds = training.micro_batches * (1 + training.forwards + 1)
    assert sent[1] / sent[0] == pytest.approx(rounds / 2)


def test_work_does_not_depend_on_the_plan_and_communication_starts_during_compute() -> None:
    setting = a_setting()
    plans = plan_cells(setting, [1, 2, 4])
    found = [traffic_of(setting, plan) for plan in plans.values()]
    assert len({round(each.work_flop) for each in found}) == 1
    assert found[0].work_flop == pytest.approx(
        (setting.training.forwards + 2) * setting.graph.flops.sum() * BATCH
    )
    assert all(0 <= each.start_s <= each.compute_s for each in found)
    for each, plan in zip(found, plans.values(), strict=True):
        assert each.compute_s <= plan.iter_time_s * (1 + 1e-9)
        assert each.gpus == 8


def test_only_gradients_wait_for_the_last_backward_pass() -> None:
    setting = a_setting()
    data = traffic_of(setting, one_stage(setting, dp=8, tp=1))
    tensor = traffic_of(setting, one_stage(setting, dp=1, tp=8))
    assert data.start_s > 0.5 * data.compute_s
    assert tensor.start_s == 0


def test_plans_made_together_with_deeper_ones_have_the_same_work() -> None:
    setting = a_setting()
    (usual,), (finer, *_) = (plan_cells(setting, asked).values() for asked in ([1], [1, 20]))
    assert (usual.merged_layers, finer.merged_layers) == (16, 20)
    work = [traffic_of(setting, plan).work_flop for plan in (usual, finer)]
    assert work[0] == pytest.approx(work[1])


def test_a_plan_that_cannot_run_has_no_traffic() -> None:
    setting = a_setting()
    narrow = replace(setting, training=setting.training.within(BATCH // 4))
    with pytest.raises(InvalidInput, match="cannot run"):
        traffic_of(narrow, one_stage(narrow, dp=8, tp=1))


def test_ranks_are_ordered_by_stage_replica_and_tensor_part() -> None:
    stage = StageTraffic(dp=2, tp=2, tensor=(1.0, 1), data=(2.0, 2), handed=(3.0, 4))
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
    for plan in plan_cells(setting, [1, 2, 4]).values():
        traffic = traffic_of(setting, plan)
        assert parse_cell_traffic(traffic.to_json()) == traffic


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
    stage = StageTraffic(dp=2, tp=1, handed=(4.0, 1))
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
        for plan in plan_cells(setting, [1, 4]).values():
            cell = traffic_of(setting, plan)
            sent = [each.sent_bytes for each in cell.traffic().exchanges]
            assert np.isfinite(sent).all(), key
            assert cell.gpus == 32
