"""Jobs whose runtime cannot run every plan, in PostgreSQL: their plans are derived and offered."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.demand import Capacity
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    ZeroStage,
)
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.runtimes import DEEPSPEED, MEGATRON, RUNTIMES, TORCHRUN
from tessera.formulation.techniques import PlanLimits, Technique, techniques_of
from tessera.formulation.values import GpuType, Workload
from tessera.service.cells.deriver import CellDeriver
from tests.support.decided_rounds import decide, plan_of
from tests.support.stored_cluster import (
    C,
    a_record,
    a_spec,
    apply_event,
    cells_of,
    do,
    execute,
)

BERT = Workload(model="bert", params="6.7B", global_batch=128)
"""A model whose best plan on 8 x a40 is a pipeline."""
LAYERS = 34


@pytest.fixture
def cluster(store: PostgresStore) -> PostgresStore:
    """Return the store with a cluster of three nodes of 8 x a40, without estimates."""
    kind = GpuType(name="a40", memory_bytes=48 * 2**30)
    do(store, lambda w: w.upsert_cluster(C, [kind], None))
    for i in range(3):
        store.hello(C, f"agent-a40-{i}", "first", [NodeSpec(name=f"n{i}", gpu_type="a40", gpus=8)])
    return store


def submit(store: PostgresStore, database: Database, runtimes: dict[str, str], **more: Any) -> None:
    """Queue jobs, each with its runtime."""
    specs = [a_job(name, **more) for name in runtimes]
    do(store, lambda w: w.submit_jobs(C, specs))
    for name, runtime in runtimes.items():
        execute(database, f"UPDATE jobs SET runtime = '{runtime}' WHERE name = '{name}'")


def a_job(name: str, **more: Any) -> JobSpec:
    return a_spec(name, **{"workload": BERT, "requested_gpus": 8, "max_gpus": 8} | more)


def derive(store: PostgresStore) -> int:
    return CellDeriver(store, catalogue_of(), (1.0,)).derive(C)


def derived_plans(database: Database) -> set[str]:
    """Return the ids of the plans of the derived estimates that run."""
    query = """SELECT p.name FROM estimates e JOIN plans p ON p.id = e.plan_id
        WHERE e.derived AND e.iter_time_s < 'Infinity'"""
    with database.read() as connection:
        return set(connection.execute(sa.text(query)).scalars())


def test_each_job_gets_a_plan_that_its_runtime_runs(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, database, {"any": "command", "torch": TORCHRUN, "mega": MEGATRON})
    assert derive(cluster) == 1
    decide(cluster)
    assert plan_of(cluster, "any").pipeline_degree > 1
    plan = plan_of(cluster, "torch")
    assert RUNTIMES[TORCHRUN].refuse_plan(plan) == ""
    assert plan.stages[0].dp == plan.gpus == 8
    assert RUNTIMES[MEGATRON].refuse_plan(plan_of(cluster, "mega")) == ""


def test_a_first_job_of_a_runtime_makes_the_workloads_plans_derived_again(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, database, {"any": "replay"})
    assert derive(cluster) == 1
    before = derived_plans(database)
    assert derive(cluster) == 0
    submit(cluster, database, {"torch": TORCHRUN})
    assert cluster.snapshot(C).runtimes.name == (TORCHRUN,)
    assert derive(cluster) == 1
    assert derived_plans(database) > before
    assert derive(cluster) == 0
    decide(cluster)
    assert RUNTIMES[TORCHRUN].refuse_plan(plan_of(cluster, "torch")) == ""


def test_once_its_last_job_has_ended_a_runtimes_plans_are_deleted(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, database, {"any": "replay"})
    derive(cluster)
    before = derived_plans(database)
    submit(cluster, database, {"deep": DEEPSPEED})
    derive(cluster)
    apply_event(cluster, "deep", JobEvent.CANCEL)
    assert derive(cluster) == 1
    assert derived_plans(database) == before


def test_a_job_says_that_its_runtime_can_run_no_plan_of_a_users_estimates(
    cluster: PostgresStore, database: Database
) -> None:
    given = estimate_of(a_plan(dp=1, tp=8))
    do(cluster, lambda w: w.upsert_estimates(C, [given]))
    submit(cluster, database, {"torch": TORCHRUN, "any": "replay"})
    derive(cluster)
    decisions = decide(cluster)
    reason = decisions["torch"].reason
    assert reason is not None
    assert reason.code is ReasonCode.NO_RUNNABLE_PLAN
    assert plan_of(cluster, "any") == given.plan


def test_a_users_estimates_without_a_recorded_plan_are_offered_unless_they_are_pipelines(
    cluster: PostgresStore, database: Database
) -> None:
    records = [
        a_record(8, workload=BERT, gpu_type="a40", pipeline_degree=degree, iter_time_s=2.0 / degree)
        for degree in (1, 2)
    ]
    do(cluster, lambda w: w.upsert_estimates(C, records))
    submit(cluster, database, {"torch": TORCHRUN, "any": "replay"})
    decisions = decide(cluster)
    assert decisions["torch"].cell.pipeline_degree == 1
    assert decisions["any"].cell.pipeline_degree == 2


def test_a_stated_plan_leaves_the_best_plan_of_its_shape_in_place(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, database, {"any": "replay"})
    derive(cluster)
    before = derived_plans(database)
    own = a_plan(dp=4, tp=2)
    do(cluster, lambda w: w.submit_jobs(C, [a_job("own", stated_plan=own)]))
    derive(cluster)
    assert derived_plans(database) == before | {own.digest}


def test_a_job_that_must_run_by_a_stated_plan_needs_no_other(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, database, {"torch": TORCHRUN}, stated_plan=a_plan(dp=8))
    (wanted,) = cluster.estimation(C).wanted
    assert wanted.limits == ()
    submit(
        cluster, database, {"first": DEEPSPEED}, stated_plan=a_plan(dp=8), stated_plan_first=True
    )
    (wanted,) = cluster.estimation(C).wanted
    assert wanted.limits == (PlanLimits(runtime=DEEPSPEED),)


def test_only_plans_of_restricted_jobs_are_looked_at(
    cluster: PostgresStore, database: Database
) -> None:
    other = replace(BERT, global_batch=64)
    submit(cluster, database, {"other": "replay"}, workload=other)
    submit(cluster, database, {"torch": TORCHRUN})
    derive(cluster)
    snapshot = cluster.snapshot(C)
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


def estimate_of(plan: ExecutionPlan) -> EstimateRecord:
    record = a_record(plan.gpus, workload=BERT, gpu_type="a40", iter_time_s=3.0)
    return record.with_plan(plan)


def set_techniques(database: Database, name: str, *techniques: Technique) -> None:
    words = json.dumps(techniques)
    execute(database, f"UPDATE jobs SET techniques = '{words}' WHERE name = '{name}'")


def test_jobs_get_plans_of_the_techniques_that_they_name(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, database, {"any": "command", "some": "command"})
    named = (Technique.DATA_PARALLELISM, Technique.ZERO_2, Technique.ACCUMULATION)
    set_techniques(database, "some", *named)
    (wanted,) = cluster.estimation(C).wanted
    assert wanted.limits == (PlanLimits(runtime="command", techniques=named),)
    assert wanted.is_open
    derive(cluster)
    both = plans_of(cluster)
    assert any(plan.pipeline_degree > 1 for plan in both)
    assert any(techniques_of(plan) <= {*named} for plan in both)
    set_techniques(database, "any", *named)
    (wanted,) = cluster.estimation(C).wanted
    assert not wanted.is_open
    fresh = replace(BERT, global_batch=64)
    submit(cluster, database, {"fresh": "command"}, workload=fresh)
    set_techniques(database, "fresh", *named)
    derive(cluster)
    plans = plans_of(cluster, fresh)
    assert plans
    assert all(techniques_of(plan) <= {*named} for plan in plans)


def plans_of(store: PostgresStore, workload: Workload = BERT) -> list[ExecutionPlan]:
    return [record.plan for record in cells_of(store, workload) if record.plan is not None]


def test_what_nodes_state_of_their_hosts_makes_choices_of_offloaded_plans(
    cluster: PostgresStore, database: Database
) -> None:
    large = Workload(model="llama30", params="30B", global_batch=64)
    submit(cluster, database, {"deep": DEEPSPEED}, workload=large)
    (kind,) = cluster.estimation(C).kinds
    assert kind.node_capacity is None
    assert derive(cluster) == 1
    assert {plan.cpus_per_gpu for plan in plans_of(cluster, large)} == {0}
    execute(database, "UPDATE nodes SET cpus = 32, host_bytes = 2::bigint ^ 41 WHERE name = 'n0'")
    (kind,) = cluster.estimation(C).kinds
    assert kind.node_capacity == Capacity(gpus=8, cpus=32, host_bytes=2**41)
    assert derive(cluster) == 1
    assert {plan.cpus_per_gpu for plan in plans_of(cluster, large)} >= {1, 2, 4}
    for record in cells_of(cluster, large):
        if record.plan is not None and math.isfinite(record.iter_time_s):
            assert record.cpus == record.plan.cpus
            assert (record.host_bytes > 0) == (record.plan.offload is not Offload.NONE)
    assert derive(cluster) == 0
