"""The search for the best plans of jobs, within the limits of their programs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.cells import Setting
from tessera.estimator.graph import balanced_ends
from tessera.estimator.hardware import GIB
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.memory import UsableMemory, limit_bytes
from tessera.estimator.models import known_models
from tessera.estimator.plan_search import OPEN, PlanSearch
from tessera.estimator.planning.uniform import interleaved_divisions, possible_degrees
from tessera.estimator.plans import Shape
from tessera.estimator.pricing.divisions import Divisions, PlanTable
from tessera.estimator.pricing.price import PlanPrice, price_plan
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.resources import Capacity, HostCapacity
from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.job.execution_plan import Offload, PlanSwitches, Recomputation, ZeroStage
from tessera.formulation.job.runtimes import (
    COMMAND,
    DEEPSPEED,
    MEGATRON,
    RESTRICTED_RUNTIMES,
    RUNTIMES,
    TORCHRUN,
)
from tessera.formulation.job.techniques import PlanLimits, Technique
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    EstimationInputs,
    HostRates,
    MeasurementRecord,
    UnestimatedWorkload,
)
from tessera.service.server.estimates.records import compute_records
from tessera.service.server.estimates.tasks import EstimateTask
from tests.support.laws import examples
from tests.support.small_jobs import every_division, small_jobs

BERT = Workload(model="bert", params="1.3B", global_batch=256)
LLAMA = Workload(model="llama30", params="30B", global_batch=64)
MOE = Workload(model="moe", params="10B", global_batch=512)
OF_TORCHRUN, OF_DEEPSPEED = (PlanLimits(runtime=name) for name in (TORCHRUN, DEEPSPEED))
NODE = Capacity(gpus=8, cpus=96, host_bytes=1600 * GIB)
"""A node whose host has room for everything."""


@cache
def an_estimator(
    workload: Workload = BERT, measurements: tuple[MeasurementRecord, ...] = ()
) -> Estimator:
    return Estimator(catalogue_of(), known_models([workload], ()), measurements)


def estimates_of(
    limits: PlanLimits,
    workload: Workload = BERT,
    gpu_type: str = "a40",
    gpus: int = 8,
    *,
    estimator: Estimator | None = None,
) -> list[EstimateRecord]:
    cells = (estimator or an_estimator(workload)).cells(workload, gpu_type, gpus, limits=limits)
    return [cell.record for cell in cells]


def choices_of(
    limits: PlanLimits,
    workload: Workload,
    gpu_type: str,
    gpus: int,
    node: Capacity | None,
    estimator: Estimator | None = None,
) -> list[EstimateRecord]:
    """Return the choices on one node."""
    cells = (estimator or an_estimator(workload)).cells(
        workload, gpu_type, gpus, nodes=1, limits=limits, node=node
    )
    return [cell.record for cell in cells]


@pytest.mark.full
@pytest.mark.parametrize("runtime", [TORCHRUN, DEEPSPEED, MEGATRON])
@pytest.mark.parametrize("workload", [BERT, LLAMA, MOE])
def test_each_plan_is_one_that_the_runtime_runs_on_its_cell(
    runtime: str, workload: Workload
) -> None:
    records = estimates_of(PlanLimits(runtime=runtime), workload, "a100-80")
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


@pytest.mark.full
def test_megatron_may_divide_layers_and_experts() -> None:
    of_megatron = PlanLimits(runtime=MEGATRON)
    (dense, *_), (torch, *_) = estimates_of(of_megatron), estimates_of(OF_TORCHRUN)
    assert dense.cell.pipeline_degree > 1
    assert dense.iter_time_s < torch.iter_time_s
    (experts, *_) = estimates_of(of_megatron, MOE, "a100-80")
    assert experts.plan is not None
    assert experts.plan.stages[0].ep > 1


def test_states_are_offloaded_only_if_nothing_else_fits_and_the_runtime_can() -> None:
    (deepspeed, *_) = estimates_of(OF_DEEPSPEED, LLAMA, "a40")
    assert deepspeed.plan is not None
    assert deepspeed.plan.offload is not Offload.NONE
    for record in estimates_of(OF_DEEPSPEED, LLAMA, "a100-80"):
        assert record.plan is not None
        assert record.plan.offload is Offload.NONE


def test_if_no_plan_fits_the_one_that_needs_least_is_infeasible() -> None:
    (record, *_) = estimates_of(OF_TORCHRUN, LLAMA, "a40")
    assert record.plan is not None
    assert record.plan.zero is ZeroStage.PARAMETERS
    assert record.iter_time_s == math.inf
    assert record.sd is None
    assert "for torchrun: no plan fits in memory: stage 0 needs" in record.provenance


def test_a_batch_that_the_gpus_cannot_share_has_no_plan() -> None:
    odd = Workload(model="bert", params="1.3B", global_batch=12)
    assert estimates_of(OF_TORCHRUN, odd, "a100-80", 8) == []
    (record, *_) = estimates_of(OF_TORCHRUN, odd, "a100-80", 4)
    assert record.plan is not None
    assert record.plan.stages[0].dp == 4


def test_a_single_gpu_divides_no_states() -> None:
    (record,) = estimates_of(OF_TORCHRUN, BERT, "a100-80", 1)
    assert record.plan is not None
    assert record.plan.zero is ZeroStage.NONE


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_measured_plan_within_limits_corrects_all_others(factor: float) -> None:
    record = estimates_of(OF_TORCHRUN)[0]
    measurement = MeasurementRecord(
        workload=BERT, cell=record.cell, iter_time_s=factor * record.iter_time_s, plan=record.plan
    )
    estimator = an_estimator(measurements=(measurement,))
    assert estimator.learned == 1
    for limits in (OF_TORCHRUN, OPEN):
        pairs = zip(estimates_of(limits), estimates_of(limits, estimator=estimator), strict=True)
        for old, new in pairs:
            assert (new.cell, new.plan) == (old.cell, old.plan)
            ratio = new.iter_time_s / old.iter_time_s
            assert ratio == pytest.approx(1.0, rel=0.01) if factor == 1.0 else 1.2 < ratio < 2.0
            assert old.sd is not None
            assert new.sd is not None
            assert new.sd < old.sd


def test_a_measured_cell_without_a_plan_is_taken_to_have_run_by_the_best_one() -> None:
    best = an_estimator().cells(BERT, "a40", 8, [1])[0].record
    bare = MeasurementRecord(
        workload=BERT, cell=replace(best.cell, plan=""), iter_time_s=2 * best.iter_time_s
    )
    full = replace(bare, cell=best.cell, plan=best.plan)
    bare_s, full_s = (
        an_estimator(measurements=(m,)).cells(BERT, "a40", 8, [1])[0].record.iter_time_s
        for m in (bare, full)
    )
    assert bare_s == full_s > best.iter_time_s


def test_a_measurement_of_a_plan_that_the_model_cannot_price_teaches_nothing() -> None:
    record = estimates_of(OF_TORCHRUN)[0]
    assert record.plan is not None
    wrong = replace(record.plan, stages=(replace(record.plan.stages[0], end=3),))
    measurement = MeasurementRecord(workload=BERT, cell=record.cell, iter_time_s=1.0, plan=wrong)
    assert an_estimator(measurements=(measurement,)).learned == 0


def test_plans_trade_cores_of_hosts_for_time_where_states_must_be_offloaded() -> None:
    records = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE)
    assert [record.cpus for record in records] == [1, 2, 4, 8]
    times_s = [record.iter_time_s for record in records]
    assert all(next_s < 0.99 * time_s for time_s, next_s in pairwise(times_s))
    assert len({record.cell for record in records}) == len(records)
    on_one = Shape(nodes=1, gpus_per_node=1)
    parameters = an_estimator(LLAMA).setting(LLAMA, "a100-80", on_one).graph.parameters
    for record in records:
        assert record.plan is not None
        assert record.plan.cpus == record.cpus
        assert f"on {record.plan.cpus_per_gpu} CPU core" in record.provenance
        # Weights, gradients, and Adam's two moments with a copy of the weights in single precision.
        assert record.host_bytes == pytest.approx((2 + 2 + 12) * parameters)


def test_plans_that_need_more_of_hosts_without_being_faster_are_left_out() -> None:
    records = choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, None)
    assert choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, NODE) == records
    assert [(record.cpus, record.host_bytes) for record in records] == [(0, 0)]


@pytest.mark.full
def test_no_choice_is_beaten_in_time_cores_and_host_memory() -> None:
    for limits, workload, gpu_type, gpus in (
        (OF_DEEPSPEED, LLAMA, "a40", 2),
        (PlanLimits(runtime=MEGATRON), LLAMA, "v100", 16),
        (OF_DEEPSPEED, MOE, "v100", 2),
    ):
        choices = choices_of(limits, workload, gpu_type, gpus, replace(NODE, gpus=gpus))
        for choice, rival in permutations(choices, 2):
            assert (
                choice.iter_time_s < rival.iter_time_s
                or choice.cpus < rival.cpus
                or choice.host_bytes < rival.host_bytes
            )


def test_a_node_without_enough_cores_or_memory_limits_the_choices() -> None:
    records = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, replace(NODE, cpus=3))
    assert [record.cpus for record in records] == [1, 2]
    (record,) = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, replace(NODE, host_bytes=64 * GIB))
    assert record.iter_time_s == math.inf
    assert "of host memory on a node, but a node has 64.0 GiB" in record.provenance


def test_where_a_node_states_no_cores_its_plans_state_none_either() -> None:
    (record,) = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, replace(NODE, cpus=None))
    assert record.cpus == 0
    assert record.host_bytes > 0
    assert choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, None) == [record]


def test_measured_rates_of_hosts_change_the_times_of_offloaded_plans_only() -> None:
    rates = HostRates(
        to_device_bytes_per_s=50e9, to_host_bytes_per_s=50e9, updates=((1, 20e9), (8, 90e9))
    )
    hardware = {t: kind.with_host(rates) for t, kind in catalogue_of().items()}
    estimator = Estimator(hardware, known_models([LLAMA, BERT], ()), ())
    slow = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE)
    fast = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE, estimator)
    assert fast[0].iter_time_s < slow[0].iter_time_s
    assert fast[0].provenance.startswith("analytic, host measured, for deepspeed: ")
    (on_gpus,) = choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, NODE, estimator)
    (usual,) = choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, NODE)
    assert replace(on_gpus, provenance=usual.provenance) == usual


DP, ZERO_2 = Technique.DATA_PARALLELISM, Technique.ZERO_2


def test_a_job_without_accumulation_runs_only_where_its_batch_fits_at_once() -> None:
    limits = PlanLimits(runtime=DEEPSPEED, techniques=(DP, Technique.ZERO_3))
    (record,) = choices_of(limits, BERT, "a40", 2, NODE)
    assert record.plan is not None
    assert record.plan.accumulation == 1
    assert record.iter_time_s == math.inf
    assert "needs" in record.provenance


@pytest.mark.parametrize(
    "limits",
    [(OF_TORCHRUN,), (OF_DEEPSPEED, PlanLimits(runtime=MEGATRON, techniques=(DP,)))],
)
def test_what_other_jobs_want_changes_no_open_cell(limits: tuple[PlanLimits, ...]) -> None:
    gpu_type = ClusterGpuType(
        gpu_type=GpuType(name="a40", memory_bytes=48 * GIB),
        node_gpus=4,
        gpus=8,
        node_host=HostCapacity(cpus=32),
    )

    def compute(limits: tuple[PlanLimits, ...], *, is_open: bool) -> dict[Cell, EstimateRecord]:
        workload = UnestimatedWorkload(
            workload=BERT,
            requests=(4,),
            counts=(),
            derived_from="",
            limits=limits,
            is_open=is_open,
        )
        inputs = EstimationInputs(kinds=(gpu_type,), models=(), measurements=(), wanted=(workload,))
        task = EstimateTask(wanted=workload, counts={"a40": [4]}, key="", asks_for_runs=False)
        records = compute_records(an_estimator(), inputs, task, never_cancelled)
        assert records is not None
        cells = {record.cell: record for record in records}
        assert len(cells) == len(records)
        return cells

    open_cells = compute((), is_open=True)
    limited_cells = compute(limits, is_open=False)
    assert compute(limits, is_open=True) == limited_cells | open_cells


@pytest.mark.parametrize(
    ("layers", "gpus", "degrees"),
    [
        (34, 1, (1,)),
        (34, 12, (1, 2, 3, 4, 6, 8, 12)),
        (34, 100, (1, 2, 4, 5, 8, 10, 16, 20, 25)),
        (5, 512, (1, 2, 4)),
        (200, 512, (1, 2, 4, 8, 16, 32, 64, 128)),
    ],
)
def test_degrees_divide_the_gpus_or_are_powers_of_two_up_to_16(
    layers: int, gpus: int, degrees: tuple[int, ...]
) -> None:
    assert possible_degrees(layers, gpus) == degrees


def every_plan(job: Setting, divisions: Divisions) -> PlanTable:
    """Return divisions with each ZeRO stage and recomputation, all states on the GPUs."""
    attention = job.graph.attention_flops.any()
    ways = [way for way in Recomputation if attention or way is not Recomputation.SELECTIVE]
    switches = [
        PlanSwitches(zero=zero, recomputation=way) for zero, way in product(ZeroStage, ways)
    ]
    return PlanTable(job, divisions, switches, OPEN, "")


def seconds_on_gpus(price: PlanPrice | None) -> float:
    """Return the time of a plan that fits without the hosts, or infinity."""
    if price is None or price.overflow is not None or price.plan.offload is not Offload.NONE:
        return math.inf
    return price.iter_time_s


@given(small_jobs())
@examples(60)
def test_the_best_plan_of_each_degree_is_the_best_of_all_plans(job: Setting) -> None:
    """All plans are all divisions (``every_division``) under each ZeRO stage and recomputation."""
    prices = PlanSearch(job, degrees=range(1, 5)).best_by_degree()
    table = every_plan(job, every_division(job))
    seconds = np.where(table.bytes <= table.limit_bytes, table.seconds, np.inf)
    for degree in range(1, 5):
        best_s = seconds[:, table.divisions.degrees == degree].min(initial=np.inf)
        assert seconds_on_gpus(prices.get(degree)) == pytest.approx(best_s, rel=1e-9), degree


def draw_plans(data: st.DataObject, table: PlanTable, count: int) -> Iterable[int]:
    """Draw the indices of some plans of a table, which may have none."""
    end = table.seconds.size
    return data.draw(st.lists(st.integers(0, end - 1), max_size=count)) if end else ()


@given(small_jobs(), st.data())
@examples(120)
def test_a_table_prices_plans_as_they_are_priced_one_by_one(
    job: Setting, data: st.DataObject
) -> None:
    table = every_plan(job, every_division(job))
    for index in draw_plans(data, table, 30):
        price = price_plan(job, table.plan(index))
        assert table.seconds.flat[index] == pytest.approx(price.iter_time_s, rel=1e-9)
        assert table.bytes.flat[index] == pytest.approx(max(price.memory_bytes), rel=1e-9)


@given(small_jobs(layers=(6, 8, 10), min_gpus=2), st.data())
@examples(60)
def test_chunks_need_the_memory_in_a_table_at_least_and_are_tried_if_they_are_faster(
    job: Setting, data: st.DataObject
) -> None:
    degrees, batch = tuple(range(2, 5)), job.training.global_batch
    divisions = interleaved_divisions(job.graph, job.shape, batch, degrees)
    assume(divisions is not None)
    assert divisions is not None
    table = every_plan(job, divisions)
    for index in draw_plans(data, table, 15):
        price = price_plan(job, table.plan(index))
        assert table.seconds.flat[index] == pytest.approx(price.iter_time_s, rel=1e-9)
        assert table.bytes.flat[index] <= max(price.memory_bytes) * (1 + 1e-9)
        # Memory that is too small for this plan alone shows if others are tried in its place.
        memory = math.floor((max(price.memory_bytes) - 1.0) / UsableMemory().usable)
        scarce = replace(job, hardware=replace(job.hardware, memory_bytes=memory))
        best = PlanSearch(scarce, degrees=degrees).best_by_degree()
        for rival_index in table.in_order(degrees, table.seconds, limit_bytes(memory)):
            rival = table.plan(rival_index)
            known_s = seconds_on_gpus(best.get(rival.pipeline_degree))
            if table.seconds.flat[rival_index] < known_s * (1 - 1e-9):
                assert price_plan(scarce, rival).overflow is not None


@given(
    small_jobs(),
    st.sampled_from([COMMAND, *RESTRICTED_RUNTIMES]),
    st.lists(st.sampled_from(Technique), unique=True),
)
@examples(120)
def test_within_limits_plans_are_allowed_and_no_uniform_one_is_faster(
    job: Setting, runtime: str, techniques: list[Technique]
) -> None:
    """Uniform plans have equal stages, and equal blocks or the lightest heaviest stage."""
    limits = PlanLimits(runtime=runtime, techniques=tuple(techniques))
    search = PlanSearch(job, limits)
    prices = search.host_variants()
    assert all(limits.allow(p.plan) for p in (*prices, *search.best_by_degree().values()))
    layers, flops = len(job.graph), job.graph.flops
    uniform_s, table = math.inf, every_plan(job, every_division(job))
    for index in table.in_order(range(1, 5), table.seconds, table.limit_bytes):
        plan = table.plan(index)
        degree, ends = plan.pipeline_degree, [stage.end for stage in plan.stages]
        blocks = [stage.end - stage.start for stage in plan.stages]
        blocks[0], blocks[-1] = blocks[0] - 1, blocks[-1] - 1  # the embedding and the head
        even_ends = balanced_ends(flops + 1e-9 * flops.sum(), degree).tolist()
        is_uniform = len({stage.parallelism for stage in plan.stages}) == 1
        is_uniform &= ends == even_ends or (len(set(blocks)) == 1 and layers > 2)
        if is_uniform and limits.allow(plan):
            uniform_s = price_plan(job, plan).iter_time_s
            break
    assert min(map(seconds_on_gpus, prices), default=math.inf) <= uniform_s * (1 + 1e-9)
