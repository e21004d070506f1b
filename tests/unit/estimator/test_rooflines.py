from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.estimator.graph import Graph
from tessera.estimator.hardware import A40
from tessera.estimator.plans import Training
from tessera.estimator.rooflines import DEFAULT_RATES, RooflineCompute, RooflinePart, RooflineRates
from tessera.formulation.base.errors import TesseraError
from tests.support.estimates import a_graph, a_layer

TRAINING = Training(global_batch=16)


def rates_with(**given: Any) -> RooflineRates:
    plain = {"utilisation": 0.5, "half_rows": 0.0, "memory_utilisation": 0.8, "launch_s": 0.0}
    return RooflineRates(**(plain | given))


def forward_s(graph: Graph, samples: float = 8.0, tp: int = 1, **given: Any) -> float:
    compute = RooflineCompute(hardware=A40, rates={graph.dtype: rates_with(**given)})
    forward, _ = compute.layer_s(graph, TRAINING, np.array([samples]), np.array([tp]))
    return float(forward[0, 0])


BUSY = a_graph(a_layer(flops=1e12, touched=0.0, weights=0.0))
IDLE = a_graph(a_layer(flops=0.0, touched=1e8, weights=1e8))


def test_compute_bound_layers_take_their_flops_at_the_utilised_peak() -> None:
    assert forward_s(BUSY) == pytest.approx(8e12 / (0.5 * A40.fp16_flops))


def test_memory_bound_layers_read_weights_once_and_activations_for_each_sample() -> None:
    bytes_ = 2 * (1e8 + 8 * 1e8)
    assert forward_s(IDLE) == pytest.approx(bytes_ / (0.8 * A40.memory_bytes_per_s))
    assert forward_s(IDLE, tp=4) == pytest.approx(forward_s(IDLE) / 4)


def test_products_and_memory_traffic_do_not_overlap() -> None:
    both = a_graph(a_layer(flops=1e12, touched=1e8, weights=1e8))
    assert forward_s(both) == pytest.approx(forward_s(BUSY) + forward_s(IDLE))


def test_a_product_over_half_saturating_rows_reaches_half_the_rate() -> None:
    rows = 8.0 * 10  # each weight is used at ten positions of each of 8 samples
    product = a_graph(a_layer(flops=2e9 * 10, touched=0.0, weights=1e9))
    weights_s = 2e9 / (0.8 * A40.memory_bytes_per_s)
    whole = forward_s(product) - weights_s
    assert forward_s(product, half_rows=rows) - weights_s == pytest.approx(2 * whole)
    assert forward_s(product, half_rows=rows / 99) - weights_s == pytest.approx(whole / 0.99)


def test_replicas_share_samples_but_not_the_loss_of_small_products() -> None:
    product = a_graph(a_layer(flops=1e12, touched=0.0, weights=1e8))
    lost = [
        forward_s(product, samples, tp, half_rows=100.0) - forward_s(product, samples, tp)
        for samples, tp in ((8.0, 1), (4.0, 1), (8.0, 2))
    ]
    assert lost == pytest.approx([lost[0], lost[0], lost[0] / 2])


def test_kernels_without_products_have_no_saturation_loss() -> None:
    assert forward_s(IDLE, half_rows=1e6) == forward_s(IDLE)


def test_every_kernel_has_a_launch_time_however_small_it_is() -> None:
    nothing = a_graph(a_layer(flops=0.0, touched=0.0, weights=0.0, kernels=7.0))
    assert forward_s(nothing, launch_s=5e-6) == pytest.approx(35e-6)


def test_at_least_one_of_many_experts_is_read() -> None:
    experts = a_graph(a_layer(flops=0.0, touched=0.0, weights=0.0, expert_weights=8e8, experts=8.0))
    assert forward_s(experts) == pytest.approx(2 * 1e8 / (0.8 * A40.memory_bytes_per_s))


def test_the_backward_pass_takes_twice_the_forward_pass_by_default() -> None:
    compute = RooflineCompute(hardware=A40)
    forward, backward = compute.layer_s(a_graph(), TRAINING, np.array([1.0, 2.0]), np.array([1, 2]))
    assert forward.shape == backward.shape == (2, 4)
    assert backward == pytest.approx(2 * forward)


def test_the_parts_of_a_layer_add_up_and_each_is_timed_separately() -> None:
    whole, at = RooflineCompute(hardware=A40), (np.array([1.0, 4.0]), np.array([1, 2]))
    parts = [RooflinePart(whole=whole, part=p).layer_s(a_graph(), TRAINING, *at) for p in range(4)]
    for direction, total in enumerate(whole.layer_s(a_graph(), TRAINING, *at)):
        assert sum(part[direction] for part in parts) == pytest.approx(total)
    assert all((part[0] > 0).all() for part in parts)


@pytest.mark.parametrize(
    "given", [{"utilisation": 0.0}, {"utilisation": 1.1}, {"half_rows": -1.0}, {"launch_s": -1.0}]
)
def test_impossible_rates_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(TesseraError):
        rates_with(**given)


def test_there_are_rates_for_every_type_of_graph() -> None:
    for dtype in ("f32", "bf16", "f16"):
        assert dtype in DEFAULT_RATES
