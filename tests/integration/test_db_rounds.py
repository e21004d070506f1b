"""Rounds in PostgreSQL: snapshots, commits that are guarded and all or nothing, and stored ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.base.decisions import PAGE_DECISIONS
from tessera.db.base.deltas import decode_delta, encode_delta
from tessera.db.clusters.drains import drain_nodes
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs import job_changes
from tessera.db.jobs.submission import submit_jobs
from tessera.db.rounds import round_snapshots
from tessera.db.rounds.rounds import list_rounds
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_nodes
from tessera.db.store.reads import get_node, job_history, list_jobs
from tessera.db.store.store import Store
from tessera.formulation.answer.check import find_doubly_held
from tessera.formulation.answer.codec import digest, encode
from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.base.errors import InvalidInput, NotAllowed, NotFound
from tessera.formulation.base.values import Hold, Workload
from tessera.formulation.job.execution_plan import ZeroStage
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.records.store import Request, Retention
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.state.snapshot import STATES
from tessera.service.server.rounds.loop import RoundLoop
from tests.support.decided_rounds import schedule
from tests.support.execution_plans import with_own_plan
from tests.support.laws import examples
from tests.support.proofs import a_round_proof
from tests.support.round_trips import record_trips
from tests.support.rows import query_scalar
from tests.support.stored_cluster import (
    BERT,
    C,
    Members,
    a_cluster,
    a_record,
    a_round,
    a_spec,
    a_summary,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    execute,
    job,
    run,
    start,
    states,
    submit,
    wait,
)
from tests.support.worlds import StoppedClock


def test_a_snapshot_knows_which_estimates_are_of_complete_profiles(store: Store) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100",))
    store.change(upsert_estimates, C, [a_record(2, complete=True), a_record(4)])
    submit(store, a_spec("j"))
    estimates = store.snapshot(C).estimates
    known = dict(zip(estimates.gpus.tolist(), estimates.complete.tolist(), strict=True))
    assert (known[2], known[4]) == (True, False)
    store.change(upsert_estimates, C, [a_record(2)])
    assert not store.snapshot(C).estimates.complete.any()


def a_workload_of(model: str) -> Workload:
    return Workload(model=model, params="1B", global_batch=8)


def test_only_estimates_of_live_jobs_are_loaded(store: Store) -> None:
    a_cluster(store)
    store.change(upsert_estimates, C, [a_record(workload=a_workload_of("other"))])
    submit(store, a_spec("a"), a_spec("b", workload=a_workload_of("other")))
    assert {store.snapshot(C).workloads[w].model for w in store.snapshot(C).estimates.workload} == {
        "bert",
        "other",
    }
    apply_event(store, "b", JobEvent.CANCEL)
    snapshot = store.snapshot(C)
    assert {snapshot.workloads[w].model for w in snapshot.estimates.workload} == {"bert"}


def test_estimates_are_sorted_independently_of_insertion_order(store: Store) -> None:
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
    store.change(upsert_estimates, C, records)
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


def test_an_ended_job_appears_only_through_gpus_it_has_not_given_back(store: Store) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[("a100-0", [1])])
    agent_reports(store, "agent-a100-0", phase="succeeded")
    snapshot = store.snapshot(C)
    assert snapshot.jobs.name == ("b",)
    assert snapshot.allocations.job.tolist() == [-1]
    assert snapshot.allocations.hold.tolist() == [Hold.RELEASING]


def test_draining_silent_and_unconnected_nodes_are_not_schedulable(
    store: Store, database: Database
) -> None:
    a_cluster(store, nodes=4)
    store.change(drain_nodes, C, ["a100-1"], draining=True)
    silence = "UPDATE agents SET heard_at = now() - interval '46 s' WHERE name = 'agent-a100-2'"
    unheard = "UPDATE nodes SET agent_id = NULL WHERE name = 'a100-3'"
    for statement in (silence, unheard):
        execute(database, statement)
    assert store.snapshot(C).nodes.schedulable.tolist() == [True, False, False, False]
    patient = Store(database, lease_s=40.0, margin_s=10.0)
    assert patient.snapshot(C).nodes.schedulable.tolist() == [True, False, True, False]
    assert store.read(get_node, C, "a100-3").silent_s == math.inf
    assert store.read(get_node, C, "a100-2").silent_s > 45


def test_iterations_left_and_states_follow_the_jobs(store: Store) -> None:
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
    store: Store, database: Database
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
    store: Store, database: Database
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


def test_snapshots_do_not_depend_on_row_ids(store: Store) -> None:
    for name in ("first", "second"):
        a_cluster(store, name=name)
        store.change(submit_jobs, name, [a_spec("a")])
    first, second = store.snapshot("first"), store.snapshot("second")
    for table in ("nodes", "estimates", "allocations"):
        assert getattr(first, table).equals(getattr(second, table))
    assert first.jobs.name == second.jobs.name
    assert np.array_equal(first.jobs.workload, second.jobs.workload)


A0, A1 = "a100-0", "a100-1"


def allocation_rows(store: Store) -> list[tuple[str, str, int, Hold]]:
    """Return (job, node, GPU, hold) of every allocation, in order of node and GPU."""
    snapshot = store.snapshot(C)
    assert find_doubly_held(snapshot) == []
    names, nodes, a = (*snapshot.jobs.name, "-"), snapshot.nodes.name, snapshot.allocations
    rows = zip(a.job.tolist(), a.node.tolist(), a.gpu.tolist(), a.hold.tolist(), strict=True)
    return [(names[j], nodes[n], g, Hold(h)) for j, n, g, h in rows]


def test_a_waiting_job_shows_the_last_rounds_reason(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    snapshot = store.snapshot(C)
    commit(store, snapshot, wait(snapshot, "b"), start(snapshot, "a", [(A0, [0])]))
    refused = store.snapshot(C)
    summary = a_summary(refused, outcome="refused", violations=("GPU once: x",), verified=False)
    record = store.commit(a_round(refused, summary=summary))
    assert (record.summary.number, record.summary.outcome) == (2, "refused")
    stored = job(store, "b")
    assert stored.reason is not None
    assert (stored.reason.message, stored.reason_round) == ("no GPU is free", 1)
    assert stored.reason.evidence == (("gpus", "1"),)
    assert (job(store, "a").reason, job(store, "a").reason_round) == (None, 0)


Interference = Callable[[Store], None]


def update_job(store: Store) -> None:
    store.change(job_changes.update_job, C, a_spec("a", weight=9.0), ["weight"], None)


def drain_node(store: Store) -> None:
    store.change(drain_nodes, C, [A0], draining=True)


def grow_node(store: Store) -> None:
    node = NodeSpec(name=A0, gpu_type="a100", gpus=8)
    store.change(upsert_nodes, C, [node])


@pytest.mark.parametrize(
    ("interfere", "why", "state"),
    [
        (lambda s: apply_event(s, "a", JobEvent.CANCEL), "cancelled", JobState.CANCELLED),
        (lambda s: apply_event(s, "a", JobEvent.HOLD), "held", JobState.HELD),
        (update_job, "etag 1, now 2", JobState.QUEUED),
        (drain_node, "node a100-0 changed", JobState.QUEUED),
        (grow_node, "node a100-0 changed", JobState.QUEUED),
    ],
)
def test_jobs_and_nodes_that_changed_during_the_solve_are_left_alone(
    store: Store, interfere: Interference, why: str, state: JobState
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    snapshot = store.snapshot(C)
    interfere(store)
    record = commit(
        store, snapshot, start(snapshot, "a", [(A0, [0])]), start(snapshot, "b", [(A1, [0])])
    )
    first, second = record.decisions
    assert (first.applied, second.applied, second.skipped) == (False, True, "")
    assert why in first.skipped
    assert states(store) == {"a": state, "b": JobState.STARTING}
    assert record.summary.started == 1
    assert [name for name, *_ in allocation_rows(store)] == ["b"]


def test_the_end_of_a_job_during_the_solve_invalidates_its_decision_and_progress_does_not(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [(A0, [0])]))
    snapshot = store.snapshot(C)
    agents_report(store, iterations_done=5.0)  # starting -> running
    record = commit(store, snapshot, start(snapshot, "a", [(A0, [0])], DecisionKind.KEEP))
    assert record.decisions[0].applied
    assert job(store, "a").iterations_done == 5.0
    snapshot = store.snapshot(C)
    agent_reports(store, f"agent-{A0}", phase="succeeded")
    record = commit(store, snapshot, start(snapshot, "a", [(A0, [0])], DecisionKind.KEEP))
    assert "succeeded" in record.decisions[0].skipped
    assert (record.summary.running, record.summary.waiting) == (0, 0)


def test_decisions_that_need_the_gpus_of_a_skipped_decision_are_skipped_too(
    store: Store,
) -> None:
    """c wants b's GPU, b wants a's GPU, and a, which was to be suspended, has changed."""
    a_cluster(store, nodes=2)
    submit(store, a_spec("a"), a_spec("b"), a_spec("c"), a_spec("d"))
    run(store, a=[(A0, [0])], b=[(A0, [1])])
    snapshot = store.snapshot(C)
    update_job(store)
    record = commit(
        store,
        snapshot,
        wait(snapshot, "a", DecisionKind.SUSPEND),
        start(snapshot, "b", [(A0, [0])], DecisionKind.MOVE),
        start(snapshot, "c", [(A0, [1])]),
        start(snapshot, "d", [(A1, [0])]),
    )
    assert [d.applied for d in record.decisions] == [False, False, False, True]
    assert record.decisions[1].skipped == "the GPUs that it needs stay with a"
    assert record.decisions[2].skipped == "the GPUs that it needs stay with b"
    assert states(store)["b"] is JobState.RUNNING
    assert (record.summary.running, record.summary.waiting) == (3, 1)


def test_a_gpu_is_handed_over_in_two_steps(store: Store) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    commit(
        store,
        snapshot,
        wait(snapshot, "a", DecisionKind.SUSPEND),
        start(snapshot, "b", [(A0, [0])]),
    )
    assert allocation_rows(store) == [("a", A0, 0, Hold.RELEASING), ("b", A0, 0, Hold.RESERVED)]
    assert states(store) == {"a": JobState.STOPPING, "b": JobState.STARTING}
    desired = store.read(load_desired_gangs, C, f"agent-{A0}")
    assert desired.gangs == ()  # b does not start before a is gone
    assert store.update(record_observation, C, f"agent-{A0}", "first", [], desired.revision)
    assert allocation_rows(store) == [("b", A0, 0, Hold.HELD)]
    assert states(store) == {"a": JobState.QUEUED, "b": JobState.STARTING}
    assert [g.spec.name for g in store.read(load_desired_gangs, C, f"agent-{A0}").gangs] == ["b"]


def test_a_job_whose_start_was_never_sent_is_suspended_at_once(store: Store) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    suspend = wait(snapshot, "a", DecisionKind.SUSPEND)
    commit(store, snapshot, suspend, start(snapshot, "b", [(A0, [0])]))
    snapshot = store.snapshot(C)
    commit(store, snapshot, wait(snapshot, "b", DecisionKind.SUSPEND))
    assert states(store) == {"a": JobState.STOPPING, "b": JobState.QUEUED}
    assert [e.event for e in store.read(job_history, C, "b")] == ["start", "suspend", "gone"]


def test_a_stopping_job_is_started_elsewhere_once_it_is_gone(store: Store) -> None:
    a_cluster(store, nodes=2)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    commit(store, snapshot, wait(snapshot, "a", DecisionKind.SUSPEND))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [(A1, [0])]))
    assert allocation_rows(store) == [("a", A0, 0, Hold.RELEASING), ("a", A1, 0, Hold.RESERVED)]
    assert (
        store.read(load_desired_gangs, C, f"agent-{A1}").gangs == ()
    )  # its former program may still save its work
    assert store.update(
        record_observation,
        C,
        f"agent-{A0}",
        "first",
        [],
        store.read(load_desired_gangs, C, f"agent-{A0}").revision,
    )
    assert allocation_rows(store) == [("a", A1, 0, Hold.HELD)]
    agents_report(store)
    assert states(store) == {"a": JobState.RUNNING}


def test_a_round_that_fails_halfway_changes_nothing(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    snapshot = store.snapshot(C)
    same: Members = [(A0, [0])]
    with pytest.raises(InvalidInput, match="uq_allocations_successor"):
        commit(store, snapshot, start(snapshot, "a", same), start(snapshot, "b", same))
    now = store.snapshot(C)
    assert digest(replace(now, now_s=snapshot.now_s)) == digest(snapshot)
    assert store.read(list_rounds, C, 0, 1) == []


MOST_TRIPS = 26


"""The most round trips of a round that starts jobs. They were 59 before it began in one transaction."""


def test_a_round_makes_few_database_round_trips(store: Store, database: Database) -> None:
    a_cluster(store)
    store.change(upsert_estimates, C, [a_record(n) for n in (1, 2, 4)])
    submit(store, a_spec("one", requested_gpus=2))
    loop = RoundLoop(store, StoppedClock())
    store.ready()
    with record_trips(database) as trips:
        record = schedule(loop, request=Request(id="r", method="Schedule", digest="d"))
    assert record.summary.started == 1
    assert any(trip.startswith("COPY") for trip in trips)
    assert trips.count("begin") == trips.count("commit") == 2
    assert len(trips) <= MOST_TRIPS, "\n".join(" ".join(trip.split()) for trip in trips)


MANY = 2 * PAGE_DECISIONS + 10

"""The number of jobs whose decisions take three pages."""


def queued_jobs(count: int, first: int = 0) -> list[JobSpec]:
    """Return jobs whose names compress as badly as those that the server generates."""
    names = [np.random.default_rng(first + i).bytes(8).hex() for i in range(count)]
    return [a_spec(f"job-{name}") for name in names]


def commit_all_waiting(store: Store) -> None:
    """Commit a round in which every job waits."""
    snapshot = store.snapshot(C)
    commit(store, snapshot, *(wait(snapshot, name) for name in snapshot.jobs.name))


@given(st.binary(max_size=50_000), st.binary(max_size=50_000), st.integers(0, 3))
@examples(50)
def test_a_delta_restores_any_bytes(base: bytes, text: bytes, repeats: int) -> None:
    for old, new in ((base, text), (base * repeats, base * repeats + text), (b"[1],[2]", text)):
        assert decode_delta(old, encode_delta(old, new)) == new


def test_a_delta_of_similar_texts_is_small() -> None:
    rng = np.random.default_rng(1)
    rows = [rng.bytes(8).hex() for _ in range(4000)]
    changed = [row for i, row in enumerate(rows) if i % 97] + [rng.bytes(8).hex() for _ in range(9)]
    old, new = (f'{{"names":[{",".join(names)}],"n":[1]}}'.encode() for names in (rows, changed))
    assert len(encode_delta(old, new)) < len(zlib.compress(new)) / 10


def test_a_round_adds_a_tenth_of_a_row_for_each_decision(store: Store, database: Database) -> None:
    """A round of 1,000 waiting jobs added 0.37 MiB when each decision was a row."""
    a_cluster(store)
    jobs, rounds = 1000, 4
    submit(store, *queued_jobs(jobs))
    commit_all_waiting(store)
    size = "SELECT pg_database_size(current_database())"
    before = query_scalar(database, size)
    for turn in range(rounds):
        submit(store, *queued_jobs(20, first=jobs + 20 * turn))
        commit_all_waiting(store)
    grown = (query_scalar(database, size) - before) / rounds
    assert grown < 60_000


def test_snapshots_are_stored_as_deltas_and_read_back_exactly(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    texts = []
    for turn in range(round_snapshots.MAX_ROUNDS_APART + 2):
        snapshot = store.snapshot(C)
        texts.append(encode(snapshot))
        commit(store, snapshot, wait(snapshot, snapshot.jobs.name[turn]))
        apply_event(store, snapshot.jobs.name[turn], JobEvent.CANCEL)
    bases = "SELECT string_agg(coalesce(base, 0)::text, ' ' ORDER BY number) FROM rounds"
    apart = round_snapshots.MAX_ROUNDS_APART
    assert query_scalar(database, bases) == " ".join(
        ["0", *["1"] * (apart - 1), "0", str(apart + 1)]
    )
    for number, encoded in enumerate(texts, 1):
        loaded = store.round_snapshot(C, number)
        assert encode(loaded) == encoded
        assert digest(loaded) == store.get_round(C, number).summary.snapshot_digest


def test_a_snapshot_with_little_in_common_is_stored_completely(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    commit_all_waiting(store)
    execute(database, "DELETE FROM jobs")
    submit(store, *queued_jobs(400, first=1000))
    commit_all_waiting(store)
    assert query_scalar(database, "SELECT count(*) FROM rounds WHERE base IS NULL") == 2


def test_each_job_finds_its_reason_and_each_round_its_decisions_in_order(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(MANY))
    snapshot = store.snapshot(C)
    names = list(snapshot.jobs.name)
    order = np.random.default_rng(1).permutation(MANY).tolist()
    decisions = [
        replace_message(wait(snapshot, names[i]), f"reason of {names[i]}") for i in order[:-1]
    ]
    runs = start(snapshot, names[order[-1]], [("a100-0", [0])])._replace(restart_price=float("inf"))
    record = commit(store, snapshot, *decisions, runs)
    assert store.get_round(C, 1) == record
    assert [d.job for d in record.decisions] == [names[i] for i in order]
    records, _ = store.read(list_jobs, C, [], 0, 10_000)
    messages = {r.spec.name: r.reason and r.reason.message for r in records}
    assert messages.pop(names[order[-1]]) is None
    assert messages == {names[i]: f"reason of {names[i]}" for i in order[:-1]}
    assert job(store, names[0]).reason_round == 1


def replace_message(decision: Decision, message: str) -> Decision:
    assert decision.reason is not None
    return decision._replace(reason=replace(decision.reason, message=message))


def test_decisions_on_jobs_deleted_meanwhile_are_kept(store: Store, database: Database) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(MANY))
    snapshot = store.snapshot(C)
    execute(database, "DELETE FROM jobs")
    record = commit(store, snapshot, *(wait(snapshot, name) for name in snapshot.jobs.name))
    assert len(record.decisions) == MANY
    assert store.get_round(C, 1) == record


def test_a_round_is_kept_while_the_snapshot_of_a_kept_round_needs_it(store: Store) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    last = round_snapshots.MAX_ROUNDS_APART + 4
    for _ in range(last):
        commit_all_waiting(store)
    assert store.prune(-1.0, 6)["rounds"] == 0  # round 15 needs the snapshot of round 1
    assert store.prune(-1.0, 4)["rounds"] == round_snapshots.MAX_ROUNDS_APART
    assert [r.number for r in store.read(list_rounds, C, 0, 99)] == [20, 19, 18, 17]
    for number in range(17, last + 1):
        assert (
            digest(store.round_snapshot(C, number))
            == store.get_round(C, number).summary.snapshot_digest
        )
    commit_all_waiting(store)
    # The last round has the jobs' reasons, and its snapshot needs that of round 17.
    assert store.prune(-1.0, 0)["rounds"] == 3
    assert [r.number for r in store.read(list_rounds, C, 0, 99)] == [21, 17]
    assert digest(store.round_snapshot(C, 21))


def test_a_commit_whose_base_was_deleted_meanwhile_stores_its_snapshot_whole(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    commit_all_waiting(store)
    packed = round_snapshots.pack_snapshot

    def delete_base(
        base: round_snapshots.BaseSnapshot | None, encoded: bytes
    ) -> round_snapshots.StoredSnapshot:
        stored = packed(base, encoded)
        assert stored.base == 1
        execute(database, "UPDATE rounds SET snapshot = NULL")
        return stored

    monkeypatch.setattr("tessera.db.rounds.rounds.pack_snapshot", delete_base)
    snapshot = store.snapshot(C)
    commit(store, snapshot)
    assert encode(store.round_snapshot(C, 2)) == encode(snapshot)


def test_only_the_latest_snapshots_and_rounds_are_kept_whatever_their_age(
    store: Store,
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    for _ in range(round_snapshots.MAX_ROUNDS_APART + 3):
        commit_all_waiting(store)
    retention = Retention(most_snapshots=3)
    assert store.prune_batch(C, retention)["snapshots"] == round_snapshots.MAX_ROUNDS_APART
    assert store.prune_batch(C, retention)["snapshots"] == 0
    with pytest.raises(NotAllowed, match="retain_snapshots"):
        store.round_snapshot(C, round_snapshots.MAX_ROUNDS_APART)
    assert store.get_round(C, 1).decisions
    for number in range(round_snapshots.MAX_ROUNDS_APART + 1, round_snapshots.MAX_ROUNDS_APART + 4):
        store.round_snapshot(C, number)
    deleted = store.prune_batch(C, Retention(least_rounds=2, most_rounds=5))
    assert (deleted["rounds"], deleted["jobs"]) == (round_snapshots.MAX_ROUNDS_APART - 2, 0)
    with pytest.raises(NotFound):
        store.get_round(C, 3)


def test_a_workload_is_deleted_with_its_last_job_unless_a_user_described_it(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    for number in range(3):
        workload = replace(BERT, params=f"{number}B")
        submit(store, a_spec(f"job-{number}", workload=workload))
        apply_event(store, f"job-{number}", JobEvent.CANCEL)
    submit(store, a_spec("stays", workload=replace(BERT, params="9B")))
    assert store.count_old(-1.0, 0) == store.prune(-1.0, 0) | {"workloads": 0}
    assert (
        query_scalar(database, "SELECT string_agg(params, ' ' ORDER BY params) FROM workloads")
        == "1B 9B"
    )


GOALS = (
    GoalResult(name="max-min", unit="s", objective=1.0, bound=1.0, gap=0.0, proved_by="levels"),
    GoalResult(
        name="jct",
        unit="jobs",
        objective=5.0,
        bound=5.5,
        gap=0.1,
        proved_by="prices",
        certified=True,
    ),
)


def commit_proven(store: Store) -> RoundRecord:
    """Commit a round whose last goal has a certificate."""
    snapshot = store.snapshot(C)
    summary = a_summary(snapshot, goals=GOALS, proved_by="prices", has_certificate=True)
    return store.commit(a_round(snapshot, summary=summary, proof=a_round_proof()))


def test_a_proof_is_kept_as_long_as_its_round(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    record = commit_proven(store)
    assert store.get_round(C, 1) == record
    assert store.read(list_rounds, C, 0, 10) == [record.summary]
    assert record.summary.goals == GOALS
    assert store.round_proof(C, 1) == a_round_proof()
    for _ in range(3):
        commit(store, store.snapshot(C))
    store.prune_batch(C, Retention(most_snapshots=2))
    assert store.round_proof(C, 1) == a_round_proof()
    store.prune_batch(C, Retention(least_rounds=1, most_rounds=1))
    with pytest.raises(NotFound):
        store.round_proof(C, 1)


AWKWARD = (
    "",
    "a\tb",
    "a\nb\r\n",
    "\\",
    "\\N",
    "\\.",
    "\\t",
    '"quoted"',
    "naïve 漢字",
    "x" * 70_000,
)


def test_a_decision_with_any_text_reads_back_unchanged(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    snapshot = store.snapshot(C)
    decision = wait(snapshot, "a")
    assert decision.reason is not None
    reason = replace(
        decision.reason, message=" ".join(AWKWARD), evidence=tuple((t, t) for t in AWKWARD)
    )
    commit(store, snapshot, decision._replace(reason=reason))
    (stored,) = store.get_round(C, 1).decisions
    assert stored.reason == reason
