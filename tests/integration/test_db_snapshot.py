"""Snapshots: stored data as arrays, in the order that their types promise."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.db.writer import PostgresWriter
from tessera.formulation import codec
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.execution_plan import ZeroStage
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.snapshot import STATES
from tessera.formulation.values import Hold, Workload
from tests.support.execution_plans import with_own_plan
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    do,
    execute,
    job,
    run,
    start,
    submit,
    wait,
)


def test_an_empty_cluster_has_a_snapshot(store: PostgresStore) -> None:
    do(store, lambda w: w.upsert_cluster(C, [], None))
    empty = store.snapshot(C)
    assert (empty.epoch, empty.round_number, len(empty.jobs), len(empty.nodes)) == (0, 1, 0, 0)
    assert codec.digest(codec.decode(codec.encode(empty))) == codec.digest(empty)


def test_a_snapshot_knows_which_estimates_are_of_complete_profiles(store: PostgresStore) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100",))
    do(store, lambda w: w.upsert_estimates(C, [a_record(2, complete=True), a_record(4)]))
    submit(store, a_spec("j"))
    estimates = store.snapshot(C).estimates
    known = dict(zip(estimates.gpus.tolist(), estimates.complete.tolist(), strict=True))
    assert (known[2], known[4]) == (True, False)
    do(store, lambda w: w.upsert_estimates(C, [a_record(2)]))
    assert not store.snapshot(C).estimates.complete.any()


def a_workload_of(model: str) -> Workload:
    return Workload(model=model, params="1B", global_batch=8)


def test_only_estimates_of_live_jobs_are_loaded(store: PostgresStore) -> None:
    a_cluster(store)
    do(store, lambda w: w.upsert_estimates(C, [a_record(workload=a_workload_of("other"))]))
    submit(store, a_spec("a"), a_spec("b", workload=a_workload_of("other")))
    assert {store.snapshot(C).workloads[w].model for w in store.snapshot(C).estimates.workload} == {
        "bert",
        "other",
    }
    apply_event(store, "b", JobEvent.CANCEL)
    snapshot = store.snapshot(C)
    assert {snapshot.workloads[w].model for w in snapshot.estimates.workload} == {"bert"}


def test_estimates_are_sorted_independently_of_insertion_order(store: PostgresStore) -> None:
    a_cluster(store, types=("v100", "a100"))
    rng = np.random.default_rng(0)
    records = [
        with_own_plan(
            a_record(
                gpus,
                workload=a_workload_of(m),
                gpu_type=t,
                nodes=int(rng.integers(1, gpus + 1)),
                pipeline_degree=d,
            ),
            zero=zero,
        )
        for m in "ba"
        for t in ("a100", "v100")
        for gpus in (4, 2)
        for d in (2, 1)
        for zero in (ZeroStage.OPTIMIZER, ZeroStage.NONE)
    ]
    rng.shuffle(records)
    do(store, lambda w: w.upsert_estimates(C, records))
    submit(store, *(a_spec(m, workload=a_workload_of(m)) for m in "ab"), a_spec("c"))
    snapshot = store.snapshot(C)
    e = snapshot.estimates
    keys = list(
        zip(e.workload, e.gpu_type, e.gpus, e.pipeline_degree, e.plan, e.nodes, strict=True)
    )
    assert keys == sorted(keys)
    assert len(keys) == len(records) + 8
    works = {w: i for i, w in enumerate(snapshot.workloads)}
    types = {t.name: i for i, t in enumerate(snapshot.gpu_types)}
    plans = {p: i for i, p in enumerate(snapshot.plans)}
    assert {
        (
            works[r.workload],
            types[r.cell.gpu_type],
            r.cell.gpus,
            r.cell.pipeline_degree,
            plans[r.cell.plan],
            r.cell.nodes,
        )
        for r in records
    } <= set(keys)


def test_an_ended_job_appears_only_through_gpus_it_has_not_given_back(
    store: PostgresStore,
) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[("a100-0", [1])])
    agent_reports(store, "agent-a100-0", phase="succeeded")
    snapshot = store.snapshot(C)
    assert snapshot.jobs.name == ("b",)
    assert snapshot.allocations.job.tolist() == [-1]
    assert snapshot.allocations.hold.tolist() == [Hold.RELEASING]


def test_draining_silent_and_unconnected_nodes_are_not_schedulable(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store, nodes=4)
    do(store, lambda w: w.drain_nodes(C, ["a100-1"], draining=True))
    silence = "UPDATE agents SET heard_at = now() - interval '46 s' WHERE name = 'agent-a100-2'"
    unheard = "UPDATE nodes SET agent_id = NULL WHERE name = 'a100-3'"
    for statement in (silence, unheard):
        execute(database, statement)
    assert store.snapshot(C).nodes.schedulable.tolist() == [True, False, False, False]
    patient = PostgresStore(database, lease_s=40.0, margin_s=10.0)
    assert patient.snapshot(C).nodes.schedulable.tolist() == [True, False, True, False]
    assert store.get_node(C, "a100-3").silent_s == math.inf
    assert store.get_node(C, "a100-2").silent_s > 45


def test_iterations_left_and_states_follow_the_jobs(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a", iterations=100), a_spec("b"))
    run(store, a=[("a100-0", [0])])
    agent_reports(store, "agent-a100-0", iterations_done=30.5)
    apply_event(store, "b", JobEvent.HOLD)
    jobs = store.snapshot(C).jobs
    assert jobs.iterations_left.tolist() == [69.5, 1000.0]
    assert [STATES[s] for s in jobs.state] == [JobState.RUNNING, JobState.HELD]
    apply_event(store, "a", JobEvent.CANCEL)
    cancelling = store.snapshot(C).jobs
    assert STATES[cancelling.state[0]] is JobState.CANCELLING
    assert cancelling.current_gpus.tolist() == [0, 0]


def let_time_pass(database: Database, seconds: float) -> None:
    """Let ``seconds`` pass for jobs."""
    past = f"- {seconds} * interval '1 s'"
    execute(
        database,
        f"UPDATE jobs SET created_at = created_at {past}, queued_at = queued_at {past},"
        f" since_at = since_at {past}",
    )


def test_attained_service_is_the_gpu_time_that_a_job_has_held(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store, nodes=2)
    submit(store, a_spec("a"), a_spec("b"))
    assert store.snapshot(C).jobs.since_s.tolist() == [0.0, 0.0]
    run(store, a=[("a100-0", [0, 1])])
    let_time_pass(database, 100.0)
    snapshot = store.snapshot(C)
    assert snapshot.jobs.service_gpu_s == pytest.approx([200.0, 0.0], abs=20.0)
    assert snapshot.now_s - snapshot.jobs.since_s[0] == pytest.approx(100.0, abs=10.0)
    move = start(snapshot, "a", [("a100-1", [0, 1, 2])], DecisionKind.RESIZE)
    commit(store, snapshot, move)
    agents_report(store)
    let_time_pass(database, 10.0)
    snapshot = store.snapshot(C)
    assert snapshot.jobs.service_gpu_s == pytest.approx([230.0, 0.0], abs=25.0)
    assert snapshot.now_s - snapshot.jobs.since_s[0] == pytest.approx(10.0, abs=8.0)
    assert job(store, "a").service_gpu_s == pytest.approx(230.0, abs=25.0)
    commit(store, snapshot, start(snapshot, "a", [("a100-1", [0, 1, 2])], DecisionKind.KEEP))
    # The job continues unchanged.
    assert store.snapshot(C).jobs.since_s[0] == snapshot.jobs.since_s[0]
    agent_reports(store, "agent-a100-1", phase="succeeded")
    served = job(store, "a").service_gpu_s
    assert served == pytest.approx(230.0, abs=25.0)
    let_time_pass(database, 1000.0)
    assert job(store, "a").service_gpu_s == served


def test_a_jobs_wait_starts_at_submission_or_when_it_lost_its_gpus(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"), a_spec("c"))
    snapshot = store.snapshot(C)
    assert snapshot.jobs.queued_s.tolist() == snapshot.jobs.submit_s.tolist()
    assert job(store, "a").queued_s == snapshot.jobs.queued_s[0]
    run(store, a=[("a100-0", [0])])
    apply_event(store, "b", JobEvent.HOLD)
    let_time_pass(database, 100.0)
    now = store.snapshot(C)
    commit(store, now, wait(now, "a", DecisionKind.SUSPEND))
    # Time in which a user held the job is not waiting time.
    apply_event(store, "b", JobEvent.RELEASE)
    stopping = store.snapshot(C).jobs
    assert STATES[stopping.state[0]] is JobState.STOPPING
    waited = now.now_s - stopping.queued_s
    assert waited == pytest.approx([0.0, 0.0, 100.0], abs=10.0)
    assert now.now_s - stopping.submit_s == pytest.approx([100.0] * 3, abs=10.0)
    agents_report(store)
    queued = store.snapshot(C).jobs
    assert STATES[queued.state[0]] is JobState.QUEUED
    assert queued.queued_s.tolist() == stopping.queued_s.tolist()


def test_snapshots_do_not_depend_on_row_ids(store: PostgresStore) -> None:
    for name in ("first", "second"):
        a_cluster(store, name=name)
        do(store, partial(PostgresWriter.submit_jobs, cluster=name, jobs=[a_spec("a")]))
    first, second = store.snapshot("first"), store.snapshot("second")
    for table in ("nodes", "estimates", "allocations"):
        assert getattr(first, table).equals(getattr(second, table))
    assert first.jobs.name == second.jobs.name
    assert np.array_equal(first.jobs.workload, second.jobs.workload)
