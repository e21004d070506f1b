"""The published equations of reconfigurable training, their fit, and the pooled model."""

from __future__ import annotations

from dataclasses import replace
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
from tessera.estimator.reconfiguration.configurations import (
    Configuration,
    ConfigurationTable,
    MachineRates,
    scaled_forward_s,
)
from tessera.estimator.reconfiguration.fitting import (
    MeasuredRun,
    check_offloaded,
    check_variety,
    fit_appendix,
    log_error,
    needs_refit,
)
from tessera.estimator.reconfiguration.pooled import (
    POOLED_PARAMETERS,
    passes_s,
    pipeline_s,
    pooled_parts,
    port_bytes_per_s,
    reached_ports,
)
from tessera.estimator.reconfiguration.pooling import choose_runs, fit_pooled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.formulation.job.execution_plan import ZeroStage
from tests.support.configurations import (
    RATES,
    SEVEN,
    TRUE,
    a_configuration,
    a_table,
    a_transformer,
    an_offloaded,
    runs_of,
)


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


UNSEEN = [a_configuration(4), a_configuration(4, 4), an_offloaded(2), an_offloaded(2, 2)]


def test_seven_runs_without_noise_give_the_parameters_back() -> None:
    fit = fit_appendix(runs_of(TRUE, SEVEN))

    assert fit.rmsle < 1e-3
    table = ConfigurationTable.of(UNSEEN)
    assert appendix_iteration_s(table, fit.parameters) == pytest.approx(
        appendix_iteration_s(table, TRUE), rel=0.02
    )
    assert fit.parameters.backward_ratio == pytest.approx(TRUE.backward_ratio, rel=0.05)


def test_a_fit_depends_on_nothing_but_its_runs() -> None:
    runs = runs_of(TRUE, SEVEN)

    assert fit_appendix(runs) == fit_appendix(list(runs))


def test_the_loss_is_the_root_of_the_mean_squared_logarithm() -> None:
    predicted, measured = np.array([np.e, 1.0]), np.array([1.0, 1.0])

    assert log_error(predicted, measured) == pytest.approx(0.5**0.5)


def with_time(run: MeasuredRun, iter_time_s: float) -> MeasuredRun:
    return replace(run, iter_time_s=iter_time_s)


def test_runs_that_are_too_few_say_how_many_are_enough() -> None:
    with pytest.raises(InvalidInput, match=r"has 5 of the 7 measured runs .* measure 2 more"):
        check_variety(runs_of(TRUE, SEVEN[:5]))


def test_runs_of_one_plan_ask_for_another_plan() -> None:
    same = [a_configuration(gpus) for gpus in (1, 2, 4, 8, 16)]
    same += [a_configuration(2, 2), a_configuration(4, 4)]

    with pytest.raises(InvalidInput, match=r"all of the plan dp, .* e\.g\. zero2\+offload"):
        check_variety(runs_of(TRUE, same))


def test_too_few_runs_with_offloading_ask_for_more() -> None:
    runs = runs_of(TRUE, [*SEVEN[:6], a_configuration(2)])

    with pytest.raises(InvalidInput, match=r"has 2 of the 3 runs with ZeRO-Offload .* 1 more"):
        check_offloaded(runs)


@pytest.mark.parametrize("iter_time_s", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_not_positive_are_refused(iter_time_s: float) -> None:
    first, *rest = runs_of(TRUE, SEVEN)
    runs = [with_time(first, iter_time_s), *rest]

    with pytest.raises(InvalidInput, match=r"iter_time_s: must be above 0 s.* dp on 1 GPUs"):
        check_variety(runs)
    with pytest.raises(InvalidInput, match="iter_time_s"):
        fit_pooled(runs)


def test_runs_of_two_models_are_not_fitted_together() -> None:
    other = replace(SEVEN[0], facts=a_transformer(name="other"))

    with pytest.raises(InvalidInput, match="are of m, other"):
        check_variety(runs_of(TRUE, [other, *SEVEN[1:]]))


def test_a_fit_is_repeated_only_when_the_error_passes_the_threshold() -> None:
    assert not needs_refit(0.1)
    assert needs_refit(-0.11)
    assert needs_refit(0.06, threshold=0.05)
    with pytest.raises(InvalidInput, match="threshold"):
        needs_refit(0.1, threshold=0.0)
    with pytest.raises(InvalidInput, match="error"):
        needs_refit(float("nan"))


def pooled_runs(configurations: list[Configuration], **changed: float) -> list[MeasuredRun]:
    """Return runs that take as long as our model says with some of its parameters changed."""
    table = ConfigurationTable.of(configurations)
    values = {
        p.name: np.full(len(configurations), changed.get(p.name, p.value))
        for p in POOLED_PARAMETERS
    }
    parts = pooled_parts(table, values)
    return [
        MeasuredRun(configuration=c, iter_time_s=t, busy_s=b, update_s=u)
        for c, t, b, u in zip(
            configurations,
            parts.iteration_s.tolist(),
            parts.busy_s.tolist(),
            parts.update_s.tolist(),
            strict=True,
        )
    ]


def test_our_model_learns_what_a_model_deviates_in() -> None:
    changed = {"passes_ratio": 5.0, "sync_factor": 0.6, "host_core_s_per_parameter": 8e-9}
    fit = fit_pooled(pooled_runs(SEVEN, **changed))

    truth = [run.iter_time_s for run in pooled_runs(UNSEEN, **changed)]
    assert fit.predict_s(UNSEEN) == pytest.approx(truth, rel=0.05)
    assert fit_pooled([]).predict_s(UNSEEN) != pytest.approx(truth, rel=0.2)


def test_a_model_without_runs_has_what_the_others_share() -> None:
    names = ("a", "b", "c", "d")
    known = [replace(c, facts=a_transformer(name=name)) for name in names for c in SEVEN]
    new = [replace(c, facts=a_transformer(name="new")) for c in UNSEEN]
    truth = np.array([run.iter_time_s for run in pooled_runs(new, port_share=0.3)])

    before = np.abs(fit_pooled([]).predict_s(new) / truth - 1)
    after = np.abs(fit_pooled(pooled_runs(known, port_share=0.3)).predict_s(new) / truth - 1)

    assert 2 * after.max() < before.max()


def test_one_run_that_went_wrong_hardly_changes_the_others() -> None:
    runs = pooled_runs(SEVEN)
    wrong = [*runs[:-1], with_time(runs[-1], 3 * runs[-1].iter_time_s)]

    plain = [a_configuration(4), a_configuration(4, 4)]
    assert fit_pooled(wrong).predict_s(plain) == pytest.approx(
        fit_pooled(runs).predict_s(plain), rel=0.05
    )


def test_a_group_of_replicas_reaches_the_ports_near_its_own_gpus() -> None:
    table = a_table(
        a_configuration(8, 8),
        a_configuration(3, 5),
        a_configuration(1, 1),
        a_configuration(8, 8, tp=4),
        a_configuration(4, 4, tp=4),
        a_configuration(6, 6, tp=4, pp=1, dp=3),
    )

    assert reached_ports(table) == pytest.approx([4, 2, 1, 1, 0.5, 0.5])


CHOICES = [*SEVEN, *UNSEEN, a_configuration(2), a_configuration(1, 1), an_offloaded(1, 1)]


def test_seven_different_runs_are_chosen_with_three_offloaded() -> None:
    chosen = choose_runs(CHOICES)

    assert len(set(chosen)) == 7
    assert sum(CHOICES[i].offload for i in chosen) >= 3
    assert chosen == choose_runs(CHOICES)
    check_variety(runs_of(TRUE, [CHOICES[i] for i in chosen]))


def test_fewer_offloaded_runs_are_chosen_where_there_are_no_more() -> None:
    plain = [c for c in CHOICES if not c.offload]

    assert len(choose_runs([*plain, an_offloaded(8)])) == 7


def test_too_few_choices_ask_for_more() -> None:
    with pytest.raises(InvalidInput, match="has 3 configurations, but 7 are to be measured"):
        choose_runs(CHOICES[:3])


def values_of(**changed: float) -> dict[str, Floats]:
    """Return the usual values of the parameters, apart from those that are given."""
    usual = {parameter.name: parameter.value for parameter in POOLED_PARAMETERS}
    return {name: np.array([value]) for name, value in (usual | changed).items()}


def pipeline_seconds(*node_gpus: int, **changed: float) -> float:
    """Return the seconds that a pipeline of one GPU for each stage takes to pass activations on."""
    table = a_table(a_configuration(*node_gpus, pp=sum(node_gpus)))
    return float(pipeline_s(table, values_of(**changed))[0])


def test_only_boundaries_between_nodes_use_the_network() -> None:
    table = a_table(a_configuration(4, pp=4))
    values = values_of(handover_s=0.0)
    bytes_passed = 2 * 2 * 16 * 500 * 1000 * values["pipeline_factor"][0]
    inside_s = bytes_passed / (values["intra_share"][0] * RATES.intra_bytes_per_s)
    outside_s = bytes_passed / port_bytes_per_s(table, values)[0]

    one, two, four = (
        pipeline_seconds(*nodes, handover_s=0.0) for nodes in ((4,), (2, 2), (1, 1, 1, 1))
    )

    assert one == pytest.approx(3 * inside_s)
    assert two == pytest.approx(2 * inside_s + outside_s)
    assert four == pytest.approx(3 * outside_s)


def test_stages_wait_for_each_other_at_each_boundary() -> None:
    without, waiting = (pipeline_seconds(4, handover_s=s) for s in (0.0, 0.02))

    assert waiting - without == pytest.approx(3 * 0.02)
    assert pipeline_seconds(1, handover_s=0.02) == 0.0


@pytest.mark.parametrize(
    ("fields", "ratio"),
    [
        ({"tp": 4}, 5.0),
        ({}, 1.0),  # plain replicas
        ({"tp": 4, "forward_s": 0.04}, 1.0),  # a stated time is that of the runtime itself
    ],
)
def test_the_other_runtime_launches_more_slowly(fields: dict[str, float], ratio: float) -> None:
    table: ConfigurationTable = a_table(a_configuration(4, **fields))

    base, slow = (
        float(passes_s(table, values_of(runtime_launch_ratio=r, launch_s=0.01))[0])
        for r in (1.0, 5.0)
    )

    assert slow - base == pytest.approx(0.01 * (ratio - 1))
