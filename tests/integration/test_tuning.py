"""Tuning at launch, in PostgreSQL: plans to try, and the winners as measured plans of their Cells."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.prune import prune_batch
from tessera.db.store import PostgresStore
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.clock import SystemClock
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Precision,
    ZeroStage,
    read_execution_plan,
)
from tessera.formulation.launch import LaunchSpec
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.records.agents import DesiredGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.store import Retention
from tessera.formulation.runtimes import RUNTIMES, TORCHRUN
from tessera.formulation.techniques import techniques_of
from tessera.formulation.values import EstimateSource, GpuType, Workload
from tessera.service.cells.deriver import CellDeriver
from tessera.service.loop import RoundLoop
from tessera.solvers.rounds.options import RoundOptions
from tests.support.logged import logged_lines
from tests.support.reports import OUT_OF_MEMORY, PHASE, report_training
from tests.support.stored_cluster import (
    C,
    a_spec,
    agents_report,
    apply_event,
    do,
    execute,
    fail,
    job,
    submit,
)
from tests.support.tuning import tuner

__all__ = ["tuner"]

BERT = Workload(model="bert", params="6.7B", global_batch=128)
"""A model whose best plan on 8 x a40 is a pipeline."""


@pytest.fixture
def store(database: Database) -> PostgresStore:
    """Return a store whose agents do not expire, however slow the machine is."""
    return PostgresStore(database, lease_s=3600.0)


@pytest.fixture
def cluster(store: PostgresStore, tuner: str) -> PostgresStore:
    """Return the store with a cluster of two nodes of 8 x a40, without estimates."""
    kind = GpuType(name="a40", memory_bytes=48 * 2**30)
    do(store, lambda w: w.upsert_cluster(C, [kind], None))
    for i in range(2):
        node = NodeSpec(name=f"a40-{i}", gpu_type="a40", gpus=8)
        store.hello(C, f"agent-a40-{i}", "first", [node])
    return store


def a_tuner(name: str, space: str = "full", runtime: str = "command") -> JobSpec:
    launch = LaunchSpec(runtime=runtime, tuning_space=space)
    command = ("train.py",)
    return a_spec(
        name,
        workload=BERT,
        requested_gpus=8,
        min_gpus=8,
        max_gpus=8,
        launch=launch,
        command=command,
    )


def derive(store: PostgresStore) -> int:
    return CellDeriver(store, catalogue_of(), (1.0,)).derive(C)


def decide(store: PostgresStore) -> None:
    """Decide a round by the default policy, without agents."""
    RoundLoop(store, SystemClock()).schedule(
        C,
        RoundOptions(),
        remaining_s=lambda: 600.0,
        dry_run=False,
        request=None,
        cancelled=lambda: False,
    )


def gang_of(store: PostgresStore, name: str) -> DesiredGang:
    """Return the gang that an agent is to run for a job."""
    gangs = [
        gang
        for node in ("a40-0", "a40-1")
        for gang in store.desired(C, f"agent-{node}").gangs
        if gang.spec.name == name
    ]
    return gangs[0]


def plan_of(store: PostgresStore, name: str) -> ExecutionPlan:
    held = job(store, name).allocation
    assert held is not None
    assert held.plan is not None
    return held.plan


def plans_to_try(store: PostgresStore, name: str) -> list[ExecutionPlan]:
    return [read_execution_plan("plan", text) for text in gang_of(store, name).tuning_plans]


def report(store: PostgresStore, name: str, plan: str, seconds: float, **facts: Any) -> None:
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


def estimates_of(store: PostgresStore) -> dict[str, tuple[float, EstimateSource]]:
    rows, _ = store.list_estimates(C, BERT.model, BERT.params, BERT.global_batch, 0, 1000)
    return {e.cell.plan: (e.iter_time_s, e.source) for e in rows}


def count(database: Database, query: str) -> int:
    with database.read() as connection:
        return int(connection.execute(sa.text(query)).scalar_one())


@pytest.fixture
def started(cluster: PostgresStore) -> PostgresStore:
    """Return the store where job a is about to start, with plans to try."""
    submit(cluster, a_tuner("a"))
    derive(cluster)
    decide(cluster)
    return cluster


def slower_by(store: PostgresStore, name: str) -> ExecutionPlan:
    """Return a plan to try that is not the job's own."""
    return next(plan for plan in plans_to_try(store, name) if plan != plan_of(store, name))


def test_a_starting_job_gets_the_plans_of_its_space_in_order_of_their_estimates(
    started: PostgresStore, database: Database
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


def test_a_job_that_does_not_tune_gets_no_plans(cluster: PostgresStore) -> None:
    submit(cluster, replace(a_tuner("a"), launch=LaunchSpec(runtime="command")))
    derive(cluster)
    decide(cluster)
    assert gang_of(cluster, "a").tuning_plans == ()


def test_a_narrower_space_has_only_plans_of_the_full_one(cluster: PostgresStore) -> None:
    submit(cluster, a_tuner("full"), a_tuner("halves", "halves"))
    derive(cluster)
    decide(cluster)
    assert plan_of(cluster, "full") == plan_of(cluster, "halves")
    whole, half = (set(gang_of(cluster, name).tuning_plans) for name in ("full", "halves"))
    assert half < whole


def test_a_job_tries_only_plans_of_its_techniques(cluster: PostgresStore) -> None:
    submit(cluster, a_tuner("any"))
    derive(cluster)
    decide(cluster)
    own = techniques_of(plan_of(cluster, "any"))
    tried = plans_to_try(cluster, "any")
    assert any(techniques_of(plan) - own for plan in tried)

    limited = replace(a_tuner("limited"), techniques=tuple(sorted(own)))
    submit(cluster, limited)
    derive(cluster)
    decide(cluster)
    left = plans_to_try(cluster, "limited")
    assert left
    assert all(techniques_of(plan) <= own for plan in left)


def test_a_first_job_that_tunes_makes_the_workload_be_derived_again(
    cluster: PostgresStore, database: Database
) -> None:
    submit(cluster, replace(a_tuner("a"), launch=LaunchSpec(runtime="command")))
    assert derive(cluster) == 1
    assert derive(cluster) == 0
    submit(cluster, a_tuner("b"))
    assert derive(cluster) == 1
    assert count(database, "SELECT count(*) FROM tunings") > 0
    assert derive(cluster) == 0


def test_the_winner_becomes_the_jobs_plan_and_a_measured_one_of_its_cell(
    started: PostgresStore,
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    generation, version = job(started, "a").generation, job(started, "a").version
    report(started, "a", winner.to_json(), 0.5, planned_iter_time_s=0.75)
    assert plan_of(started, "a") == winner
    record = job(started, "a")
    assert record.generation == generation
    assert record.version == version + 1
    assert record.allocation is not None
    assert record.allocation.rate == 256.0
    times = estimates_of(started)
    assert times[winner.digest] == (0.5, EstimateSource.MEASURED)
    assert times[own.digest] == (0.75, EstimateSource.MEASURED)


def test_a_report_that_is_repeated_changes_nothing_more(started: PostgresStore) -> None:
    winner = slower_by(started, "a")
    agents_report(started)
    for _ in range(3):
        report(started, "a", winner.to_json(), 0.5)
    version = job(started, "a").version
    report(started, "a", winner.to_json(), 0.25)
    assert job(started, "a").version == version
    assert estimates_of(started)[winner.digest][0] == 0.5


def test_later_rounds_and_starts_use_the_winner_and_do_not_tune_again(
    started: PostgresStore,
) -> None:
    winner = slower_by(started, "a")
    agents_report(started)
    report(started, "a", winner.to_json(), 0.01, planned_iter_time_s=0.02)
    derive(started)
    decide(started)
    assert plan_of(started, "a") == winner
    fail(started, "a")
    submit(started, a_tuner("b"))
    derive(started)
    decide(started)
    agents_report(started)
    assert plan_of(started, "b") == winner
    assert gang_of(started, "b").tuning_plans == ()


def test_the_own_plan_as_winner_is_measured_and_not_tuned_again(started: PostgresStore) -> None:
    own = plan_of(started, "a")
    agents_report(started)
    report(started, "a", own.to_json(), 0.5)
    assert estimates_of(started)[own.digest] == (0.5, EstimateSource.MEASURED)
    submit(started, a_tuner("b"))
    derive(started)
    decide(started)
    assert plan_of(started, "b") == own
    assert gang_of(started, "b").tuning_plans == ()


def test_an_own_plan_that_was_tried_and_does_not_run_is_infeasible(
    started: PostgresStore,
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    report(started, "a", winner.to_json(), 0.5, planned_iter_time_s=math.inf)
    assert estimates_of(started)[own.digest] == (math.inf, EstimateSource.MEASURED)


def test_a_winner_that_runs_out_of_memory_in_the_same_report_is_infeasible_itself(
    started: PostgresStore,
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    facts: dict[str, Any] = {"phase": PHASE.FAILED, "exit_reason": OUT_OF_MEMORY}
    report(started, "a", winner.to_json(), 0.5, planned_iter_time_s=0.75, **facts)
    agents_report(started)
    times = estimates_of(started)
    assert times[winner.digest] == (math.inf, EstimateSource.MEASURED)
    assert times[own.digest] == (0.75, EstimateSource.MEASURED)


def test_times_that_follow_are_those_of_the_winner(
    started: PostgresStore, database: Database
) -> None:
    winner = slower_by(started, "a")
    agents_report(started)
    report(started, "a", "", 0.0, iterations_done=1.0, iter_time_s=9.0)
    report(started, "a", winner.to_json(), 0.5, iterations_done=2.0, iter_time_s=0.5)
    for done in range(3, 11):
        report(started, "a", winner.to_json(), 0.5, iterations_done=done, iter_time_s=0.5)
    query = "SELECT p.name, m.iter_time_s FROM measurements m JOIN plans p ON p.id = m.plan_id"
    with database.read() as connection:
        assert connection.execute(sa.text(query)).all() == [(winner.digest, 0.5)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"precision": Precision.F32}, "precision"),
        ({"micro_batch": 256, "accumulation": 1}, "global batch"),
        ({"model": "gpt/1.3B"}, "was made for the model"),
        ({"shape": (4, 4)}, "its nodes"),
    ],
)
def test_a_report_that_does_not_fit_the_job_is_logged_once_and_loses_nothing(
    started: PostgresStore,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    problem: str,
) -> None:
    own, other = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    caplog.set_level(logging.WARNING, "tessera.db.tunings")
    wrong = replace(other, **change).to_json()
    for done in (3.0, 4.0):
        report(started, "a", wrong, 0.5, iterations_done=done)
    assert plan_of(started, "a") == own
    assert job(started, "a").iterations_done == 4.0
    assert estimates_of(started)[own.digest][1] is EstimateSource.ANALYTIC
    assert [problem in line for line in logged_lines(caplog, "tuning_refused")] == [True]
    report(started, "a", other.to_json(), 0.5)
    assert plan_of(started, "a") == other


def test_plans_of_other_degrees_gpus_layers_and_second_winners_are_refused(
    started: PostgresStore,
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    last = own.stages[-1]
    stage = replace(own.stages[0], start=0, end=last.end, dp=8, tp=1)
    flat = replace(own, stages=(stage,), micro_batch=128, accumulation=1)
    for wrong in (
        flat,
        replace(flat, stages=(replace(stage, dp=4),), shape=()),
        replace(own, stages=(*own.stages[:-1], replace(last, end=last.end + 1))),
    ):
        report(started, "a", wrong.to_json(), 0.5)
    report(started, "a", winner.to_json(), 0.0)
    report(started, "a", "{}", 0.5)
    report(started, "a", "not JSON", 0.5)
    assert plan_of(started, "a") == own
    report(started, "a", winner.to_json(), 0.5)
    report(started, "a", replace(own, zero=ZeroStage.OPTIMIZER).to_json(), 0.25)
    assert plan_of(started, "a") == winner


def test_a_winner_by_techniques_that_the_job_does_not_name_is_refused(
    cluster: PostgresStore, caplog: pytest.LogCaptureFixture
) -> None:
    submit(cluster, a_tuner("any"))
    derive(cluster)
    decide(cluster)
    own = plan_of(cluster, "any")
    others = [p for p in plans_to_try(cluster, "any") if techniques_of(p) - techniques_of(own)]
    submit(cluster, replace(a_tuner("limited"), techniques=tuple(sorted(techniques_of(own)))))
    derive(cluster)
    decide(cluster)
    agents_report(cluster)
    given = plan_of(cluster, "limited")
    report(cluster, "limited", others[0].to_json(), 0.5)
    assert plan_of(cluster, "limited") == given
    (line,) = logged_lines(caplog, "tuning_refused")
    assert "and the job's techniques are" in line


def test_only_the_leader_and_only_its_present_start_name_a_winner(started: PostgresStore) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    agents_report(started)
    held = job(started, "a").allocation
    assert held is not None
    other = "a40-1" if held.shares[0][0] == "a40-0" else "a40-0"
    facts: dict[str, Any] = {"executed_plan": winner.to_json(), "executed_iter_time_s": 0.5}
    report_training(started, "a", other, 1, **facts)
    report_training(started, "a", held.shares[0][0], 7, **facts)
    assert plan_of(started, "a") == own
    report(started, "a", winner.to_json(), 0.5, phase=PHASE.STOPPING)
    assert plan_of(started, "a") == winner


def test_a_job_of_a_runtime_that_does_not_tune_cannot_change_its_plan(
    started: PostgresStore, database: Database
) -> None:
    own, winner = plan_of(started, "a"), slower_by(started, "a")
    assert not RUNTIMES[TORCHRUN].tunes
    agents_report(started)
    execute(database, f"UPDATE jobs SET runtime = '{TORCHRUN}'")
    report(started, "a", winner.to_json(), 0.5)
    assert plan_of(started, "a") == own


def test_two_deriving_servers_store_the_same_plans(
    started: PostgresStore, database: Database
) -> None:
    text = "SELECT p.name, t.space, t.plans FROM tunings t JOIN plans p ON p.id = t.plan_id"

    def stored() -> list[tuple[Any, ...]]:
        with database.read() as connection:
            return sorted(tuple(row) for row in connection.execute(sa.text(text)))

    before = stored()
    execute(database, "DELETE FROM tunings")
    execute(database, "UPDATE workloads SET derived_from = 'outdated'")
    assert derive(started) == 1
    assert stored() == before


def test_plans_to_try_go_with_the_last_job_that_may_try_them(
    started: PostgresStore, database: Database
) -> None:
    forever = Retention(requests_s=math.inf, jobs_s=math.inf)
    assert prune_batch(database, C, forever)["tunings"] == 0
    apply_event(started, "a", JobEvent.CANCEL)
    agents_report(started)
    assert prune_batch(database, C, forever)["tunings"] > 0
    assert count(database, "SELECT count(*) FROM tunings") == 0


def test_plans_to_try_go_with_their_cluster(started: PostgresStore, database: Database) -> None:
    apply_event(started, "a", JobEvent.CANCEL)
    agents_report(started)
    do(started, lambda w: w.delete_cluster(C, None, force=True))
    while started.purge():
        pass
    assert count(database, "SELECT count(*) FROM tunings") == 0
