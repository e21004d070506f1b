"""Commits of rounds: guarded, all or nothing, one after another, and read back unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.check import find_doubly_held
from tessera.formulation.codec import digest
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.errors import (
    InvalidInput,
    NotFound,
    RoundSuperseded,
)
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.store import Request
from tessera.formulation.values import Hold
from tessera.service.loop import RoundLoop
from tests.support.decided_rounds import schedule
from tests.support.round_trips import record_trips
from tests.support.stored_cluster import (
    C,
    Members,
    a_cluster,
    a_random_round,
    a_record,
    a_round,
    a_spec,
    a_summary,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    do,
    job,
    run,
    start,
    states,
    submit,
    wait,
)
from tests.support.worlds import StoppedClock

A0, A1 = "a100-0", "a100-1"


def allocation_rows(store: PostgresStore) -> list[tuple[str, str, int, Hold]]:
    """Return (job, node, GPU, hold) of every allocation, in order of node and GPU."""
    snapshot = store.snapshot(C)
    assert find_doubly_held(snapshot) == []
    names, nodes, a = (*snapshot.jobs.name, "-"), snapshot.nodes.name, snapshot.allocations
    rows = zip(a.job.tolist(), a.node.tolist(), a.gpu.tolist(), a.hold.tolist(), strict=True)
    return [(names[j], nodes[n], g, Hold(h)) for j, n, g, h in rows]


def test_a_started_job_gets_its_gpus_and_its_cell(store: PostgresStore) -> None:
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"), a_spec("b"))
    snapshot = store.snapshot(C)
    record = commit(
        store, snapshot, start(snapshot, "a", [(A0, range(4)), (A1, range(4))]), wait(snapshot, "b")
    )
    stored = job(store, "a")
    assert stored.allocation == record.decisions[0].allocation
    assert stored.allocation is not None
    assert stored.allocation.shares == ((A0, (0, 1, 2, 3)), (A1, (0, 1, 2, 3)))
    assert (stored.state, stored.generation, stored.version) == (JobState.STARTING, 1, 2)
    assert {hold for _, _, _, hold in allocation_rows(store)} == {Hold.HELD}
    assert store.job_history(C, "a")[-1].event == "start"


def test_a_round_reads_back_as_committed(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    snapshot = store.snapshot(C)
    record = commit(store, snapshot, wait(snapshot, "b"), start(snapshot, "a", [(A0, [0])]))
    s = record.summary
    assert (s.number, s.epoch, s.outcome) == (1, 1, "committed")
    assert (s.running, s.waiting, s.started) == (1, 1, 1)
    assert store.get_round(C, 1) == record
    assert digest(store.round_snapshot(C, 1)) == digest(snapshot) == s.snapshot_digest
    again = store.snapshot(C)
    commit(store, again, wait(again, "b"))
    assert [r.number for r in store.list_rounds(C, 0, 10)] == [2, 1]
    assert store.list_rounds(C, 2, 10) == [s]
    with pytest.raises(NotFound):
        store.list_rounds("x", 0, 1)


def test_a_waiting_job_shows_the_last_rounds_reason(store: PostgresStore) -> None:
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


Interference = Callable[[PostgresStore], None]


def update_job(store: PostgresStore) -> None:
    do(store, lambda w: w.update_job(C, a_spec("a", weight=9.0), ["weight"], None))


def drain_node(store: PostgresStore) -> None:
    do(store, lambda w: w.drain_nodes(C, [A0], draining=True))


def grow_node(store: PostgresStore) -> None:
    node = NodeSpec(name=A0, gpu_type="a100", gpus=8)
    do(store, lambda w: w.upsert_nodes(C, [node]))


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
    store: PostgresStore, interfere: Interference, why: str, state: JobState
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


def test_a_job_that_ended_during_the_solve_is_not_kept(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    agent_reports(store, f"agent-{A0}", phase="succeeded")
    record = commit(store, snapshot, start(snapshot, "a", [(A0, [0])], DecisionKind.KEEP))
    assert "succeeded" in record.decisions[0].skipped
    assert (record.summary.running, record.summary.waiting) == (0, 0)


def test_progress_during_the_solve_invalidates_no_decision(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [(A0, [0])]))
    snapshot = store.snapshot(C)
    agents_report(store, iterations_done=5.0)  # starting -> running
    record = commit(store, snapshot, start(snapshot, "a", [(A1, [0])], DecisionKind.MOVE))
    assert record.decisions[0].applied
    assert job(store, "a").iterations_done == 5.0


def test_decisions_that_need_the_gpus_of_a_skipped_decision_are_skipped_too(
    store: PostgresStore,
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


def test_a_gpu_is_handed_over_in_two_steps(store: PostgresStore) -> None:
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
    desired = store.desired(C, f"agent-{A0}")
    assert desired.gangs == ()  # b does not start before a is gone
    assert store.observe(C, f"agent-{A0}", "first", [], desired.revision)
    assert allocation_rows(store) == [("b", A0, 0, Hold.HELD)]
    assert states(store) == {"a": JobState.QUEUED, "b": JobState.STARTING}
    assert [g.spec.name for g in store.desired(C, f"agent-{A0}").gangs] == ["b"]


def test_a_job_whose_start_was_never_sent_is_suspended_at_once(store: PostgresStore) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    suspend = wait(snapshot, "a", DecisionKind.SUSPEND)
    commit(store, snapshot, suspend, start(snapshot, "b", [(A0, [0])]))
    snapshot = store.snapshot(C)
    commit(store, snapshot, wait(snapshot, "b", DecisionKind.SUSPEND))
    assert states(store) == {"a": JobState.STOPPING, "b": JobState.QUEUED}
    assert [e.event for e in store.job_history(C, "b")] == ["start", "suspend", "gone"]


def test_a_stopping_job_is_started_elsewhere_once_it_is_gone(store: PostgresStore) -> None:
    a_cluster(store, nodes=2)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    commit(store, snapshot, wait(snapshot, "a", DecisionKind.SUSPEND))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [(A1, [0])]))
    assert allocation_rows(store) == [("a", A0, 0, Hold.RELEASING), ("a", A1, 0, Hold.RESERVED)]
    assert store.desired(C, f"agent-{A1}").gangs == ()  # its former program may still save its work
    assert store.observe(C, f"agent-{A0}", "first", [], store.desired(C, f"agent-{A0}").revision)
    assert allocation_rows(store) == [("a", A1, 0, Hold.HELD)]
    agents_report(store)
    assert states(store) == {"a": JobState.RUNNING}


def test_a_round_that_fails_halfway_changes_nothing(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    snapshot = store.snapshot(C)
    same: Members = [(A0, [0])]
    with pytest.raises(InvalidInput, match="uq_allocations_successor"):
        commit(store, snapshot, start(snapshot, "a", same), start(snapshot, "b", same))
    now = store.snapshot(C)
    assert digest(replace(now, now_s=snapshot.now_s)) == digest(snapshot)
    assert store.list_rounds(C, 0, 1) == []


def test_two_racing_replicas_never_commit_a_round_number_or_a_gpu_twice(
    store: PostgresStore,
) -> None:
    """Each replica tries 30 times, while a third thread lets agents report."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, *(a_spec(f"j{i}") for i in range(10)))
    committed: list[int] = []
    lost: list[str] = []
    over = threading.Event()

    def replica(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            snapshot = store.snapshot(C)
            assert find_doubly_held(snapshot) == []
            try:
                record = commit(store, snapshot, *a_random_round(snapshot, rng))
                committed.append(record.summary.number)
            except RoundSuperseded as error:
                lost.append(error.winner)

    def agents() -> None:
        while not over.is_set():
            for node in (A0, A1):
                agent_reports(store, f"agent-{node}")

    reporting = threading.Thread(target=agents)
    racing = [threading.Thread(target=replica, args=(seed,)) for seed in (1, 2)]
    for thread in (reporting, *racing):
        thread.start()
    for thread in racing:
        thread.join()
    over.set()
    reporting.join()
    assert len(committed) + len(lost) == 60
    assert sorted(committed) == list(range(1, len(committed) + 1))
    assert lost, "no round ever lost the race"
    assert store.get_cluster(C).epoch == len(committed)
    agents_report(store)
    assert all(hold is Hold.HELD for *_, hold in allocation_rows(store))


MOST_TRIPS = 26


"""The most round trips of a round that starts jobs. They were 59 before it began in one transaction."""


def test_a_round_makes_few_database_round_trips(store: PostgresStore, database: Database) -> None:
    a_cluster(store)
    do(store, lambda w: w.upsert_estimates(C, [a_record(n) for n in (1, 2, 4)]))
    submit(store, a_spec("one", requested_gpus=2))
    loop = RoundLoop(store, StoppedClock())
    store.ready()
    with record_trips(database) as trips:
        record = schedule(loop, request=Request(id="r", method="Schedule", digest="d"))
    assert record.summary.started == 1
    assert any(trip.startswith("COPY") for trip in trips)
    assert trips.count("begin") == trips.count("commit") == 2
    assert len(trips) <= MOST_TRIPS, "\n".join(" ".join(trip.split()) for trip in trips)
