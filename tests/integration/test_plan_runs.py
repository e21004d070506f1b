"""Runs that measure a plan, and plans that the runtime of each job can run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.store import Store
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware.cluster_types import catalogue_of, hardware_of
from tessera.estimator.models import known_models
from tessera.estimator.plan_corrections import configuration_of
from tessera.estimator.plans import Shape
from tessera.estimator.profiling.tasks import LAST_PRIORITY, LEAST_WEIGHT, ProfilingOptions
from tessera.estimator.reconfiguration.appendix import appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import ConfigurationTable
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import Capacity
from tessera.formulation.base.values import RUN_LABEL, EstimateSource, GpuType, Workload
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    ZeroStage,
)
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.job.runtimes import DEEPSPEED, JAX, RUNTIMES, TORCHRUN
from tessera.formulation.job.techniques import PlanLimits
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service.server.estimates.deriver import CellDeriver
from tessera.service.server.settings.config import Config
from tests.support.configurations import TRUE
from tests.support.decided_rounds import decide, plan_of
from tests.support.stored_cluster import (
    C,
    a_record,
    a_spec,
    apply_event,
    cells_of,
    execute,
    job,
    submit,
)

BERT = Workload(model="bert", params="1.3B", global_batch=256)
GPU = "a100-80"


@pytest.fixture
def cluster(store: Store, database: Database) -> Store:
    """Return the store with a cluster of two nodes of 8 GPUs that state their hosts."""
    kind = GpuType(name=GPU, memory_bytes=80 * 2**30)
    store.change(upsert_cluster, C, [kind], None)
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


def a_deriver(store: Store, runs: int = 7) -> CellDeriver:
    options = ProfilingOptions(runs=runs, run_s=60.0)
    return CellDeriver(store, catalogue_of(), (0.5, 1.0), profiling=options)


def runs_of(store: Store) -> list[JobSpec]:
    return [job(store, run.name).spec for run in store.estimation(C).runs]


def test_a_job_that_asks_gets_seven_runs_of_its_own_program_once(cluster: Store) -> None:
    submit(cluster, a_job())
    deriver = a_deriver(cluster)
    deriver.derive(C)
    runs = runs_of(cluster)
    assert len({run.name for run in runs}) == 7
    assert len({run.plan for run in runs}) == 7
    plans = [run.plan for run in runs if run.plan is not None]
    assert sum(plan.offload is not Offload.NONE for plan in plans) >= 3
    assert len({plan.gpus for plan in plans}) > 1
    for run, plan in zip(runs, plans, strict=True):
        assert RUNTIMES[DEEPSPEED].refuse_plan(plan) == ""
        assert (run.command, run.runtime) == (("train.py", "--lr", "1e-4"), DEEPSPEED)
        assert (run.workload, run.tenant) == (BERT, "nlp")
        assert (run.priority, run.weight, run.guaranteed) == (LAST_PRIORITY, LEAST_WEIGHT, False)
        assert (run.requested_gpu_type, run.requested_gpus) == (GPU, plan.gpus)
        assert run.labels == {RUN_LABEL: "j"}
        assert not run.profile
        assert 30 <= run.iterations <= 1000
    for _ in range(2):
        deriver.derive(C)
    a_deriver(cluster).derive(C)
    assert [run.name for run in runs_of(cluster)] == [run.name for run in runs]


def test_a_round_gives_runs_the_gpus_that_jobs_leave_and_their_own_plans(
    cluster: Store,
) -> None:
    submit(cluster, a_job(max_gpus=2))
    deriver = a_deriver(cluster)
    for _ in range(2):
        deriver.derive(C)
    decide(cluster)
    assert job(cluster, "j").allocation is not None
    for run in runs_of(cluster):
        assert plan_of(cluster, run.name) == run.plan


def test_a_job_gets_its_runs_once_it_asks_and_the_setting_allows_it(cluster: Store) -> None:
    submit(cluster, a_job("first", profile=False))
    assert a_deriver(cluster).derive(C) == 1
    submit(cluster, a_job())
    a_deriver(cluster, 0).derive(C)
    assert not cluster.estimation(C).runs
    assert all("no model of runs" not in r.provenance for r in estimates_of(cluster))
    a_deriver(cluster).derive(C)  # although its estimates are there
    assert len(runs_of(cluster)) == 7


def test_a_job_whose_plans_cannot_be_measured_says_why(cluster: Store) -> None:
    submit(cluster, a_job(launch=LaunchSpec(runtime="replay"), command=()))
    a_deriver(cluster).derive(C)
    assert not cluster.estimation(C).runs
    texts = [record.provenance for record in estimates_of(cluster)]
    assert any("its runtime replay trains nothing that could be measured" in t for t in texts)


def test_too_few_plans_to_measure_say_what_would_be_enough(cluster: Store) -> None:
    small = Workload(model="bert", params="1.3B", global_batch=1)
    submit(cluster, a_job(requested_gpus=1, workload=small, launch=LaunchSpec(runtime=TORCHRUN)))
    a_deriver(cluster).derive(C)
    assert not cluster.estimation(C).runs
    texts = [record.provenance for record in estimates_of(cluster, global_batch=1)]
    assert any("but 7 are to be measured; allow more plans, placements" in t for t in texts)


def test_runs_end_with_the_job_that_asked_and_past_their_limit(
    cluster: Store, database: Database
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


def estimates_of(store: Store, global_batch: int = 256) -> list[EstimateRecord]:
    return cells_of(store, replace(BERT, global_batch=global_batch))


def true_times(store: Store) -> Callable[[ExecutionPlan], float]:
    """Return the times of plans on a cluster that is as the published model says."""
    (kind,) = store.estimation(C).kinds
    hardware = {GPU: hardware_of("t", kind, catalogue_of())}
    estimator = Estimator(hardware, known_models([BERT], ()), ())

    def time_of(plan: ExecutionPlan) -> float:
        nodes = len(plan.shape)
        shape = Shape(nodes=nodes, gpus_per_node=plan.gpus // nodes)
        configuration = configuration_of(estimator.setting(BERT, GPU, shape), plan, "bert/1.3B")
        return float(appendix_iteration_s(ConfigurationTable.of([configuration]), TRUE)[0])

    return time_of


MEASURE = """
INSERT INTO measurements (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, generation,
    iter_time_s, source)
SELECT j.workload_id, t.id, {gpus}, {nodes}, 1, j.plan_id, 1, {time_s}, {source}
FROM jobs j JOIN gpu_types t ON t.name = '{gpu_type}' WHERE j.name = '{name}'
"""


def test_measured_runs_choose_a_model_that_corrects_the_other_plans(
    cluster: Store, database: Database
) -> None:
    submit(cluster, a_job())
    deriver, time_of = a_deriver(cluster), true_times(cluster)
    deriver.derive(C)
    assert any(
        "none was measured by a recorded plan" in r.provenance for r in estimates_of(cluster)
    )
    for run in runs_of(cluster):
        assert run.plan is not None
        values = {
            "gpus": run.requested_gpus,
            "nodes": len(run.plan.shape),
            "time_s": time_of(run.plan),
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


PIPELINED = Workload(model="bert", params="6.7B", global_batch=128)
"""A model whose best plan on 8 x a40 is a pipeline."""
LAYERS = 34


@pytest.fixture
def a40_cluster(store: Store) -> Store:
    """Return the store with a cluster of three nodes of 8 x a40, without estimates."""
    kind = GpuType(name="a40", memory_bytes=48 * 2**30)
    store.change(upsert_cluster, C, [kind], None)
    for i in range(3):
        store.hello(C, f"agent-a40-{i}", "first", [NodeSpec(name=f"n{i}", gpu_type="a40", gpus=8)])
    return store


def submit_with(store: Store, database: Database, runtimes: dict[str, str], **more: Any) -> None:
    """Queue jobs, each with its runtime."""
    specs = [a_queued_job(name, **more) for name in runtimes]
    store.change(submit_jobs, C, specs)
    for name, runtime in runtimes.items():
        execute(database, f"UPDATE jobs SET runtime = '{runtime}' WHERE name = '{name}'")


def a_queued_job(name: str, **more: Any) -> JobSpec:
    return a_spec(name, **{"workload": PIPELINED, "requested_gpus": 8, "max_gpus": 8} | more)


def derive(store: Store) -> int:
    return CellDeriver(store, catalogue_of(), (1.0,)).derive(C)


def derived_plans(database: Database) -> set[str]:
    """Return the ids of the plans of the derived estimates that run."""
    query = """SELECT p.name FROM estimates e JOIN plans p ON p.id = e.plan_id
        WHERE e.derived AND e.iter_time_s < 'Infinity'"""
    with database.read() as connection:
        return set(connection.execute(sa.text(query)).scalars())


def test_a_first_job_of_a_runtime_makes_the_workloads_plans_derived_again(
    a40_cluster: Store, database: Database
) -> None:
    submit_with(a40_cluster, database, {"any": "replay"})
    assert derive(a40_cluster) == 1
    before = derived_plans(database)
    assert derive(a40_cluster) == 0
    submit_with(a40_cluster, database, {"jax": JAX})
    assert a40_cluster.snapshot(C).runtimes.name == (JAX,)
    assert derive(a40_cluster) == 1
    assert derived_plans(database) > before  # the best plans of all are in f16, which JAX refuses
    assert derive(a40_cluster) == 0
    decide(a40_cluster)
    assert RUNTIMES[JAX].refuse_plan(plan_of(a40_cluster, "jax")) == ""


def test_once_its_last_job_has_ended_a_runtimes_plans_are_deleted(
    a40_cluster: Store, database: Database
) -> None:
    submit_with(a40_cluster, database, {"any": "replay"})
    derive(a40_cluster)
    before = derived_plans(database)
    submit_with(a40_cluster, database, {"deep": DEEPSPEED})
    derive(a40_cluster)
    apply_event(a40_cluster, "deep", JobEvent.CANCEL)
    assert derive(a40_cluster) == 1
    assert derived_plans(database) == before


def test_a_users_estimates_without_a_recorded_plan_are_offered_unless_they_are_pipelines(
    a40_cluster: Store, database: Database
) -> None:
    records = [
        a_record(
            8, workload=PIPELINED, gpu_type="a40", pipeline_degree=degree, iter_time_s=2.0 / degree
        )
        for degree in (1, 2)
    ]
    a40_cluster.change(upsert_estimates, C, records)
    submit_with(a40_cluster, database, {"torch": TORCHRUN, "any": "replay"})
    decisions = decide(a40_cluster)
    assert decisions["torch"].cell.pipeline_degree == 1
    assert decisions["any"].cell.pipeline_degree == 2


def test_a_stated_plan_leaves_the_best_plan_of_its_shape_in_place(
    a40_cluster: Store, database: Database
) -> None:
    submit_with(a40_cluster, database, {"any": "replay"})
    derive(a40_cluster)
    before = derived_plans(database)
    own = a_plan(dp=4, tp=2)
    a40_cluster.change(submit_jobs, C, [a_queued_job("own", plan=own)])
    derive(a40_cluster)
    assert derived_plans(database) == before | {own.digest}


def test_a_job_that_must_run_by_a_stated_plan_needs_no_other(
    a40_cluster: Store, database: Database
) -> None:
    submit_with(a40_cluster, database, {"torch": TORCHRUN}, plan=a_plan(dp=8))
    (wanted,) = a40_cluster.estimation(C).wanted
    assert wanted.limits == ()
    submit_with(
        a40_cluster,
        database,
        {"first": DEEPSPEED},
        plan=a_plan(dp=8),
        plan_first=True,
    )
    (wanted,) = a40_cluster.estimation(C).wanted
    assert wanted.limits == (PlanLimits(runtime=DEEPSPEED),)


def test_only_plans_of_restricted_jobs_are_looked_at(
    a40_cluster: Store, database: Database
) -> None:
    other = replace(PIPELINED, global_batch=64)
    submit_with(a40_cluster, database, {"other": "replay"}, workload=other)
    submit_with(a40_cluster, database, {"torch": TORCHRUN})
    derive(a40_cluster)
    snapshot = a40_cluster.snapshot(C)
    refused, e = set(snapshot.refused_plans.plan.tolist()), snapshot.estimates
    mine = int(snapshot.jobs.workload[snapshot.jobs.name.index("torch")])
    assert refused < set(e.plan[e.workload == mine].tolist())
    for plan in refused:
        assert snapshot.plans[plan] != ""
    free = int(snapshot.jobs.workload[snapshot.jobs.name.index("other")])
    assert not refused & set(e.plan[(e.workload == free) & (e.pipeline_degree > 1)].tolist())
    assert snapshot.jobs.runtime.tolist() == [-1, 0]


def a_plan(dp: int, tp: int = 1) -> ExecutionPlan:
    return ExecutionPlan(
        stages=(PlanStage(start=0, end=LAYERS, dp=dp, tp=tp),),
        micro_batch=8,
        accumulation=16,
        zero=ZeroStage.PARAMETERS,
        precision=Precision.F16,
        model="bert/6.7B",
    )


def plans_of(store: Store, workload: Workload = PIPELINED) -> list[ExecutionPlan]:
    return [record.plan for record in cells_of(store, workload) if record.plan is not None]


def test_what_nodes_state_of_their_hosts_makes_choices_of_offloaded_plans(
    a40_cluster: Store, database: Database
) -> None:
    large = Workload(model="llama30", params="30B", global_batch=64)
    submit_with(a40_cluster, database, {"deep": DEEPSPEED}, workload=large)
    (kind,) = a40_cluster.estimation(C).kinds
    assert kind.node_capacity is None
    assert derive(a40_cluster) == 1
    assert {plan.cpus_per_gpu for plan in plans_of(a40_cluster, large)} == {0}
    execute(database, "UPDATE nodes SET cpus = 32, host_bytes = 2::bigint ^ 41 WHERE name = 'n0'")
    (kind,) = a40_cluster.estimation(C).kinds
    assert kind.node_capacity == Capacity(gpus=8, cpus=32, host_bytes=2**41)
    assert derive(a40_cluster) == 1
    assert {plan.cpus_per_gpu for plan in plans_of(a40_cluster, large)} >= {1, 2, 4}
    for record in cells_of(a40_cluster, large):
        if record.plan is not None and math.isfinite(record.iter_time_s):
            assert record.cpus == record.plan.cpus
            assert (record.host_bytes > 0) == (record.plan.offload is not Offload.NONE)
    assert derive(a40_cluster) == 0
