"""Tuning at launch, in PostgreSQL: plans to try, and the winners as measured plans of their Cells."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.clusters.deletion import delete_cluster
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.reads import list_estimates
from tessera.db.store.store import Store
from tessera.db.upkeep.prune import prune_batch
from tessera.db.upkeep.purge import purge_batch
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.base.values import EstimateSource, GpuType, Workload
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Precision,
    ZeroStage,
    join_chunks,
    read_execution_plan,
)
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.job.runtimes import RUNTIMES, TORCHRUN
from tessera.formulation.job.techniques import techniques_of
from tessera.formulation.records.agents import DesiredGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.store import Retention
from tessera.service.server.estimates.deriver import CellDeriver
from tests.support.decided_rounds import plan_of, schedule
from tests.support.logged import logged_lines
from tests.support.reports import OUT_OF_MEMORY, PHASE, report_training
from tests.support.stored_cluster import (
    C,
    a_spec,
    agents_report,
    apply_event,
    execute,
    job,
    submit,
)
from tests.support.tuning import tuner

BERT = Workload(model="bert", params="6.7B", global_batch=128)
"""A model whose best plan on 8 x a40 is a pipeline."""


__all__ = ["tuner"]


@pytest.fixture
def store(database: Database) -> Store:
    """Return a store whose agents do not expire, however slow the machine is."""
    return Store(database, lease_s=3600.0)


@pytest.fixture
def cluster(store: Store, tuner: str) -> Store:
    """Return the store with a cluster of two nodes of 8 x a40, without estimates."""
    kind = GpuType(name="a40", memory_bytes=48 * 2**30)
    store.change(upsert_cluster, C, [kind], None)
    for i in range(2):
        node = NodeSpec(name=f"a40-{i}", gpu_type="a40", gpus=8)
        store.hello(C, f"agent-a40-{i}", "first", [node])
    return store


def a_tuner(name: str, space: str = "full", **changes: Any) -> JobSpec:
    launch = LaunchSpec(runtime="command", tuning_space=space)
    gpus = {"requested_gpus": 8, "min_gpus": 8, "max_gpus": 8}
    fields: dict[str, Any] = {"workload": BERT, "launch": launch, "command": ("train.py",)}
    return a_spec(name, **(fields | gpus | changes))


def derive(store: Store) -> int:
    return CellDeriver(store, catalogue_of(), (1.0,)).derive(C)


def start(store: Store, *specs: JobSpec) -> None:
    """Submit jobs, and decide a round with plans for them, without agents."""
    submit(store, *specs)
    derive(store)
    schedule(store)


def gang_of(store: Store, name: str) -> DesiredGang:
    """Return the gang that an agent is to run for a job."""
    gangs = [
        gang
        for node in ("a40-0", "a40-1")
        for gang in store.read(load_desired_gangs, C, f"agent-{node}").gangs
        if gang.spec.name == name
    ]
    return gangs[0]


def plans_to_try(store: Store, name: str) -> list[ExecutionPlan]:
    return [read_execution_plan("plan", text) for text in gang_of(store, name).tuning_plans]


def report(store: Store, name: str, plan: str, seconds: float, **facts: Any) -> None:
    """Let the leader's agent report the plan by which a job's program runs."""
    held = job(store, name).allocation
    assert held is not None
    report_training(
        store,
        name,
        held.shares[0][0],
        job(store, name).generation,
        **{"executed_plan": plan, "executed_iter_time_s": seconds} | facts,
    )


def estimates_of(store: Store) -> dict[str, tuple[float, EstimateSource]]:
    rows, _ = store.read(list_estimates, C, BERT, 0, 1000)
    return {e.cell.plan: (e.iter_time_s, e.source) for e in rows}


def count(database: Database, query: str) -> int:
    with database.read() as connection:
        return int(connection.execute(sa.text(query)).scalar_one())


@pytest.fixture
def started(cluster: Store) -> Store:
    """Return the store where job a is about to start, with plans to try."""
    start(cluster, a_tuner("a"))
    return cluster


def slower_by(store: Store, name: str) -> ExecutionPlan:
    """Return a plan to try that is not the job's own."""
    return next(plan for plan in plans_to_try(store, name) if plan != plan_of(store, name))


def test_a_starting_job_gets_the_plans_of_its_space_in_order_of_their_estimates(
    started: Store, database: Database
) -> None:
    own, plans = plan_of(started, "a"), plans_to_try(started, "a")
    assert own in plans
    assert len(plans) == len({plan.digest for plan in plans}) > 1
    assert {plan.pipeline_degree for plan in plans} == {own.pipeline_degree}
    assert {(p.global_batch, p.gpus, p.shape, p.zero) for p in plans} == {
        (128, 8, own.shape, own.zero)
    }
    least = "SELECT min(whole_plans - space_plans) FROM tunings"
    assert count(database, least) == 0
    assert count(database, "SELECT count(*) FROM tunings WHERE cardinality(plans) > 200") == 0


def test_a_job_gets_the_plans_of_its_space_and_techniques_and_none_if_it_does_not_tune(
    cluster: Store,
) -> None:
    start(cluster, a_tuner("full"), a_tuner("halves", "halves"))
    assert plan_of(cluster, "full") == plan_of(cluster, "halves")
    whole, half = (set(gang_of(cluster, name).tuning_plans) for name in ("full", "halves"))
    assert half < whole
    own = techniques_of(plan_of(cluster, "full"))
    others = [p for p in plans_to_try(cluster, "full") if techniques_of(p) - own]
    assert others
    for name in ("full", "halves"):
        apply_event(cluster, name, JobEvent.CANCEL)
    agents_report(cluster)
    plain = a_tuner("plain", launch=LaunchSpec(runtime="command"))
    start(cluster, a_tuner("limited", techniques=tuple(sorted(own))), plain)
    left = plans_to_try(cluster, "limited")
    assert left
    assert all(techniques_of(plan) <= own for plan in left)
    assert gang_of(cluster, "plain").tuning_plans == ()
    # A winner by other techniques is refused.
    agents_report(cluster)
    given = plan_of(cluster, "limited")
    report(cluster, "limited", others[0].to_json(), 0.5)
    assert plan_of(cluster, "limited") == given


def test_a_first_job_that_tunes_makes_the_workload_be_derived_again(
    cluster: Store, database: Database
) -> None:
    submit(cluster, a_tuner("a", launch=LaunchSpec(runtime="command")))
    assert derive(cluster) == 1
    assert derive(cluster) == 0
    submit(cluster, a_tuner("b"))
    assert derive(cluster) == 1
    assert count(database, "SELECT count(*) FROM tunings") > 0
    assert derive(cluster) == 0


def test_the_winner_becomes_the_jobs_plan_and_a_measured_one_of_its_cell(
    started: Store,
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    before = job(started, "a")
    for _ in range(3):  # it may be repeated
        report(started, "a", winner.to_json(), 0.5, planned_iter_time_s=0.75)
    report(started, "a", winner.to_json(), 0.25)
    record = job(started, "a")
    assert plan_of(started, "a") == winner
    assert (record.generation, record.version) == (before.generation, before.version + 1)
    assert record.allocation is not None
    assert record.allocation.rate == 256.0
    times = estimates_of(started)
    assert times[winner.digest] == (0.5, EstimateSource.MEASURED)
    assert times[own.digest] == (0.75, EstimateSource.MEASURED)


@pytest.mark.parametrize(
    ("own_s", "facts", "winner_s"),
    [
        (math.inf, {}, 0.5),
        (0.75, {"phase": PHASE.FAILED, "exit_reason": OUT_OF_MEMORY}, math.inf),
    ],
)
def test_a_plan_that_was_tried_and_does_not_run_is_infeasible(
    started: Store, own_s: float, facts: dict[str, Any], winner_s: float
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    report(started, "a", winner.to_json(), 0.5, planned_iter_time_s=own_s, **facts)
    agents_report(started)
    times = estimates_of(started)
    assert times[winner.digest] == (winner_s, EstimateSource.MEASURED)
    assert times[own.digest] == (own_s, EstimateSource.MEASURED)


def test_times_that_follow_are_those_of_the_winner(started: Store, database: Database) -> None:
    winner = slower_by(started, "a")
    agents_report(started)
    report(started, "a", "", 0.0, iterations_done=1.0, iter_time_s=9.0)
    report(started, "a", winner.to_json(), 0.5, iterations_done=2.0, iter_time_s=0.5)
    for done in range(3, 11):
        report(started, "a", winner.to_json(), 0.5, iterations_done=done, iter_time_s=0.5)
    query = "SELECT p.name, m.iter_time_s FROM measurements m JOIN plans p ON p.id = m.plan_id"
    with database.read() as connection:
        assert connection.execute(sa.text(query)).all() == [(winner.digest, 0.5)]


def test_reports_that_do_not_fit_the_job_are_logged_once_each_and_lose_nothing(
    started: Store, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    last = own.stages[-1]
    stage = replace(own.stages[0], start=0, end=last.end, dp=8, tp=1)
    flat = replace(join_chunks(own), stages=(stage,), micro_batch=128, accumulation=1)
    wrong = {
        "precision": replace(other, precision=Precision.F32),
        "global batch": replace(other, micro_batch=256, accumulation=1),
        "was made for the model": replace(other, model="gpt/1.3B"),
        "its nodes": replace(other, shape=(4, 4)),
        "": flat,
        "GPUs": replace(flat, stages=(replace(stage, dp=4),), shape=()),
        "layers": replace(own, stages=(*own.stages[:-1], replace(last, end=last.end + 1))),
    }
    for done, (problem, plan) in enumerate(wrong.items(), 1):
        caplog.clear()
        for _ in range(2):
            report(started, "a", plan.to_json(), 0.5, iterations_done=float(done))
        (line,) = logged_lines(caplog, "tuning_refused")
        assert problem in line
        assert job(started, "a").iterations_done == done
    for text, seconds in ((other.to_json(), 0.0), ("{}", 0.5), ("not JSON", 0.5)):
        report(started, "a", text, seconds)
    assert plan_of(started, "a") == own
    assert estimates_of(started)[own.digest][1] is EstimateSource.ANALYTIC
    report(started, "a", other.to_json(), 0.5)
    report(started, "a", replace(own, zero=ZeroStage.OPTIMIZER).to_json(), 0.25)
    assert plan_of(started, "a") == other  # a second winner is refused, too


def test_only_the_leader_of_the_present_start_of_a_job_that_tunes_names_a_winner(
    started: Store, database: Database
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    execute(database, f"UPDATE jobs SET runtime = '{TORCHRUN}'")
    assert not RUNTIMES[TORCHRUN].tunes
    report(started, "a", winner.to_json(), 0.5)
    execute(database, "UPDATE jobs SET runtime = 'command'")
    held = job(started, "a").allocation
    assert held is not None
    leader = held.shares[0][0]
    other = "a40-1" if leader == "a40-0" else "a40-0"
    facts: dict[str, Any] = {"executed_plan": winner.to_json(), "executed_iter_time_s": 0.5}
    report_training(started, "a", other, 1, **facts)
    report_training(started, "a", leader, 7, **facts)
    assert plan_of(started, "a") == own
    report(started, "a", winner.to_json(), 0.5, phase=PHASE.STOPPING)
    assert plan_of(started, "a") == winner


def test_each_server_stores_the_same_plans_which_go_with_the_last_job_or_the_cluster(
    started: Store, database: Database
) -> None:
    text = "SELECT p.name, t.space, t.plans FROM tunings t JOIN plans p ON p.id = t.plan_id"

    def stored() -> list[tuple[Any, ...]]:
        with database.read() as connection:
            return sorted(tuple(row) for row in connection.execute(sa.text(text)))

    before = stored()
    forever = Retention(requests_s=math.inf, jobs_s=math.inf)
    assert prune_batch(database, C, forever)["tunings"] == 0
    apply_event(started, "a", JobEvent.CANCEL)
    agents_report(started)
    assert prune_batch(database, C, forever)["tunings"] > 0
    assert stored() == []
    submit(started, a_tuner("b"))
    execute(database, "UPDATE workloads SET derived_from = 'outdated'")
    assert derive(started) == 1
    assert stored() == before
    apply_event(started, "b", JobEvent.CANCEL)
    started.change(delete_cluster, C, None, started.silence_s, force=True)
    while started.update(purge_batch):
        pass
    assert stored() == []
