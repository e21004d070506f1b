from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.pipeline import Overlap, Pipelines, Transfers, iteration_s
from tessera.formulation.execution_plan import Schedule
from tests.support.laws import examples
from tests.support.oracles.pipeline_events import simulated_s

Passes = list[tuple[float, float]]
seconds = st.floats(0.01, 10.0)
passes = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5)
batches = st.integers(1, 8)


def formula_s(busy: list[float], micro_batches: int, send: list[float] | None = None) -> float:
    row = np.array([busy])
    wires = np.zeros_like(row) if send is None else np.array([send])
    nothing = np.zeros_like(row)
    plans = Pipelines(
        busy_s=row,
        send_s=wires,
        receive_s=nothing,
        backward_s=nothing,
        sync_s=nothing,
        update_s=nothing,
    )
    return float(iteration_s(plans, micro_batches, Overlap(transfers=Transfers.ADDED))[0])


@given(st.lists(seconds, min_size=1, max_size=5), seconds, batches)
@examples(100)
def test_proportional_passes_make_gpipe_exact_and_1f1b_no_longer(
    forward: list[float], ratio: float, micro_batches: int
) -> None:
    backward = [ratio * f for f in forward]
    busy = [f + b for f, b in zip(forward, backward, strict=True)]
    expected = formula_s(busy, micro_batches)
    gpipe = simulated_s(Schedule.GPIPE, forward, backward, micro_batches)
    one_by_one = simulated_s(Schedule.ONE_F_ONE_B, forward, backward, micro_batches)
    assert gpipe == pytest.approx(expected)
    assert one_by_one <= expected * (1 + 1e-9)


@given(passes, batches)
@examples(100)
def test_the_formula_lies_between_the_lower_bound_and_the_time_of_two_phases(
    stages: Passes, micro_batches: int
) -> None:
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    busy = [f + b for f, b in stages]
    least = max(sum(busy[:i]) + micro_batches * own for i, own in enumerate(busy))
    phases = formula_s(forward, micro_batches) + formula_s(backward, micro_batches)
    gpipe = simulated_s(Schedule.GPIPE, forward, backward, micro_batches)
    one_by_one = simulated_s(Schedule.ONE_F_ONE_B, forward, backward, micro_batches)
    assert gpipe == pytest.approx(phases)
    assert least * (1 - 1e-9) <= one_by_one <= gpipe * (1 + 1e-9)
    assert least * (1 - 1e-9) <= formula_s(busy, micro_batches) <= phases * (1 + 1e-9)


@given(passes, batches, st.lists(seconds, min_size=5, max_size=5))
@examples(100)
def test_transfers_without_waiting_cost_gpipe_their_sum(
    stages: Passes, micro_batches: int, wires: list[float]
) -> None:
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    between = wires[: len(stages) - 1]
    plain = simulated_s(Schedule.GPIPE, forward, backward, micro_batches)
    found = simulated_s(Schedule.GPIPE, forward, backward, micro_batches, [*between, 0.0])
    assert found == pytest.approx(plain + 2 * sum(between))
