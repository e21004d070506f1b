"""The search for the best plans of jobs, within the limits of their programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.graph import Graph, balanced_ends
from tessera.estimator.hardware import A10, GIB
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.memory import States, limit_bytes, memory_without
from tessera.estimator.models import known_models
from tessera.estimator.plan_search import OPEN, PlanSearch
from tessera.estimator.planning.uniform import interleaved_divisions, possible_degrees
from tessera.estimator.plans import Candidates, Shape, Training, powers_dividing
from tessera.estimator.pricing.divisions import Divisions, PlanTable, Switches
from tessera.estimator.pricing.price import PlanPrice, price_plan
from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.demand import Capacity
from tessera.formulation.execution_plan import Offload, PlanStage, Recomputation, ZeroStage
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    EstimationInputs,
    HostRates,
    MeasurementRecord,
    UnestimatedWorkload,
)
from tessera.formulation.runtimes import (
    COMMAND,
    DEEPSPEED,
    MEGATRON,
    RESTRICTED_RUNTIMES,
    RUNTIMES,
    TORCHRUN,
)
from tessera.formulation.techniques import PlanLimits, Technique, techniques_of
from tessera.formulation.values import EstimateSource, GpuType, Workload
from tessera.service.cells.records import compute_records
from tessera.service.cells.tasks import EstimateTask
from tests.support.estimates import a_graph, a_layer
from tests.support.laws import examples

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
    made = estimator or an_estimator(workload)
    return [cell.record for cell in made.cells(workload, gpu_type, gpus, limits=limits)]


def choices_of(
    limits: PlanLimits,
    workload: Workload,
    gpu_type: str,
    gpus: int,
    node: Capacity | None,
    estimator: Estimator | None = None,
) -> list[EstimateRecord]:
    """Return the choices on one node."""
    made = estimator or an_estimator(workload)
    cells = made.cells(workload, gpu_type, gpus, nodes=1, limits=limits, node=node)
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
    own = estimates_of(OF_TORCHRUN)[0]
    measured = MeasurementRecord(
        workload=BERT, cell=own.cell, iter_time_s=factor * own.iter_time_s, plan=own.plan
    )
    learned = an_estimator(measurements=(measured,))
    assert learned.learned == 1
    for limits in (OF_TORCHRUN, OPEN):
        before, after = estimates_of(limits), estimates_of(limits, estimator=learned)
        for old, new in zip(before, after, strict=True):
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
    known = replace(bare, cell=best.cell, plan=best.plan)
    (one, *_), (other, *_) = (
        an_estimator(measurements=(m,)).cells(BERT, "a40", 8, [1]) for m in (bare, known)
    )
    assert one.record.iter_time_s == other.record.iter_time_s > best.iter_time_s


def test_a_measurement_of_a_plan_that_the_model_cannot_price_teaches_nothing() -> None:
    own = estimates_of(OF_TORCHRUN)[0]
    assert own.plan is not None
    wrong = replace(own.plan, stages=(replace(own.plan.stages[0], end=3),))
    record = MeasurementRecord(workload=BERT, cell=own.cell, iter_time_s=1.0, plan=wrong)
    assert an_estimator(measurements=(record,)).learned == 0


def test_plans_trade_cores_of_hosts_for_time_where_states_must_be_offloaded() -> None:
    records = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE)
    assert [record.cpus for record in records] == [1, 2, 4, 8]
    times_s = [record.iter_time_s for record in records]
    assert all(later < 0.99 * sooner for sooner, later in pairwise(times_s))
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
    slow = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE)
    fast = choices_of(OF_DEEPSPEED, LLAMA, "a100-80", 1, NODE, measured)
    assert fast[0].iter_time_s < slow[0].iter_time_s
    assert fast[0].provenance.startswith("analytic, host measured, for deepspeed: ")
    (on_gpus,) = choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, NODE, measured)
    (before,) = choices_of(OF_DEEPSPEED, BERT, "a100-80", 8, NODE)
    assert replace(on_gpus, provenance=before.provenance) == before


DP, ZERO_2 = Technique.DATA_PARALLELISM, Technique.ZERO_2


def test_a_job_without_accumulation_runs_only_where_its_batch_fits_at_once() -> None:
    limits = PlanLimits(runtime=DEEPSPEED, techniques=(DP, Technique.ZERO_3))
    (record,) = choices_of(limits, BERT, "a40", 2, NODE)
    assert record.plan is not None
    assert record.plan.accumulation == 1
    assert record.iter_time_s == math.inf
    assert "needs" in record.provenance


def test_limits_that_a_plan_breaks_are_those_of_runtime_or_techniques() -> None:
    (pipeline, *_) = estimates_of(PlanLimits(runtime=MEGATRON))
    assert pipeline.plan is not None
    assert not OF_TORCHRUN.allow(pipeline.plan)
    assert PlanLimits(runtime=COMMAND).allow(pipeline.plan)
    assert PlanLimits(runtime=COMMAND).allow_every_plan
    assert not PlanLimits(runtime=COMMAND, techniques=(DP,)).allow(pipeline.plan)
    assert not PlanLimits(runtime=COMMAND, techniques=(DP,)).allow_every_plan
    assert not OF_TORCHRUN.allow_every_plan


@pytest.mark.parametrize(
    "others", [(OF_TORCHRUN,), (OF_DEEPSPEED, PlanLimits(runtime=MEGATRON, techniques=(DP,)))]
)
def test_what_other_jobs_want_changes_no_open_cell(others: tuple[PlanLimits, ...]) -> None:
    kind = ClusterGpuType(
        gpu_type=GpuType(name="a40", memory_bytes=48 * GIB), node_gpus=4, gpus=8, node_cpus=32
    )

    def records(limits: tuple[PlanLimits, ...], *, is_open: bool) -> list[EstimateRecord]:
        wanted = UnestimatedWorkload(
            workload=BERT,
            requests=(4,),
            counts=(),
            derived_from="",
            limits=limits,
            is_open=is_open,
        )
        known = EstimationInputs(kinds=(kind,), models=(), measurements=(), wanted=(wanted,))
        task = EstimateTask(wanted=wanted, counts={"a40": [4]}, key="", asks_for_runs=False)
        found = compute_records(an_estimator(), known, task, never_cancelled)
        assert found is not None
        assert len({record.cell for record in found}) == len(found)
        return found

    alone, limited = records((), is_open=True), records(others, is_open=False)
    together = records(others, is_open=True)
    assert together[: len(alone)] == alone
    known = {record.cell for record in alone}
    assert together[len(alone) :] == [r for r in limited if r.cell not in known]


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


@st.composite
def small_jobs(draw: st.DrawFn, layers: Sequence[int] = range(1, 6), least: int = 1) -> Setting:
    """Draw a job of ``least`` to 8 samples on as many to 4 GPUs, whose memory may be scarce."""
    scale = st.sampled_from([0.25, 1.0, 3.0])
    attention, experts = draw(st.booleans()), draw(st.sampled_from([0.0, 6.0, 8.0]))
    rows = []
    for _ in range(draw(st.sampled_from(layers))):
        work, size, some = draw(scale), draw(scale), experts * draw(st.booleans())
        rows.append(
            a_layer(
                flops=1e12 * work,
                weights=1e8 * size,
                shared_weights=1e5,
                kept=3e7 * work,
                unsplit=1e7 * work,
                tensor_limit=draw(st.sampled_from([1.0, 2.0, 8.0])),
                experts=some or 1.0,
                expert_weights=2e8 * size * bool(some),
                exchanged=4e6 * bool(some),
                attention_flops=3e11 * work * attention,
                attention_kept=1e7 * work * attention,
            )
        )
    shapes = [(n, each) for n in (1, 2, 4) for each in (1, 2, 3, 4) if least <= n * each <= 4]
    nodes, each = draw(st.sampled_from(shapes))
    batch = draw(st.sampled_from([n for n in (1, 4, 6, 8) if n >= least]))
    return data_sheet_setting(
        a_graph(*rows, dtype=draw(st.sampled_from(["f16", "bf16"]))),
        Training(global_batch=batch, micro_batches=batch),
        replace(A10, memory_bytes=draw(st.sampled_from([3, 8, 40])) * GIB),
        Shape(nodes=nodes, gpus_per_node=each),
        States(),
    )


def every_stage(graph: Graph, start: int, end: int, gpus: int) -> Iterator[PlanStage]:
    """Yield all stages of some layers and GPUs, with degrees that are powers of two."""
    experts = [count for count in graph.experts[start:end].tolist() if count > 1]
    for tp, ep in product(powers_dividing(gpus), powers_dividing(gpus)):
        fits = tp <= graph.tensor_limit[start:end].min() and (ep == 1 or experts)
        if fits and not any(count % ep for count in experts):
            for sp in {False, tp > 1}:
                yield PlanStage(start=start, end=end, dp=gpus // tp, tp=tp, ep=ep, sp=sp)


def every_division(job: Setting) -> Divisions:
    """Return all divisions of a small job.

    They have any cuts and any equal micro-batches. The GPUs of a stage are a power of two, or all.
    """
    graph, gpus, batch = job.graph, job.shape.gpus, job.training.global_batch
    found: list[tuple[tuple[PlanStage, ...], int]] = []
    for degree in range(1, min(gpus, len(graph)) + 1):
        cuts = combinations(range(1, len(graph)), degree - 1)
        shares = [s for s in product({1, 2, 4, gpus}, repeat=degree) if sum(s) == gpus]
        for inner, share in product(cuts, shares):
            bounds = zip(pairwise((0, *inner, len(graph))), share, strict=True)
            for stages in product(*(every_stage(graph, *ends, each) for ends, each in bounds)):
                counts = [n for n in range(1, batch + 1) if batch % n == 0]
                found += [(stages, n) for n in counts if not any(batch // n % s.dp for s in stages)]
    return as_divisions(found)


def as_divisions(found: Sequence[tuple[tuple[PlanStage, ...], int]]) -> Divisions:
    """Return the divisions with some stages and numbers of micro-batches."""
    rows = [(s.start, s.end, s.dp, s.tp, s.ep, s.sp) for stages, _ in found for s in stages]
    start, end, dp, tp, ep, sp = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    lengths = np.array([len(stages) for stages, _ in found], dtype=np.int64)
    return Divisions(
        candidates=Candidates(start=start, end=end, dp=dp, tp=tp, ep=ep, sp=sp.astype(bool)),
        first=np.cumsum(lengths) - lengths,
        accumulation=np.array([count for _, count in found], dtype=np.int64),
        chunks=np.ones_like(lengths),
        kind=np.arange(len(found)),
    )


def every_plan(job: Setting, divisions: Divisions) -> PlanTable:
    """Return divisions with each ZeRO stage and recomputation, all states on the GPUs."""
    attention = job.graph.attention_flops.any()
    again = [way for way in Recomputation if attention or way is not Recomputation.SELECTIVE]
    switches = [Switches(zero=zero, recomputation=way) for zero, way in product(ZeroStage, again)]
    return PlanTable(job, divisions, switches, OPEN, "")


def seconds_on_gpus(price: PlanPrice | None) -> float:
    """Return the time of a plan that fits without the hosts, or infinity."""
    if price is None or price.overflow is not None or price.plan.offload is not Offload.NONE:
        return math.inf
    return price.iter_time_s


@given(small_jobs())
@examples(60)
def test_the_best_plan_of_each_degree_is_the_best_of_all_plans(job: Setting) -> None:
    """All plans are those of ``every_division`` under each ZeRO stage and recomputation."""
    found = PlanSearch(job, degrees=range(1, 5)).best_by_degree()
    table = every_plan(job, every_division(job))
    seconds = np.where(table.bytes <= table.limit_bytes, table.seconds, np.inf)
    for degree in range(1, 5):
        least_s = seconds[:, table.divisions.degrees == degree].min(initial=np.inf)
        assert seconds_on_gpus(found.get(degree)) == pytest.approx(least_s, rel=1e-9), degree


def drawn(data: st.DataObject, table: PlanTable, count: int) -> Iterable[int]:
    """Draw the indices of some plans of a table, which may have none."""
    most = table.seconds.size - 1
    return data.draw(st.lists(st.integers(0, most), max_size=count)) if most >= 0 else ()


@given(small_jobs(), st.data())
@examples(120)
def test_a_table_prices_plans_as_they_are_priced_one_by_one(
    job: Setting, data: st.DataObject
) -> None:
    table = every_plan(job, every_division(job))
    for at in drawn(data, table, 30):
        price = price_plan(job, table.plan(at))
        assert table.seconds.flat[at] == pytest.approx(price.iter_time_s, rel=1e-9)
        assert table.bytes.flat[at] == pytest.approx(max(price.memory_bytes), rel=1e-9)


@given(small_jobs(layers=(6, 8, 10), least=2), st.data())
@examples(60)
def test_chunks_need_the_memory_in_a_table_at_least_and_are_tried_if_they_are_faster(
    job: Setting, data: st.DataObject
) -> None:
    degrees, batch = tuple(range(2, 5)), job.training.global_batch
    divisions = interleaved_divisions(job.graph, job.shape, batch, degrees)
    assume(divisions is not None)
    assert divisions is not None
    table = every_plan(job, divisions)
    for at in drawn(data, table, 15):
        price = price_plan(job, table.plan(at))
        assert table.seconds.flat[at] == pytest.approx(price.iter_time_s, rel=1e-9)
        assert table.bytes.flat[at] <= max(price.memory_bytes) * (1 + 1e-9)
        # Memory that is too small for this plan alone shows if others are tried in its place.
        memory = memory_without(max(price.memory_bytes))
        scarce = replace(job, hardware=replace(job.hardware, memory_bytes=memory))
        best = PlanSearch(scarce, degrees=degrees).best_by_degree()
        for other in table.in_order(degrees, table.seconds, limit_bytes(memory)):
            rival = table.plan(other)
            known_s = seconds_on_gpus(best.get(rival.pipeline_degree))
            if table.seconds.flat[other] < known_s * (1 - 1e-9):
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
    assert not limits.techniques or all(
        techniques_of(p.plan) <= {*limits.techniques} for p in prices
    )
    least_s, layers = math.inf, len(job.graph)
    load = job.graph.flops * (1 + 1e-9 / layers)
    table = every_plan(job, every_division(job))
    for at in table.in_order(range(1, 5), table.seconds, table.limit_bytes):
        plan = table.plan(at)
        degree = plan.pipeline_degree
        ends = [stage.end for stage in plan.stages]
        equal = (layers - 2) % degree == 0 and (layers - 2) // degree
        equal_ends = [1 + equal * k for k in range(1, degree)] + [layers] if equal else []
        is_cut = ends in (equal_ends, balanced_ends(load, degree).tolist())
        if len({stage.parallelism for stage in plan.stages}) == 1 and is_cut and limits.allow(plan):
            least_s = price_plan(job, plan).iter_time_s
            break
    assert min(map(seconds_on_gpus, prices), default=math.inf) <= least_s * (1 + 1e-9)
