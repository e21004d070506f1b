from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.estimator.architectures.parts import loss_part
from tessera.estimator.graph import graph_of
from tessera.estimator.hardware import A40, GIB
from tessera.estimator.memory import (
    FUSED,
    MemoryCopies,
    Overflow,
    States,
    UsableMemory,
    in_flight,
    largest_overflow,
    limit_bytes,
    memory_bytes,
    parameter_bytes,
)
from tessera.estimator.plans import Candidates, Shape, StageCosts, Training
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.execution_plan import Schedule
from tests.support.estimates import FlatNetwork, a_graph, a_layer, stage_costs

TRAINING = Training(global_batch=64)


def two_halves(training: Training = TRAINING) -> StageCosts:
    """Return the costs of two stages of two layers, and of one of all four layers, each on one GPU."""
    rows = {"start": [0, 2, 0], "end": [2, 4, 4], "dp": [1] * 3, "tp": [1] * 3, "ep": [1] * 3}
    candidates = Candidates(
        **{f: np.array(v, dtype=np.int64) for f, v in rows.items()}, sp=np.zeros(3, dtype=bool)
    )
    return stage_costs(
        a_graph(*[a_layer(weights=5e8)] * 4),
        training,
        A40,
        Shape(nodes=1, gpus_per_node=2),
        candidates,
        RooflineCompute(hardware=A40),
        FlatNetwork(),
    )


def find_overflow(
    costs: StageCosts,
    rows: Sequence[int],
    flights: Ints,
    memory: float,
    room: UsableMemory | None = None,
) -> Overflow | None:
    """Return the stage of a plan that exceeds the limit most. If the plan fits, return None.

    ``rows`` are the candidates of the stages in order. ``flights`` are the numbers of micro-batches
    in flight of each stage.
    """
    stages = np.asarray(rows, dtype=np.int64)
    parts = {
        "states": costs.state_bytes[stages],
        "activations in flight": costs.flight_bytes[stages] * flights,
        "working activations": costs.working_bytes[stages],
    }
    memory_bytes = sum(parts.values(), np.full(len(stages), (room or UsableMemory()).context_bytes))
    return largest_overflow(parts, memory_bytes, limit_bytes(memory, room))


@pytest.mark.parametrize(
    ("dtype", "copies", "expected"),
    [
        ("bf16", MemoryCopies(), 12),
        ("bf16", FUSED, 8),
        ("f32", MemoryCopies(), 12),
        ("f32", FUSED, 12),
    ],
)
def test_a_loss_holds_its_values_and_two_gradients_in_32_bits_unless_it_is_fused(
    dtype: str, copies: MemoryCopies, expected: float
) -> None:
    logits = 8 * 1_000
    layer = loss_part(8, 1_000, dtype).layer("loss", boundary=0.0, tensor_limit=1.0)
    one = {name: np.array([1]) for name in ("end", "dp", "tp", "ep")}
    costs = stage_costs(
        graph_of("loss", dtype, [layer]),
        Training(global_batch=4, micro_batches=1),
        A40,
        Shape(nodes=1, gpus_per_node=1),
        Candidates(start=np.array([0]), sp=np.array([False]), **one),
        RooflineCompute(hardware=A40),
        FlatNetwork(),
        copies=copies,
    )
    held = costs.flight_bytes + costs.working_bytes
    assert held.tolist() == [expected * 4 * logits]


def test_1f1b_keeps_fewer_micro_batches_the_later_the_stage() -> None:
    assert in_flight(Schedule.ONE_F_ONE_B, 4, 16).tolist() == [4, 3, 2, 1]
    assert in_flight(Schedule.ONE_F_ONE_B, 4, 2).tolist() == [2, 2, 2, 1]
    assert in_flight(Schedule.GPIPE, 4, 16).tolist() == [16] * 4


def test_memory_is_the_sum_of_states_activations_in_flight_working_memory_and_context() -> None:
    costs, room = two_halves(), UsableMemory(context_bytes=7.0)
    memory = memory_bytes(costs, 3, room)
    parts = costs.state_bytes + 3 * costs.flight_bytes + costs.working_bytes
    assert memory == pytest.approx(parts + 7.0)
    assert costs.state_bytes.tolist() == [16e9, 16e9, 32e9]


def test_a_plan_that_fits_has_no_overflow() -> None:
    assert (
        find_overflow(two_halves(), [0, 1], in_flight(Schedule.ONE_F_ONE_B, 2, 16), 48 * GIB)
        is None
    )


def test_an_overflowing_plan_names_its_stage_and_the_memory_parts() -> None:
    flights = in_flight(Schedule.ONE_F_ONE_B, 2, 16)
    overflow = find_overflow(two_halves(), [0, 1], flights, 16 * GIB)
    assert overflow is not None
    assert overflow.stage == 0
    assert overflow.limit_bytes == pytest.approx(limit_bytes(16 * GIB))
    assert overflow.needed_bytes == pytest.approx(memory_bytes(two_halves(), 2)[0])
    assert overflow.largest == "states"
    assert str(overflow).startswith("stage 0 needs")
    assert "states alone need 14.9 GiB" in str(overflow)


def test_gpipe_overflows_where_1f1b_fits() -> None:
    costs = two_halves(replace(TRAINING, global_batch=512))
    flights = {s: in_flight(s, 2, 16) for s in Schedule}
    assert find_overflow(costs, [0, 1], flights[Schedule.ONE_F_ONE_B], 40 * GIB) is None
    overflow = find_overflow(costs, [0, 1], flights[Schedule.GPIPE], 40 * GIB)
    assert overflow is not None
    assert overflow.largest == "activations in flight"


def test_states_too_small_for_a_weight_and_its_gradient_are_refused() -> None:
    with pytest.raises(TesseraError, match="weight and gradient alone need 4 in f16"):
        parameter_bytes(a_graph(), replace(TRAINING, state_bytes=3.0))


def test_there_is_no_fourth_stage_of_zero() -> None:
    with pytest.raises(TesseraError, match="0 to 3"):
        States(zero=4)
