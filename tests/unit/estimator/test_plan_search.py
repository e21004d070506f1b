"""The best plans for runtimes that cannot run every plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations, product

import pytest

from tessera.estimator.cell_estimator import CellEstimate, Estimator
from tessera.estimator.cells import Setting
from tessera.estimator.hardware import GIB
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.models import known_models
from tessera.estimator.plans import Shape
from tessera.estimator.pricing.price import price_plan
from tessera.estimator.runnable_plans import estimate_runnable_plans, find_runnable_plan
from tessera.formulation.demand import Capacity
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    ZeroStage,
)
from tessera.formulation.records.estimates import EstimateRecord, HostRates, MeasurementRecord
from tessera.formulation.runtimes import COMMAND, DEEPSPEED, MEGATRON, RUNTIMES, TORCHRUN
from tessera.formulation.techniques import PlanLimits, Technique, techniques_of
from tessera.formulation.values import Cell, EstimateSource, Workload

BERT = Workload(model="bert", params="1.3B", global_batch=256)
LLAMA = Workload(model="llama30", params="30B", global_batch=64)
ONE_GPU = Shape(nodes=1, gpus_per_node=1)
OF_TORCHRUN = PlanLimits(runtime=TORCHRUN)
MOE = Workload(model="moe", params="10B", global_batch=512)


@cache
def an_estimator(
    workload: Workload = BERT, measurements: tuple[MeasurementRecord, ...] = ()
) -> Estimator:
    return Estimator(catalogue_of(), known_models([workload], ()), measurements)


def estimates_of(
    runtime: str,
    workload: Workload = BERT,
    gpu_type: str = "a40",
    gpus: int = 8,
    estimator: Estimator | None = None,
) -> list[EstimateRecord]:
    made = estimator or an_estimator(workload)
    searched = made.cells(workload, gpu_type, gpus)
    return estimate_runnable_plans(
        made, workload, gpu_type, gpus, [PlanLimits(runtime=runtime)], searched
    )


def setting_on(workload: Workload, gpu_type: str, nodes: int) -> Setting:
    """Return the setting of 8 GPUs on some nodes."""
    cell = Cell(gpu_type=gpu_type, gpus=8, pipeline_degree=1, nodes=nodes)
    shape = Shape(nodes=nodes, gpus_per_node=8 // nodes)
    return an_estimator(workload).setting(workload, cell, shape)


@pytest.mark.full
@pytest.mark.parametrize("runtime", [TORCHRUN, DEEPSPEED, MEGATRON])
@pytest.mark.parametrize("workload", [BERT, LLAMA, MOE])
def test_each_plan_is_one_that_the_runtime_runs_on_its_cell(
    runtime: str, workload: Workload
) -> None:
    records = estimates_of(runtime, workload, "a100-80", 8)
    assert [record.cell.nodes for record in records] == [1, 2, 4]
    for record in records:
        assert record.plan is not None
        assert RUNTIMES[runtime].refuse_plan(record.plan) == ""
        assert record.plan.global_batch == workload.global_batch
        assert record.plan.shape == (8 // record.cell.nodes,) * record.cell.nodes
        assert math.isfinite(record.iter_time_s)
        assert record.source is EstimateSource.ANALYTIC
        assert record.traffic is not None
        assert f"for {runtime}: {record.plan}" in record.provenance


@pytest.mark.parametrize(("workload", "gpu_type"), [(BERT, "a40"), (LLAMA, "a100-80")])
def test_no_data_parallel_plan_that_fits_is_faster(workload: Workload, gpu_type: str) -> None:
    setting = setting_on(workload, gpu_type, 4)
    best = find_runnable_plan(setting, OF_TORCHRUN)
    assert best is not None
    times_s = [
        price.iter_time_s
        for zero, recomputation, count in product(
            ZeroStage, (Recomputation.NONE, Recomputation.FULL), (1, 2, 4, 8, 16, 32)
        )
        if workload.global_batch % (8 * count) == 0
        for price in [
            price_plan(
                setting,
                ExecutionPlan(
                    stages=(PlanStage(start=0, end=len(setting.graph), dp=8),),
                    micro_batch=workload.global_batch // count,
                    accumulation=count,
                    zero=zero,
                    recomputation=recomputation,
                    precision=Precision(setting.graph.dtype),
                ),
            )
        ]
        if price.overflow is None
    ]
    assert best.iter_time_s == min(times_s)


@pytest.mark.full
def test_megatron_may_divide_layers_and_experts() -> None:
    (dense, *_) = estimates_of(MEGATRON, BERT, "a40", 8)
    assert dense.cell.pipeline_degree > 1
    (torch, *_) = estimates_of(TORCHRUN, BERT, "a40", 8)
    assert dense.iter_time_s < torch.iter_time_s
    (experts, *_) = estimates_of(MEGATRON, MOE, "a100-80", 8)
    assert experts.plan is not None
    assert experts.plan.stages[0].ep > 1


def test_states_are_offloaded_only_if_nothing_else_fits_and_the_runtime_can() -> None:
    (deepspeed, *_) = estimates_of(DEEPSPEED, LLAMA, "a40", 8)
    assert deepspeed.plan is not None
    assert deepspeed.plan.offload is not Offload.NONE
    for record in estimates_of(DEEPSPEED, LLAMA, "a100-80", 8):
        assert record.plan is not None
        assert record.plan.offload is Offload.NONE


def test_if_no_plan_fits_the_one_that_needs_least_is_infeasible() -> None:
    (record, *_) = estimates_of(TORCHRUN, LLAMA, "a40", 8)
    assert record.plan is not None
    assert record.plan.zero is ZeroStage.PARAMETERS
    assert record.iter_time_s == math.inf
    assert record.sd is None
    assert "for torchrun: stage 0 needs" in record.provenance


def test_a_batch_that_the_gpus_cannot_share_has_no_plan() -> None:
    odd = Workload(model="bert", params="1.3B", global_batch=12)
    assert estimates_of(TORCHRUN, odd, "a100-80", 8) == []
    (record, *_) = estimates_of(TORCHRUN, odd, "a100-80", 4)
    assert record.plan is not None
    assert record.plan.stages[0].dp == 4


def test_a_single_gpu_divides_no_states() -> None:
    (record,) = estimates_of(TORCHRUN, BERT, "a100-80", 1)
    assert record.plan is not None
    assert record.plan.zero is ZeroStage.NONE


def test_two_runtimes_with_the_same_plan_have_one_estimate() -> None:
    estimator = an_estimator()
    searched = estimator.cells(BERT, "a40", 8)
    both = [PlanLimits(runtime=name) for name in (TORCHRUN, DEEPSPEED)]
    records = estimate_runnable_plans(estimator, BERT, "a40", 8, both, searched)
    assert [record.cell for record in records] == [r.cell for r in estimates_of(TORCHRUN)]


def test_plans_that_the_search_found_are_left_out() -> None:
    estimator, own = an_estimator(), estimates_of(TORCHRUN)
    searched = [CellEstimate(record=own[0], plan=None), *estimator.cells(BERT, "a40", 8)]
    records = estimate_runnable_plans(estimator, BERT, "a40", 8, [OF_TORCHRUN], searched)
    assert [record.cell for record in records] == [record.cell for record in own[1:]]


def test_measurements_correct_them_as_they_correct_the_best_plans() -> None:
    fresh = an_estimator()
    (best, *_) = fresh.cells(BERT, "a40", 8, [1])
    cell = Cell(gpu_type="a40", gpus=8, pipeline_degree=1, nodes=best.record.cell.nodes)
    slow = MeasurementRecord(workload=BERT, cell=cell, iter_time_s=2 * best.record.iter_time_s)
    learned = an_estimator(measurements=(slow,))
    (corrected, *_) = learned.cells(BERT, "a40", 8, [1])
    factor = corrected.record.iter_time_s / best.record.iter_time_s
    assert factor > 1.2
    (before, *_), (after, *_) = estimates_of(TORCHRUN), estimates_of(TORCHRUN, estimator=learned)
    assert after.iter_time_s == pytest.approx(factor * before.iter_time_s)
    assert after.sd == corrected.record.sd


def test_a_measurement_of_another_plan_counts_as_one_of_the_best_plan() -> None:
    fresh, own = an_estimator(), estimates_of(TORCHRUN)[0]
    assert own.plan is not None
    as_predicted = MeasurementRecord(
        workload=BERT, cell=own.cell, iter_time_s=own.iter_time_s, plan=own.plan
    )
    learned = an_estimator(measurements=(as_predicted,))
    assert learned.learned == 1
    (before, *_), (after, *_) = (e.cells(BERT, "a40", 8, [1]) for e in (fresh, learned))
    assert before.record.iter_time_s > 1.2 * own.iter_time_s
    assert after.record.iter_time_s == pytest.approx(before.record.iter_time_s, rel=0.01)


def test_a_measurement_of_the_best_plan_is_learned_from_as_it_is() -> None:
    best = an_estimator().cells(BERT, "a40", 8, [1])[0].record
    slow = MeasurementRecord(workload=BERT, cell=best.cell, iter_time_s=2 * best.iter_time_s)
    known = replace(slow, plan=best.plan)
    (one, *_), (other, *_) = (
        an_estimator(measurements=(m,)).cells(BERT, "a40", 8, [1]) for m in (slow, known)
    )
    assert one.record.iter_time_s == other.record.iter_time_s > best.iter_time_s


def test_a_measurement_of_a_plan_that_the_model_cannot_price_teaches_nothing() -> None:
    own = estimates_of(TORCHRUN)[0]
    assert own.plan is not None
    wrong = replace(own.plan, stages=(replace(own.plan.stages[0], end=3),))
    record = MeasurementRecord(workload=BERT, cell=own.cell, iter_time_s=1.0, plan=wrong)
    assert an_estimator(measurements=(record,)).learned == 0


def test_a_plan_that_ran_out_of_memory_makes_way_for_one_that_needs_less() -> None:
    estimator, own = an_estimator(), estimates_of(TORCHRUN)[0]
    searched = estimator.cells(BERT, "a40", 8)
    tried: list[EstimateRecord] = [own]
    for _ in range(2):
        cells = [record.cell for record in tried]
        tried += estimate_runnable_plans(
            estimator, BERT, "a40", 8, [OF_TORCHRUN], searched, exhausted=cells
        )[:1]
    assert len({record.cell.plan for record in tried}) == 3
    setting = setting_on(BERT, "a40", own.cell.nodes)
    needs = [max(price_plan(setting, r.plan).memory_bytes) for r in tried if r.plan is not None]
    assert needs == sorted(needs, reverse=True)
    assert all(math.isfinite(record.iter_time_s) for record in tried)


NODE = Capacity(gpus=8, cpus=96, host_bytes=1600 * GIB)
"""A node whose host has room for everything."""


def choices_of(
    limits: PlanLimits, workload: Workload, gpu_type: str, gpus: int, node: Capacity | None
) -> list[EstimateRecord]:
    """Return the choices on one node."""
    made = an_estimator(workload)
    searched = made.cells(workload, gpu_type, gpus, [1], nodes=1)
    return estimate_runnable_plans(
        made, workload, gpu_type, gpus, [limits], searched, nodes=1, node=node
    )


OF_DEEPSPEED = PlanLimits(runtime=DEEPSPEED)


def test_plans_trade_cores_of_hosts_for_time_where_states_must_be_offloaded() -> None:
    records = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE)
    assert [record.cpus for record in records] == [1, 2, 4, 8]
    times_s = [record.iter_time_s for record in records]
    assert all(later < 0.99 * sooner for sooner, later in pairwise(times_s))
    assert len({record.cell for record in records}) == len(records)
    parameters = an_estimator(LLAMA).setting(LLAMA, records[0].cell, ONE_GPU).graph.parameters
    for record in records:
        assert record.plan is not None
        assert record.plan.cpus == record.cpus
        assert f"on {record.plan.cpus_per_gpu} CPU core" in record.provenance
        # Weights, gradients, and Adam's two moments with a copy of the weights in single precision.
        assert record.host_bytes == pytest.approx((2 + 2 + 12) * parameters)


def test_plans_that_need_more_of_hosts_without_being_faster_are_left_out() -> None:
    before = choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, None)
    assert choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, NODE) == before
    assert [(record.cpus, record.host_bytes) for record in before] == [(0, 0)]


@pytest.mark.full
def test_no_choice_is_beaten_in_time_cores_and_host_memory() -> None:
    for limits, workload, gpu_type, gpus in (
        (OF_DEEPSPEED, LLAMA, "a40", 2),
        (PlanLimits(runtime=MEGATRON), LLAMA, "v100", 16),
        (OF_DEEPSPEED, MOE, "v100", 2),
    ):
        kept = choices_of(limits, workload, gpu_type, gpus, replace(NODE, gpus=gpus))
        for one, other in permutations(kept, 2):
            assert (
                one.iter_time_s < other.iter_time_s
                or one.cpus < other.cpus
                or one.host_bytes < other.host_bytes
            )


def test_a_node_without_enough_cores_or_memory_limits_the_choices() -> None:
    few = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, replace(NODE, cpus=3))
    assert [record.cpus for record in few] == [1, 2]
    (none,) = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, replace(NODE, host_bytes=64 * GIB))
    assert none.iter_time_s == math.inf
    assert "of host memory on a node, but a node has 64.0 GiB" in none.provenance


def test_where_a_node_states_no_cores_its_plans_state_none_either() -> None:
    (record,) = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, replace(NODE, cpus=None))
    assert record.cpus == 0
    assert record.host_bytes > 0
    (before,) = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, None)
    assert record == before


def test_measured_rates_of_hosts_change_the_times_of_offloaded_plans_only() -> None:
    rates = HostRates(
        to_device_bytes_per_s=50e9, to_host_bytes_per_s=50e9, updates=((1, 20e9), (8, 90e9))
    )
    hardware = {t: kind.with_host(rates) for t, kind in catalogue_of().items()}
    measured = Estimator(hardware, known_models([LLAMA, BERT], ()), ())

    def choices(workload: Workload, gpus: int) -> list[EstimateRecord]:
        searched = measured.cells(workload, "a100-80", gpus, [1], nodes=1)
        return estimate_runnable_plans(
            measured, workload, "a100-80", gpus, [OF_DEEPSPEED], searched, nodes=1, node=NODE
        )

    slow, fast = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE), choices(LLAMA, 1)
    assert fast[0].iter_time_s < slow[0].iter_time_s
    assert fast[0].provenance.startswith("analytic, host measured, for deepspeed: ")
    assert choices(BERT, 8) == choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, NODE)


DP, ZERO_2 = Technique.DATA_PARALLELISM, Technique.ZERO_2


@pytest.mark.parametrize("runtime", [COMMAND, DEEPSPEED, MEGATRON])
def test_jobs_that_name_techniques_get_the_best_plan_that_uses_no_others(runtime: str) -> None:
    limits = PlanLimits(runtime=runtime, techniques=(DP, ZERO_2, Technique.ACCUMULATION))
    (record,) = choices_of(limits, BERT, "a40", 2, None)
    assert record.plan is not None
    assert techniques_of(record.plan) <= {*limits.techniques}
    assert f"for {limits}: " in record.provenance
    setting = an_estimator().setting(BERT, record.cell, Shape(nodes=1, gpus_per_node=2))
    rivals_s = [
        price.iter_time_s
        for zero, count in product((ZeroStage.NONE, ZeroStage.GRADIENTS), (1, 2, 4, 8, 16, 32))
        for price in [
            price_plan(
                setting,
                replace(record.plan, zero=zero, micro_batch=256 // count, accumulation=count),
            )
        ]
        if price.overflow is None and limits.allow(price.plan)
    ]
    assert record.iter_time_s == pytest.approx(min(rivals_s))


def test_a_job_without_accumulation_runs_only_where_its_batch_fits_at_once() -> None:
    limits = PlanLimits(runtime=DEEPSPEED, techniques=(DP, Technique.ZERO_3))
    (record,) = choices_of(limits, BERT, "a40", 2, NODE)
    assert record.plan is not None
    assert record.plan.accumulation == 1
    assert record.iter_time_s == math.inf
    assert "needs" in record.provenance


def test_limits_that_a_plan_breaks_are_those_of_runtime_or_techniques() -> None:
    (pipeline, *_) = estimates_of(MEGATRON, BERT, "a40", 8)
    assert pipeline.plan is not None
    assert not OF_TORCHRUN.allow(pipeline.plan)
    assert PlanLimits(runtime=COMMAND).allow(pipeline.plan)
    assert PlanLimits(runtime=COMMAND).allow_every_plan
    assert not PlanLimits(runtime=COMMAND, techniques=(DP,)).allow(pipeline.plan)
    assert not PlanLimits(runtime=COMMAND, techniques=(DP,)).allow_every_plan
    assert not OF_TORCHRUN.allow_every_plan
