"""Runs of a job's own program that measure its plans, in PostgreSQL: created, bounded, learned from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware.cluster_types import catalogue_of, hardware_of
from tessera.estimator.models import known_models
from tessera.estimator.plan_corrections import configuration_of
from tessera.estimator.plans import Shape
from tessera.estimator.profiling.tasks import LAST_QUEUE, LEAST_WEIGHT, ProfilingOptions
from tessera.estimator.reconfiguration.appendix import appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import ConfigurationTable
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ExecutionPlan, Offload
from tessera.formulation.launch import LaunchSpec
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.runtimes import DEEPSPEED, RUNTIMES, TORCHRUN
from tessera.formulation.values import RUN_LABEL, Cell, EstimateSource, GpuType, Workload
from tessera.service.cells.deriver import CellDeriver
from tessera.service.config import Config
from tests.support.configurations import TRUE
from tests.support.decided_rounds import decide, plan_of
from tests.support.stored_cluster import (
    C,
    a_spec,
    apply_event,
    cells_of,
    do,
    execute,
    job,
    submit,
)

BERT = Workload(model="bert", params="1.3B", global_batch=256)
GPU = "a100-80"


@pytest.fixture
def cluster(store: PostgresStore, database: Database) -> PostgresStore:
    """Return the store with a cluster of two nodes of 8 GPUs that state their hosts."""
    kind = GpuType(name=GPU, memory_bytes=80 * 2**30)
    do(store, lambda w: w.upsert_cluster(C, [kind], None))
    for i in range(2):
        store.hello(C, f"agent-{i}", "first", [NodeSpec(name=f"n{i}", gpu_type=GPU, gpus=8)])
    execute(database, "UPDATE nodes SET cpus = 96, host_bytes = 2::bigint ^ 41")
    return store


def a_job(name: str = "j", **more: Any) -> JobSpec:
    given: dict[str, Any] = {
        "workload": BERT,
        "requested_gpus": 2,
        "profile": True,
        "command": ("train.py", "--lr", "1e-4"),
        "launch": LaunchSpec(runtime=DEEPSPEED),
        "tenant": "nlp",
    }
    return a_spec(name, **(given | more))


def a_deriver(store: PostgresStore, runs: int = 7) -> CellDeriver:
    options = ProfilingOptions(runs=runs, run_s=60.0)
    return CellDeriver(store, catalogue_of(), (0.5, 1.0), profiling=options)


def runs_of(store: PostgresStore) -> list[JobSpec]:
    return [job(store, run.name).spec for run in store.estimation(C).runs]


def test_a_job_that_asks_gets_seven_runs_of_its_own_program_once(cluster: PostgresStore) -> None:
    submit(cluster, a_job())
    deriver = a_deriver(cluster)
    deriver.derive(C)
    runs = runs_of(cluster)
    assert len({run.name for run in runs}) == 7
    assert len({run.stated_plan for run in runs}) == 7
    plans = [run.stated_plan for run in runs if run.stated_plan is not None]
    assert sum(plan.offload is not Offload.NONE for plan in plans) >= 3
    assert len({plan.gpus for plan in plans}) > 1
    for run, plan in zip(runs, plans, strict=True):
        assert RUNTIMES[DEEPSPEED].refuse_plan(plan) == ""
        assert (run.command, run.runtime) == (("train.py", "--lr", "1e-4"), DEEPSPEED)
        assert (run.workload, run.tenant) == (BERT, "nlp")
        assert (run.queue, run.weight, run.guaranteed) == (LAST_QUEUE, LEAST_WEIGHT, False)
        assert (run.requested_type, run.requested_gpus) == (GPU, plan.gpus)
        assert run.labels == {RUN_LABEL: "j"}
        assert not run.profile
        assert 30 <= run.iterations <= 1000
    for _ in range(2):
        deriver.derive(C)
    a_deriver(cluster).derive(C)
    assert [run.name for run in runs_of(cluster)] == [run.name for run in runs]


def test_a_round_gives_runs_the_gpus_that_jobs_leave_and_their_own_plans(
    cluster: PostgresStore,
) -> None:
    submit(cluster, a_job(max_gpus=2))
    deriver = a_deriver(cluster)
    for _ in range(2):
        deriver.derive(C)
    decide(cluster)
    assert job(cluster, "j").allocation is not None
    for run in runs_of(cluster):
        assert plan_of(cluster, run.name) == run.stated_plan


@pytest.mark.parametrize(
    ("runs", "changed"), [(0, {}), (7, {"profile": False})], ids=["no setting", "no request"]
)
def test_without_setting_or_request_nothing_runs(
    cluster: PostgresStore, runs: int, changed: dict[str, Any]
) -> None:
    submit(cluster, a_job(**changed))
    a_deriver(cluster, runs).derive(C)
    assert not cluster.estimation(C).runs
    assert all("no model of runs" not in r.provenance for r in estimates_of(cluster))


def test_a_job_that_starts_to_ask_gets_its_runs_although_its_estimates_are_there(
    cluster: PostgresStore,
) -> None:
    submit(cluster, a_job("first", profile=False))
    deriver = a_deriver(cluster)
    assert deriver.derive(C) == 1
    submit(cluster, a_job())
    deriver.derive(C)
    assert len(runs_of(cluster)) == 7


def test_a_job_whose_plans_cannot_be_measured_says_why(cluster: PostgresStore) -> None:
    submit(cluster, a_job(launch=LaunchSpec(runtime="replay"), command=()))
    a_deriver(cluster).derive(C)
    assert not cluster.estimation(C).runs
    texts = [record.provenance for record in estimates_of(cluster)]
    assert any("its runtime replay trains nothing that could be measured" in t for t in texts)


def test_too_few_plans_to_measure_say_what_would_be_enough(cluster: PostgresStore) -> None:
    small = Workload(model="bert", params="1.3B", global_batch=1)
    submit(cluster, a_job(requested_gpus=1, workload=small, launch=LaunchSpec(runtime=TORCHRUN)))
    a_deriver(cluster).derive(C)
    assert not cluster.estimation(C).runs
    texts = [record.provenance for record in estimates_of(cluster, global_batch=1)]
    assert any("but 7 are to be measured; allow more plans, placements" in t for t in texts)


def test_runs_end_with_the_job_that_asked_and_past_their_limit(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, a_job())
    deriver = a_deriver(cluster)
    deriver.derive(C)
    first, *others = runs_of(cluster)
    execute(
        database,
        f"UPDATE jobs SET service_gpu_s = 5000, started_at = now() WHERE name = '{first.name}'",
    )
    deriver.derive(C)
    assert job(cluster, first.name).state is JobState.CANCELLED
    assert {job(cluster, run.name).state for run in others} == {JobState.QUEUED}
    apply_event(cluster, "j", JobEvent.CANCEL)
    deriver.derive(C)
    assert {job(cluster, run.name).state for run in runs_of(cluster)} == {JobState.CANCELLED}


def estimates_of(store: PostgresStore, global_batch: int = 256) -> list[EstimateRecord]:
    return cells_of(store, replace(BERT, global_batch=global_batch))


def true_times(store: PostgresStore) -> Callable[[ExecutionPlan], float]:
    """Return the times of plans on a cluster that is as the published model says."""
    (kind,) = store.estimation(C).kinds
    hardware = {GPU: hardware_of("t", kind, catalogue_of())}
    estimator = Estimator(hardware, known_models([BERT], ()), ())

    def time_of(plan: ExecutionPlan) -> float:
        nodes = len(plan.shape)
        shape = Shape(nodes=nodes, gpus_per_node=plan.gpus // nodes)
        cell = Cell(gpu_type=GPU, gpus=plan.gpus, pipeline_degree=1, nodes=nodes)
        configuration = configuration_of(estimator.setting(BERT, cell, shape), plan, "bert/1.3B")
        return float(appendix_iteration_s(ConfigurationTable.of([configuration]), TRUE)[0])

    return time_of


MEASURE = """
INSERT INTO measurements (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, generation,
    iter_time_s, source)
SELECT j.workload_id, t.id, {gpus}, {nodes}, 1, j.stated_plan_id, 1, {time_s}, {source}
FROM jobs j JOIN gpu_types t ON t.name = '{gpu_type}' WHERE j.name = '{name}'
"""


def test_measured_runs_choose_a_model_that_corrects_the_other_plans(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, a_job())
    deriver, time_of = a_deriver(cluster), true_times(cluster)
    deriver.derive(C)
    assert any(
        "none was measured by a recorded plan" in r.provenance for r in estimates_of(cluster)
    )
    for run in runs_of(cluster):
        assert run.stated_plan is not None
        values = {
            "gpus": run.requested_gpus,
            "nodes": len(run.stated_plan.shape),
            "time_s": time_of(run.stated_plan),
            "source": int(EstimateSource.MEASURED),
            "gpu_type": GPU,
            "name": run.name,
        }
        execute(database, MEASURE.format(**values))
    deriver.derive(C)
    corrected = [r for r in estimates_of(cluster) if "left-out ones by" in r.provenance]
    assert corrected
    for record in corrected:
        assert record.plan is not None
        assert "Morphling's model, fitted to 7 runs here" in record.provenance
        assert math.log(record.iter_time_s / time_of(record.plan)) == pytest.approx(0.0, abs=0.2)


@pytest.mark.parametrize("runs", [-1, 1, 6, 13])
def test_numbers_of_runs_that_teach_nothing_are_refused(runs: int) -> None:
    with pytest.raises(InvalidInput, match=r"profile_runs.* must be 0, or from 7"):
        Config(profile_runs=runs).profiling()
    assert Config(profile_runs=7).profiling().runs == 7
