"""The memory that a pipeline degree lacks: the exact number of bytes with which it would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera.estimator.architectures.published import find_published
from tessera.estimator.cells import MicroBatches, Setting, degrees_of, micro_batches_of, plan_cells
from tessera.estimator.collectives import LinkNetwork
from tessera.estimator.hardware import A10, A100, Hardware
from tessera.estimator.memory import States, UsableMemory
from tessera.estimator.missing_plans import explain_missing_degrees
from tessera.estimator.plans import Shape, Training
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.execution_plan import Schedule
from tests.support.estimates import a_graph, a_layer


def a_setting(model: str, params: str, hardware: Hardware, nodes: int) -> Setting:
    known, shape = find_published(model, params), Shape(nodes=nodes, gpus_per_node=2)
    setting = Setting(
        graph=known.graph,
        training=known.training,
        hardware=hardware,
        shape=shape,
        compute=RooflineCompute(hardware=hardware),
        network=LinkNetwork(hardware=hardware, shape=shape),
    )
    return replace(setting, runtime=replace(setting.runtime, states=States(zero=known.zero)))


def with_memory(setting: Setting, usable_bytes: float) -> Setting:
    memory = round(usable_bytes / UsableMemory().usable)
    return replace(setting, hardware=replace(setting.hardware, memory_bytes=memory))


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("model", "params", "nodes"), [("bert", "6.7B", 2), ("moe", "10B", 1), ("wide_resnet", "4B", 1)]
)
def test_a_degree_fits_with_the_reported_memory_but_not_with_a_thousandth_less(
    model: str, params: str, nodes: int, checkpointing: bool, schedule: Schedule
) -> None:
    setting = a_setting(model, params, A10, nodes)
    training = replace(setting.training, checkpointing=checkpointing, schedule=schedule)
    setting = with_memory(replace(setting, training=training), 10 * 2**30)
    degrees = degrees_of(2 * nodes)
    shortfalls = explain_missing_degrees(setting, degrees, plan_cells(setting, degrees))
    assert shortfalls
    for degree, miss in shortfalls.items():
        assert miss is not None
        assert miss.needed_bytes > miss.limit_bytes
        assert degree in plan_cells(with_memory(setting, 1.0001 * miss.needed_bytes), degrees)
        assert degree not in plan_cells(with_memory(setting, 0.999 * miss.needed_bytes), degrees)


def test_with_searched_micro_batches_the_count_with_least_memory_is_reported() -> None:
    rule, shape = MicroBatches.SEARCHED, Shape(nodes=1, gpus_per_node=4)
    setting = Setting(
        graph=a_graph(*(a_layer(tensor_limit=1.0),) * 4),
        hardware=A10,
        shape=shape,
        training=Training(global_batch=8),
        compute=RooflineCompute(hardware=A10),
        network=LinkNetwork(hardware=A10, shape=shape),
    )
    tight = with_memory(setting, 2**30)
    shortfalls = explain_missing_degrees(tight, [1, 2, 4], plan_cells(tight, [1, 2, 4], rule), rule)
    assert list(shortfalls) == [1, 2, 4]
    # with one stage, eight micro-batches leave replicas without samples
    for degree, miss in shortfalls.items():
        assert miss is not None
        enough = with_memory(setting, 1.0001 * miss.needed_bytes)
        assert degree in plan_cells(enough, [degree], rule)
        less = with_memory(setting, 0.999 * miss.needed_bytes)
        assert degree not in plan_cells(less, [degree], rule)


def test_a_fitting_degree_is_not_reported_as_missed() -> None:
    setting = a_setting("bert", "1.3B", A100, 1)
    known = plan_cells(setting)
    assert list(known) == [1, 2]
    assert explain_missing_degrees(setting, [1, 2], known) == {}


def test_more_stages_than_layers_are_not_reported_as_lack_of_memory() -> None:
    setting = a_setting("moe", "690M", A100, 8)
    assert explain_missing_degrees(setting, degrees_of(16), plan_cells(setting)) == {16: None}


def test_micro_batch_counts_follow_their_rule() -> None:
    training = Training(global_batch=24, micro_batches=6)
    assert micro_batches_of(None, 4, training) == 6
    assert micro_batches_of(MicroBatches.STAGES, 4, training) == 4
    assert micro_batches_of(MicroBatches.FOUR_STAGES, 8, training) == 24
    assert micro_batches_of(MicroBatches.SEARCHED, 1, training) == 16
