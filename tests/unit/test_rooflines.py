from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from estimator.graph import Graph
from estimator.hardware import A40
from estimator.plans import Training
from estimator.rooflines import DEFAULT_RATES, Rates, RooflineCompute
from formulation.errors import TesseraError
from tests.support.estimates import a_graph, a_layer

TRAINING = Training(global_batch=16)


def rates(**given: Any) -> Rates:
    plain = {
        "utilisation": 0.5, "half_flops": 0.0, "memory_utilisation": 0.8, "launch_s": 0.0,
        "serial": 0.0,
    }  # fmt: skip
    return Rates(**(plain | given))


def forward_s(graph: Graph, samples: float = 8.0, tp: int = 1, **given: Any) -> float:
    compute = RooflineCompute(hardware=A40, rates={graph.dtype: rates(**given)})
    forward, _ = compute.layer_s(graph, TRAINING, np.array([samples]), np.array([tp]))
    return float(forward[0, 0])


BUSY = a_graph(a_layer(flops=1e12, touched=0.0, weights=0.0))
IDLE = a_graph(a_layer(flops=0.0, touched=1e8, weights=1e8))


def test_busy_layers_take_their_flops_at_the_peak_used() -> None:
    assert forward_s(BUSY) == pytest.approx(8e12 / (0.5 * A40.fp16_flops))


def test_idle_layers_take_their_traffic_weights_once_and_activations_of_each_sample() -> None:
    bytes_ = 2 * (1e8 + 8 * 1e8)
    assert forward_s(IDLE) == pytest.approx(bytes_ / (0.8 * A40.memory_bytes_per_s))
    assert forward_s(IDLE, tp=4) == pytest.approx(forward_s(IDLE) / 4)


def test_the_lesser_hides_but_for_its_serial_share() -> None:
    both = a_graph(a_layer(flops=1e12, touched=1e8, weights=1e8))
    greater, lesser = forward_s(BUSY), forward_s(IDLE)
    assert greater > lesser
    assert forward_s(both) == pytest.approx(greater)
    assert forward_s(both, serial=0.5) == pytest.approx(greater + lesser / 2)


def test_a_kernel_of_half_saturating_work_reaches_half_the_rate() -> None:
    whole = forward_s(BUSY)
    assert forward_s(BUSY, half_flops=8e12 / 10) == pytest.approx(2 * whole)  # ten kernels
    assert forward_s(BUSY, half_flops=8e12 / 10 / 99) == pytest.approx(whole / 0.99)


def test_kernels_without_products_have_nothing_to_saturate() -> None:
    assert forward_s(IDLE, half_flops=1e15) == forward_s(IDLE)


def test_every_kernel_is_launched_however_small() -> None:
    nothing = a_graph(a_layer(flops=0.0, touched=0.0, weights=0.0, kernels=7.0))
    assert forward_s(nothing, launch_s=5e-6) == pytest.approx(35e-6)


def test_of_many_experts_one_at_least_is_read() -> None:
    experts = a_graph(a_layer(flops=0.0, touched=0.0, weights=0.0, expert_weights=8e8, experts=8.0))
    assert forward_s(experts) == pytest.approx(2 * 1e8 / (0.8 * A40.memory_bytes_per_s))


def test_backward_is_twice_forward_by_default() -> None:
    compute = RooflineCompute(hardware=A40)
    forward, backward = compute.layer_s(a_graph(), TRAINING, np.array([1.0, 2.0]), np.array([1, 2]))
    assert forward.shape == backward.shape == (2, 4)
    assert backward == pytest.approx(2 * forward)


def test_scaled_rates_take_so_many_times_as_long() -> None:
    plain = rates(launch_s=5e-6)
    slower = plain.scaled(compute=2.0, memory=3.0, launch=4.0)
    for graph, times in ((BUSY, 2.0), (IDLE, 3.0)):
        before, after = (
            RooflineCompute(hardware=A40, rates={"f16": r}).layer_s(
                graph, TRAINING, np.array([8.0]), np.array([1])
            )[0][0, 0]
            for r in (rates(), slower.scaled(launch=0.0))
        )
        assert after == pytest.approx(times * before)
    assert slower.launch_s == pytest.approx(20e-6)
    assert plain.scaled(compute=0.1).utilisation == 1.0


@pytest.mark.parametrize(
    "given", [{"utilisation": 0.0}, {"utilisation": 1.1}, {"serial": 2.0}, {"launch_s": -1.0}]
)
def test_impossible_rates_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(TesseraError):
        rates(**given)


def test_there_are_rates_for_every_type_of_graph() -> None:
    for dtype in ("f32", "bf16", "f16"):
        assert dtype in DEFAULT_RATES
