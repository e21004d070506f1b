"""Execution plans of Cells: those that are derived, and those that users' estimates get.

The first tests are the smallest inputs that once had no Cell, or other Cells than before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.store import Store
from tessera.estimator.architectures.published import published_models
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.models import model_of
from tessera.formulation.base.values import BEST_FOUND, EstimateSource, GpuType, Workload
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.job.runtimes import COMMAND, JAX, MEGATRON
from tessera.formulation.job.techniques import PlanLimits
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.service.server.estimates.deriver import CellDeriver
from tests.support.decided_rounds import decide, plan_of
from tests.support.stored_cluster import (
    C,
    a_record,
    a_spec,
    agents_report,
    apply_event,
    cells_of,
    job,
    submit,
)

GPT = Workload(model="gpt2", params="1.5B", global_batch=64)
LLAMA = Workload(model="llama7", params="7B", global_batch=64)
UNKNOWN = Workload(model="sphinx", params="9B", global_batch=64)
OF_MEGATRON = {"command": ("pretrain_gpt.py",), "launch": LaunchSpec(runtime=MEGATRON)}
GIB = 2**30


@pytest.fixture
def sample(store: Store) -> Store:
    """Return a store of the cluster that `up` starts: 16 a100 on four nodes, and 16 v100 on one."""
    kinds = [GpuType(name=t, memory_bytes=m * GIB) for t, m in (("a100", 40), ("v100", 32))]
    store.change(upsert_cluster, C, kinds, None)
    nodes = [NodeSpec(name=f"a100-{i}", gpu_type="a100", gpus=4) for i in range(4)]
    for node in (*nodes, NodeSpec(name="v100-0", gpu_type="v100", gpus=16)):
        store.hello(C, f"agent-{node.name}", "first", [node])
    return store


def derive(store: Store) -> None:
    CellDeriver(store, catalogue_of(), (0.5, 1.0, 2.0)).derive(C)


def feasible(records: list[EstimateRecord]) -> list[EstimateRecord]:
    return [r for r in records if math.isfinite(r.iter_time_s)]


def list_offers(store: Store, name: str) -> set[tuple[Any, ...]]:
    """Return the Cells that a round offers a job, with their times and plans."""
    snapshot = store.snapshot(C)
    e = snapshot.estimates
    rows = e.workload == snapshot.jobs.workload[snapshot.jobs.name.index(name)]
    columns = (e.gpu_type, e.gpus, e.nodes, e.pipeline_degree, e.iter_time_s)
    plans = [snapshot.plans[p] for p in e.plan[rows].tolist()]
    return set(zip(*(c[rows].tolist() for c in columns), plans, strict=True))


def test_a_queued_job_of_another_runtime_and_its_end_change_no_cell_of_the_first(
    sample: Store,
) -> None:
    submit(sample, a_spec("gpt-a", workload=GPT, requested_gpus=8))
    derive(sample)
    first_offers = list_offers(sample, "gpt-a")
    submit(sample, a_spec("gpt-b", workload=GPT, requested_gpus=8, **OF_MEGATRON))
    derive(sample)
    with_megatron = list_offers(sample, "gpt-a")
    assert with_megatron >= first_offers
    assert min(c[4] for c in with_megatron) == min(c[4] for c in first_offers)
    apply_event(sample, "gpt-b", JobEvent.CANCEL)
    derive(sample)
    assert list_offers(sample, "gpt-a") >= first_offers
    decide(sample)
    assert job(sample, "gpt-a").allocation is not None


def estimate_cells(
    workload: Workload, gpu_type: str, gpus: int, node_gpus: int, memory_gib: int, runtime: str
) -> list[EstimateRecord]:
    """Return the Cells that fit on GPUs of a type, for jobs of a runtime."""
    hardware = replace(
        catalogue_of()[gpu_type], memory_bytes=memory_gib * GIB, gpus_per_node=node_gpus
    )
    estimator = Estimator({gpu_type: hardware}, {workload: model_of("model", workload, (), ())})
    cells = estimator.cells(workload, gpu_type, gpus, limits=PlanLimits(runtime=runtime))
    return feasible([cell.record for cell in cells])


@pytest.mark.parametrize(("gpu_type", "gpus"), [("h100", 8), ("h100", 16), ("a100-80", 8)])
def test_a_llama_of_a_batch_of_64_fits_on_nodes_of_eight(gpu_type: str, gpus: int) -> None:
    cells = estimate_cells(LLAMA, gpu_type, gpus, 8, 80, COMMAND)
    assert {r.cell.gpus for r in cells} == {gpus}
    assert all(r.plan is not None and r.plan.global_batch == 64 for r in cells)


@pytest.mark.full  # each takes about a second
@pytest.mark.parametrize(("model", "params"), sorted(published_models()))
def test_jax_can_run_each_published_model_on_the_v100_of_the_sample_cluster(
    model: str, params: str
) -> None:
    workload = Workload(model=model, params=params, global_batch=64)
    cells = estimate_cells(workload, "v100", 16, 16, 32, JAX)
    assert cells
    limits = PlanLimits(runtime=JAX)
    assert all(r.plan is not None and limits.allow(r.plan) for r in cells)


def an_import(degree: int, *, nodes: int = 2, gpus: int = 8, **changes: Any) -> EstimateRecord:
    """Return a user's estimate of the GPT without a plan."""
    fields = {"workload": GPT, "iter_time_s": 3.0, "provenance": "lab", "pipeline_degree": degree}
    return a_record(gpus, gpu_type="a100", nodes=nodes, **(fields | changes))


def import_cells(store: Store, *records: EstimateRecord) -> None:
    store.change(upsert_estimates, C, records)


@pytest.mark.parametrize(
    ("degree", "nodes", "source"),
    [
        (2, 2, EstimateSource.MEASURED),
        (1, 2, EstimateSource.PROFILED),
        (BEST_FOUND, 2, EstimateSource.MEASURED),
        (2, 0, EstimateSource.ANALYTIC),
    ],
)
def test_an_imported_cell_gets_the_best_plan_known_and_keeps_its_time(
    sample: Store, degree: int, nodes: int, source: EstimateSource
) -> None:
    import_cells(sample, an_import(degree, nodes=nodes, source=source, complete=True))
    derive(sample)
    (imported_cell,) = cells_of(sample, GPT)  # no job wants it
    assert imported_cell.plan is None
    submit(sample, a_spec("j", workload=GPT, requested_gpus=8))
    derive(sample)
    (record,) = cells_of(sample, GPT)
    assert record.plan is not None
    assert record.cell.pipeline_degree == record.plan.pipeline_degree
    assert record.plan.pipeline_degree == (degree or record.plan.pipeline_degree)
    assert (record.plan.gpus, record.plan.global_batch) == (8, 64)
    assert (record.iter_time_s, record.source, record.complete) == (3.0, source, True)
    assert record.provenance.startswith("lab; by the best plan known, predicted to take ")
    assert record.cell.nodes == (nodes or imported_cell.cell.nodes)
    derive(sample)
    assert cells_of(sample, GPT) == [record]
    decide(sample)
    assert plan_of(sample, "j") == record.plan


def test_a_cell_that_a_job_runs_on_stays_without_a_plan(sample: Store) -> None:
    submit(sample, a_spec("j", workload=GPT, requested_gpus=8))
    import_cells(sample, an_import(2))
    decide(sample)
    agents_report(sample)
    assert job(sample, "j").state is JobState.RUNNING
    import_cells(sample, an_import(4))
    derive(sample)
    plans = {r.cell.pipeline_degree: r.plan for r in cells_of(sample, GPT)}
    assert plans[2] is None
    assert plans[4] is not None
    apply_event(sample, "j", JobEvent.HOLD)
    agents_report(sample)
    derive(sample)
    assert all(r.plan is not None for r in cells_of(sample, GPT))


def test_cells_of_a_model_that_nobody_knows_stay_as_they_are_and_programs_run_by_them(
    sample: Store,
) -> None:
    import_cells(sample, an_import(2, workload=UNKNOWN))
    program = {"command": ("train",), "launch": LaunchSpec(runtime=COMMAND)}
    submit(sample, a_spec("any", workload=UNKNOWN, requested_gpus=8, **program))
    submit(sample, a_spec("stages", workload=UNKNOWN, requested_gpus=8, **OF_MEGATRON))
    derive(sample)
    (record,) = cells_of(sample, UNKNOWN)
    assert (record.plan, record.provenance) == (None, "lab")
    decide(sample)
    allocation = job(sample, "any").allocation
    assert allocation is not None
    assert (allocation.cell.pipeline_degree, allocation.cell.plan, allocation.plan) == (2, "", None)
    assert job(sample, "stages").allocation is None


def test_megatron_is_offered_no_pipeline_without_a_plan_and_gets_the_planned_one(
    sample: Store,
) -> None:
    import_cells(sample, an_import(2))
    submit(sample, a_spec("j", workload=GPT, requested_gpus=8, **OF_MEGATRON))
    decide(sample)
    assert job(sample, "j").allocation is None
    derive(sample)
    (record,) = (r for r in cells_of(sample, GPT) if r.iter_time_s == 3.0)
    assert record.plan is not None
    decide(sample)
    plan = plan_of(sample, "j")
    assert PlanLimits(runtime=MEGATRON).allow(plan)
    assert plan.pipeline_degree == 2


def times_and_plans(store: Store) -> dict[int, tuple[float, bool]]:
    """Return the time of each of the GPT's Cells by its degree, and whether it has a plan."""
    return {
        r.cell.pipeline_degree: (r.iter_time_s, r.plan is not None) for r in cells_of(store, GPT)
    }


def test_of_two_imported_cells_with_one_best_plan_the_one_with_a_degree_gets_it(
    sample: Store,
) -> None:
    import_cells(sample, an_import(BEST_FOUND, iter_time_s=2.5), an_import(2))
    submit(sample, a_spec("j", workload=GPT, requested_gpus=8))
    derive(sample)
    assert times_and_plans(sample) == {BEST_FOUND: (2.5, False), 2: (3.0, True)}
    derive(sample)
    assert times_and_plans(sample) == {BEST_FOUND: (2.5, False), 2: (3.0, True)}


@pytest.mark.parametrize("degree", [2, BEST_FOUND])
def test_a_repeated_import_replaces_the_time_of_the_planned_cell(
    sample: Store, degree: int
) -> None:
    submit(sample, a_spec("j", workload=GPT, requested_gpus=8))
    import_cells(sample, an_import(degree))
    derive(sample)
    (first,) = cells_of(sample, GPT)
    import_cells(sample, an_import(degree, iter_time_s=4.0, provenance="new"))
    (second,) = cells_of(sample, GPT)
    provenance = "new; by the best plan known"
    assert second == replace(first, iter_time_s=4.0, provenance=provenance)
    import_cells(sample, an_import(3, iter_time_s=9.0))
    assert len(cells_of(sample, GPT)) == 2
    import_cells(sample, an_import(degree, iter_time_s=math.inf))
    assert {(r.cell.pipeline_degree, r.iter_time_s, r.plan) for r in cells_of(sample, GPT)} == {
        (degree, math.inf, None),
        (3, 9.0, None),
    }


def test_a_cell_that_is_stated_with_its_plan_is_not_replaced_by_one_without(
    sample: Store,
) -> None:
    submit(sample, a_spec("j", workload=GPT, requested_gpus=8))
    import_cells(sample, an_import(2))
    derive(sample)
    (planned_cell,) = cells_of(sample, GPT)
    import_cells(sample, replace(planned_cell, iter_time_s=5.0, provenance="measured by this plan"))
    import_cells(sample, an_import(2))
    assert {(r.iter_time_s, r.plan) for r in cells_of(sample, GPT)} == {
        (5.0, planned_cell.plan),
        (3.0, None),
    }
