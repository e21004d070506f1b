"""The published equations of reconfigurable training, compared with values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.estimator.hardware import A800, V100
from tessera.estimator.reconfiguration.appendix import (
    AppendixParameters,
    appendix_iteration_s,
    backward_s,
    combine_overlapping,
    compute_and_sync_s,
    data_comm_s,
    optimizer_s,
    pipeline_comm_s,
    raw_offload_s,
    tensor_comm_s,
    update_and_offload_s,
)
from tessera.estimator.reconfiguration.configurations import MachineRates, scaled_forward_s
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ZeroStage
from tests.support.configurations import a_configuration, a_table, a_transformer, an_offloaded


def some_parameters(**fields: float) -> AppendixParameters:
    given = {
        "backward_ratio": 2.0,
        "sync_overlap": 2.0,
        "update_s_per_parameter": 5e-11,
        "host_update_s_per_parameter": 4e-9,
        "offload_overlap": 1.0,
        "swap_overlap": 1.0,
        "constant_s": 0.01,
    }
    return AppendixParameters(**(given | fields))


def test_overlapping_parts_take_between_the_longer_one_and_the_sum() -> None:
    x, y = np.array([3.0, 0.0, 1e-200]), np.array([4.0, 0.0, 1e-200])

    assert combine_overlapping(x, y, 1.0) == pytest.approx(x + y)
    assert combine_overlapping(x, y, 2.0)[:2] == pytest.approx([5.0, 0.0])
    assert combine_overlapping(x, y, 100.0)[0] == pytest.approx(4.0)
    assert combine_overlapping(x, y, 100.0)[2] > 0  # no power underflows


def test_a_forward_pass_is_linear_in_samples_shards_and_layers() -> None:
    assert scaled_forward_s(a_configuration(4)) == pytest.approx(0.04)  # 4 of 16 samples
    assert scaled_forward_s(a_configuration(4, accumulation=2)) == pytest.approx(0.02)
    assert scaled_forward_s(a_configuration(4, tp=4)) == pytest.approx(0.04)
    assert scaled_forward_s(a_configuration(4, forward_s=0.5)) == 0.5


def test_a_pipeline_adds_the_first_micro_batch_on_every_stage() -> None:
    whole = a_configuration(4, pp=4)
    divided = a_configuration(4, pp=4, micro_batches=8)

    assert scaled_forward_s(whole) == pytest.approx(0.16)
    assert scaled_forward_s(divided) == pytest.approx(0.02 / 4 * (8 + 3))


def test_replicas_exchange_twice_the_gradients_over_the_slowest_link() -> None:
    table = a_table(a_configuration(1), a_configuration(4), a_configuration(2, 2))

    # 4 GB of gradients, times 2 (d - 1) / d.
    assert data_comm_s(table) == pytest.approx([0.0, 6e9 / 100e9, 6e9 / 40e9])


def test_replicas_of_a_stage_that_a_node_holds_do_not_use_the_network() -> None:
    inside = a_configuration(4, 4, pp=2, tp=2)
    outside = a_configuration(2, 2, 2, 2, pp=2, tp=2)

    assert data_comm_s(a_table(inside, outside)) == pytest.approx([4e9 / 4 / 100e9, 4e9 / 4 / 40e9])


def test_tensor_parts_reduce_activations_four_times_a_layer() -> None:
    table = a_table(a_configuration(4), a_configuration(4, tp=4), a_configuration(2, 2, tp=4))

    # 4 * 2 * 3 / 4 times 16 * 500 * 1000 * 20 activations of 2 bytes.
    assert tensor_comm_s(table) == pytest.approx([0.0, 1.92e9 / 100e9, 1.92e9 / 40e9])


def test_stages_pass_activations_on_in_both_directions() -> None:
    table = a_table(a_configuration(4), a_configuration(4, pp=4), a_configuration(1, 1, pp=2))

    # 2 p times 16 * 500 * 1000 activations of 2 bytes.
    assert pipeline_comm_s(table) == pytest.approx([0.0, 0.128e9 / 100e9, 0.064e9 / 40e9])


def test_checkpointing_adds_a_forward_pass_to_the_backward_pass() -> None:
    table = a_table(a_configuration(4), a_configuration(4, checkpointing=True))

    assert backward_s(table, some_parameters()) == pytest.approx([0.08, 0.12])


def test_only_the_last_accumulated_pass_overlaps_with_the_synchronisation() -> None:
    table = a_table(a_configuration(4, accumulation=4))

    last_s = (0.02**2 + 0.06**2) ** 0.5
    assert compute_and_sync_s(table, some_parameters()) == pytest.approx(
        [4 * 0.01 + 3 * 0.02 + last_s]
    )


def test_tensor_parts_stages_and_zero_divide_the_optimizer() -> None:
    table = a_table(
        a_configuration(4),
        a_configuration(4, zero=ZeroStage.GRADIENTS),
        a_configuration(8, tp=2, pp=2),
        an_offloaded(4),
    )

    host_s = 4e-9 * 1e9 / (4 * 4)
    assert optimizer_s(table, some_parameters()) == pytest.approx([0.05, 0.0125, 0.0125, host_s])


def test_offloading_moves_a_partition_of_the_parameters() -> None:
    assert raw_offload_s(a_table(a_configuration(4), an_offloaded(4))) == pytest.approx([0.0, 0.05])


def test_offloading_overlaps_with_the_synchronisation_and_with_the_optimizer() -> None:
    table = a_table(an_offloaded(4))

    apart = update_and_offload_s(table, some_parameters())
    together = update_and_offload_s(
        table, some_parameters(offload_overlap=100.0, swap_overlap=100.0)
    )

    assert apart == pytest.approx([(0.06 + 0.05) + (0.25 + 0.05)])
    assert together == pytest.approx([0.06 + 0.25], rel=1e-3)


def test_an_iteration_is_the_sum_of_its_parts() -> None:
    table = a_table(a_configuration(4), an_offloaded(4))
    passes_s = 0.04 + (0.08**2 + 0.06**2) ** 0.5

    assert appendix_iteration_s(table, some_parameters()) == pytest.approx(
        [passes_s + 0.05 + 0.01, passes_s + 0.41 + 0.01]
    )


def test_rates_are_facts_of_the_hardware_catalogue() -> None:
    rates = MachineRates.of(A800)

    assert (rates.intra_bytes_per_s, rates.inter_bytes_per_s) == (200e9, 100e9)
    assert rates.pcie_bytes_per_s == 32e9
    assert rates.ports_per_node == 4
    assert MachineRates.of(V100).pcie_bytes_per_s == 16e9
    assert MachineRates.of(V100).ports_per_node == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dp": 3}, r"has 4 GPUs, but the plan needs pp x tp x dp = 1 x 1 x 3 = 3"),
        ({"offload": True}, "needs a ZeRO stage of at least 1"),
        ({"update_cores": 0.0}, "must be a finite number above 0, not 0"),
        ({"forward_s": float("nan")}, "must be a finite number above 0, not nan"),
        ({"node_gpus": ()}, "at least one GPU on each node"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        a_configuration(4, **fields)


def test_a_model_needs_a_profiled_forward_pass() -> None:
    with pytest.raises(InvalidInput, match="forward_s_per_sample"):
        a_transformer(forward_s_per_sample=0.0)
