"""Starts of jobs that outlive their GPUs, and requests for output in the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tessera.db.agents import log_reads
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import NodeSilent, NotFound, TooBusy
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.records.logs import MAX_READS_PER_AGENT, LogRead
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    commit,
    execute,
    job,
    run,
    start,
    submit,
    wait,
)

AGENT = "agent-a100-0"


@pytest.fixture
def logs(store: Store, database: Database) -> Store:
    a_cluster(store)
    return Store(database)


def ask(logs: Store, cluster: str, request: LogRead, client: str) -> None:
    """Store a request for output."""
    logs.update(log_reads.store_request, cluster, request, client, logs.lease_s)


def a_read(read_id: str = "r", **changes: Any) -> LogRead:
    values: dict[str, Any] = {
        "id": read_id,
        "job": "a",
        "job_number": 1,
        "generation": 1,
        "rank": 0,
        "node": "a100-0",
        "offset": 0,
    }
    return LogRead(**values | changes)


def count(database: Database, query: str) -> int:
    with database.read() as connection:
        return int(connection.execute(sa.text(query)).scalar_one())


def age(database: Database, seconds: float) -> None:
    execute(database, f"UPDATE log_reads SET asked_at = asked_at - interval '{seconds} s'")


def test_each_start_is_kept_with_its_nodes_in_rank_order(store: Store, logs: Store) -> None:
    submit(store, a_spec("a", requested_gpus=3))
    run(store, a=[("a100-0", [1, 2]), ("a100-1", [0])])
    started = logs.read(log_reads.find_start, C, "a", 0)
    assert started.start is not None
    allocation = job(store, "a").allocation
    assert allocation is not None
    assert started.start.shares == allocation.shares == (("a100-0", (1, 2)), ("a100-1", (0,)))
    assert (started.start.waits, started.start.holds) == (False, True)
    assert started.start.nodes_of_ranks(ranks_are_gpus=True) == ["a100-0", "a100-0", "a100-1"]
    assert started.start.nodes_of_ranks(ranks_are_gpus=False) == ["a100-0", "a100-1"]
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [("a100-1", [3])], DecisionKind.RESIZE))
    agents_report(store)
    assert (started := logs.read(log_reads.find_start, C, "a", 1)).start is not None
    assert started.start is not None
    assert (started.start.holds, started.first, started.last, started.following) == (False, 1, 2, 2)
    assert (started := logs.read(log_reads.find_start, C, "a", 0)).start is not None
    assert started.start is not None
    assert started.start.shares == (("a100-1", (3,)),)
    assert started.following == 0
    apply_event(store, "a", JobEvent.CANCEL)
    agents_report(store)
    started = logs.read(log_reads.find_start, C, "a", 0)
    assert started.start is not None
    assert (started.state, started.start.holds) == (JobState.CANCELLED, False)


def test_a_start_that_waits_is_not_the_latest_and_is_forgotten_if_it_never_began(
    store: Store, logs: Store
) -> None:
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[("a100-0", [0])], b=[("a100-1", [0])])
    snapshot = store.snapshot(C)
    commit(
        store,
        snapshot,
        start(snapshot, "a", [("a100-1", [0])], DecisionKind.MOVE),
        wait(snapshot, "b", DecisionKind.SUSPEND),
    )
    latest, second = (
        logs.read(log_reads.find_start, C, "a", 0),
        logs.read(log_reads.find_start, C, "a", 2),
    )
    assert latest.start is not None
    assert second.start is not None
    assert (latest.start.generation, latest.following) == (1, 2)
    assert second.start.waits
    apply_event(store, "a", JobEvent.HOLD)
    assert logs.read(log_reads.find_start, C, "a", 2).start is None
    assert (
        logs.read(log_reads.find_start, C, "a", 0).last,
        logs.read(log_reads.find_start, C, "a", 1).following,
    ) == (1, 0)


def test_starts_are_deleted_with_their_job_and_the_first_of_many_before(
    store: Store, logs: Store, database: Database
) -> None:
    submit(store, a_spec("a"))
    for number in range(60):
        run(store, a=[("a100-0", [number % 4])])
        snapshot = store.snapshot(C)
        commit(store, snapshot, wait(snapshot, "a", DecisionKind.SUSPEND))
        agents_report(store)
    assert store.prune(3600.0, 0)["job_starts"] == 0
    execute(database, "UPDATE job_starts SET given_at = now() - interval '2 h'")
    assert store.count_old(3600.0, 0)["job_starts"] == 10
    assert store.prune(3600.0, 0)["job_starts"] == 10
    started = logs.read(log_reads.find_start, C, "a", 0)
    assert (started.first, started.last) == (11, 60)
    apply_event(store, "a", JobEvent.CANCEL)
    execute(database, "UPDATE jobs SET ended_at = now() - interval '2 h'")
    assert store.prune(3600.0, 0)["jobs"] == 1
    assert count(database, "SELECT count(*) FROM job_starts") == 0
    with pytest.raises(NotFound, match="jobs/a does not exist"):
        logs.read(log_reads.find_start, C, "a", 0)
    with pytest.raises(NotFound, match="clusters/none does not exist"):
        logs.read(log_reads.find_start, "none", "a", 0)


def test_requests_write_no_wal(logs: Store, database: Database) -> None:
    query = "SELECT count(*) FROM pg_class WHERE relname = 'log_reads' AND relpersistence = 'u'"
    assert count(database, query) == 1


@pytest.mark.parametrize("shift_s", [31, -31])
def test_expired_requests_are_not_pending_and_are_deleted(
    logs: Store, database: Database, shift_s: float
) -> None:
    """Those of the future were made before the clock was set back."""
    ask(logs, C, a_read("old"), "ada")
    age(database, 29 if shift_s > 0 else -29)
    assert len(logs.read(log_reads.find_pending, C, AGENT)) == 1
    age(database, 2 if shift_s > 0 else -2)
    assert logs.read(log_reads.find_pending, C, AGENT) == []
    ask(logs, C, a_read("new"), "ada")
    assert [read.id for read in logs.read(log_reads.find_pending, C, AGENT)] == ["new"]
    assert count(database, "SELECT count(*) FROM log_reads") == 1


def test_expired_requests_are_pruned(store: Store, logs: Store, database: Database) -> None:
    ask(logs, C, a_read("old"), "ada")
    assert store.prune(3600.0, 0)["log_reads"] == 0
    age(database, 31)
    assert store.prune(3600.0, 0)["log_reads"] == 1


def test_requests_of_a_client_and_of_a_cluster_are_limited(
    logs: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(log_reads.MAX_READS_PER_CLIENT):
        ask(logs, C, a_read(f"r{number}"), "ada")
    with pytest.raises(TooBusy, match="32 requests of this client for output are waiting"):
        ask(logs, C, a_read("more"), "ada")
    assert len(logs.read(log_reads.find_pending, C, AGENT)) == MAX_READS_PER_AGENT
    ask(logs, C, a_read("other"), "bob")
    for client in range(log_reads.MAX_READS_PER_CLUSTER // 32 - 1):
        for number in range(31 if client == 0 else 32):
            ask(logs, C, a_read(f"{client}/{number}"), f"c{client}")
    with pytest.raises(TooBusy, match="256 requests of this cluster for output are waiting"):
        ask(logs, C, a_read("more"), "carol")
    age(database, 31)
    ask(logs, C, a_read("more"), "ada")


def forget_node(store: Store, database: Database) -> None:
    execute(database, "DELETE FROM gpus; DELETE FROM nodes")


def never_hear(store: Store, database: Database) -> None:
    execute(database, "UPDATE nodes SET agent_id = NULL")


def fall_silent(store: Store, database: Database) -> None:
    execute(database, "UPDATE agents SET heard_at = now() - interval '50 s'")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (forget_node, "node a100-0 was deleted from the cluster"),
        (never_hear, "no agent runs on node a100-0"),
        (fall_silent, "node a100-0 was last heard 50 s ago; its output is on its disk"),
    ],
)
def test_a_node_that_cannot_be_asked_is_refused(
    store: Store,
    logs: Store,
    database: Database,
    change: Callable[[Store, Database], None],
    words: str,
) -> None:
    change(store, database)
    with pytest.raises(NodeSilent, match=words):
        ask(logs, C, a_read(), "ada")
    assert count(database, "SELECT count(*) FROM log_reads") == 0


def test_the_cluster_of_a_request_must_exist(logs: Store) -> None:
    with pytest.raises(NotFound, match="clusters/none"):
        ask(logs, "none", a_read(), "ada")


def test_the_silence_of_a_node_is_known(logs: Store, database: Database) -> None:
    execute(database, "UPDATE agents SET heard_at = now() - interval '1 h'")
    silent_s = logs.read(log_reads.silence_of_node, C, "a100-0")
    assert silent_s is not None
    assert silent_s >= 3600.0
    assert logs.read(log_reads.silence_of_node, C, "none") is None
    assert logs.read(log_reads.silence_of_node, "none", "a100-0") is None
