"""The estimates that rounds see in an ablation: by profiles, by data sheets, or of one plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from tessera.benchmarks.schedulers.knowledge import (
    DATA_PARALLEL,
    KNOWLEDGE,
    PLANNED,
    UNPROFILED,
    WorkloadEstimates,
    estimate_workload,
    learn_workloads,
    measured_ratio,
)
from tessera.estimator.hardware import CATALOGUE
from tessera.formulation.records.estimates import ClusterGpuType, EstimateRecord
from tessera.formulation.values import BEST_FOUND, Cell, EstimateSource, GpuType, Workload
from tessera.simulator.comparison.estimate_rows import records_of, rows_of
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec, make_scenario
from tessera.simulator.sweeps.runner import Sweep

SMALL = Workload(model="bert", params="760M", global_batch=128)
LARGE = Workload(model="bert", params="6.7B", global_batch=128)
HERE = Sweep(workers=0)


def a_kind(name: str, nodes: int = 2, gpus: int = 4) -> ClusterGpuType:
    hardware = next(kind for kind in CATALOGUE if kind.name == name)
    kind = GpuType(name=name, memory_bytes=int(hardware.memory_bytes))
    return ClusterGpuType(gpu_type=kind, node_gpus=gpus, gpus=nodes * gpus)


def a_run(workload: Workload, gpu_type: str, gpus: int, iter_time_s: float) -> EstimateRecord:
    """Return a run of the trace on the fewest nodes, by the best plan of a full search."""
    return EstimateRecord(
        workload=workload,
        cell=Cell(
            gpu_type=gpu_type, gpus=gpus, pipeline_degree=BEST_FOUND, nodes=math.ceil(gpus / 4)
        ),
        iter_time_s=iter_time_s,
        source=EstimateSource.MEASURED,
    )


@cache
def estimates(workload: Workload = SMALL, factor: float = 1.0) -> WorkloadEstimates:
    """Return the estimates of a workload that was measured on A100, and on other types not."""
    runs = [a_run(workload, "a100", n, factor * 8.0 / n) for n in (1, 2, 4, 8)]
    runs += [a_run(workload, "v100", 4, math.inf)]
    return WorkloadEstimates.of(workload, [a_kind("a100"), a_kind("v100"), a_kind("a40")], runs)


def seconds(of: WorkloadEstimates, name: str, *counts: int) -> dict[tuple[int, int], float]:
    """Return the iteration times on A100 by GPUs and nodes."""
    return {
        (e.cell.gpus, e.cell.nodes): e.iter_time_s
        for e in of.records(name, counts)
        if e.cell.gpu_type == "a100"
    }


def test_the_planned_time_is_that_of_the_fastest_degree_of_the_real_planner() -> None:
    of = estimates()
    cells = of.plain.cells(SMALL, "a100", 4, nodes=2)
    for nodes in (1, 2):
        best_s = min(c.record.iter_time_s for c in cells if c.record.cell.nodes == nodes)
        assert seconds(of, UNPROFILED, 4)[4, nodes] == best_s


def test_a_profile_multiplies_compute_by_the_ratio_of_the_smallest_run() -> None:
    of = estimates()
    ratio = measured_ratio("a100", of.plain, of.truth)
    assert ratio is not None
    by_sheet, by_profile = (seconds(of, name, 1)[1, 1] for name in (UNPROFILED, PLANNED))
    assert by_profile == pytest.approx(8.0, rel=0.02)  # one GPU does not communicate
    assert by_profile / by_sheet == pytest.approx(ratio, rel=0.02)


def test_only_the_smallest_run_of_a_type_is_learned_from() -> None:
    runs = list(estimates().truth)
    changed = [replace(e, iter_time_s=99.0) if e.cell.gpus > 1 else e for e in runs]
    of = WorkloadEstimates.of(SMALL, estimates().kinds.values(), changed)
    assert seconds(of, PLANNED, 4) == seconds(estimates(), PLANNED, 4)


def test_estimates_by_data_sheets_do_not_depend_on_the_trace() -> None:
    slow = estimates(factor=3.0)
    assert seconds(slow, UNPROFILED, 1, 8) == seconds(estimates(), UNPROFILED, 1, 8)
    assert seconds(slow, PLANNED, 1)[1, 1] > 2 * seconds(estimates(), PLANNED, 1)[1, 1]


def test_pure_data_parallelism_is_never_faster_than_the_planner() -> None:
    of = estimates()
    plan = of.data_parallel_plan(8)
    assert (plan.pipeline_degree, plan.stages[0].dp, plan.stages[0].tp) == (1, 8, 1)
    assert plan.micro_batch * plan.accumulation == SMALL.global_batch
    by_plan, planned = (seconds(of, name, 2, 8) for name in (DATA_PARALLEL, PLANNED))
    assert by_plan.keys() == planned.keys()
    for shape, time_s in planned.items():
        assert time_s <= by_plan[shape] * (1 + 1e-9)
    assert math.isfinite(by_plan[8, 2])


def test_a_model_whose_replica_does_not_fit_has_no_data_parallel_plan() -> None:
    of = estimates(LARGE)
    assert math.isinf(seconds(of, DATA_PARALLEL, 8)[8, 2])
    assert math.isfinite(seconds(of, PLANNED, 8)[8, 2])


@pytest.mark.parametrize("name", KNOWLEDGE)
def test_types_and_counts_without_a_run_are_left_out_whatever_is_known(name: str) -> None:
    """It does not run on V100, nobody tried it on A40, and the trace has no 16 GPUs."""
    records = list(estimates().records(name, (4, 6, 16)))
    assert {(e.cell.gpu_type, e.cell.gpus) for e in records} == {("a100", 4)}
    assert {e.cell.pipeline_degree for e in records} == {BEST_FOUND}


def test_rows_give_back_what_they_were_made_of() -> None:
    runs = list(estimates().truth)
    assert records_of(rows_of(runs)) == runs


def test_a_workload_is_estimated_for_multiples_of_the_gpus_that_its_jobs_request() -> None:
    runs = [a_run(SMALL, "a100", n, 8.0 / n) for n in (1, 2, 4, 8)]
    kind = a_kind("a100")
    options = {"name": kind.gpu_type.name, "memory_bytes": kind.gpu_type.memory_bytes}
    result = estimate_workload(
        {"model": "bert", "params": "760M", "global_batch": 128},
        [4],
        [(options, [4, 4])],
        rows_of(runs),
    )
    assert {row[4] for row in result[PLANNED]} == {2, 4, 8}
    assert {len(result[name]) for name in KNOWLEDGE} == {len(result[PLANNED])}


def test_workloads_of_all_seeds_are_estimated_and_unknown_models_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = [WorkloadSpec(trace=SYNTHETIC, gpus_share=0.05, jobs=2, seed=k) for k in (0, 1)]
    worlds = {work.seed: make_scenario(work) for work in works}
    second = worlds[1].scenario
    strange = Workload(model="strange", params="1B", global_batch=8)
    first, *others = second.arrivals
    jobs = [first._replace(spec=replace(first.spec, workload=strange)), *others]
    worlds[1] = replace(worlds[1], scenario=replace(second, arrivals=jobs))
    types = [*worlds[0].scenario.gpu_types, GpuType(name="abacus", memory_bytes=2**30)]
    worlds[0] = replace(worlds[0], scenario=replace(worlds[0].scenario, gpu_types=types))
    monkeypatch.setattr(
        "tessera.benchmarks.schedulers.knowledge.make_scenario", lambda work: worlds[work.seed]
    )
    known = learn_workloads(works, HERE)
    assert known.unknown == {strange}
    assert known.unknown_types == {"abacus"}
    expected = {a.spec.workload for w in worlds.values() for a in w.scenario.arrivals} - {strange}
    for name in KNOWLEDGE:
        assert {e.workload for e in records_of(known.rows[name])} == expected
