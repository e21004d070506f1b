"""Events that ask for a round before the period ends, and what a cluster's outlook tells of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.clusters import ClusterOutlook, NodeSpec, TenantSpec
from tessera.formulation.records.estimates import CellFilter
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.values import Workload
from tests.support.notices import RoundRequests, round_requests
from tests.support.stored_cluster import (
    BERT,
    C,
    a_cluster,
    a_record,
    a_round,
    a_spec,
    a_summary,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    do,
    execute,
    fail,
    record_heartbeat,
    run,
    start,
    states,
    submit,
    wait,
)

A0, A1 = "a100-0", "a100-1"
AGENT0, AGENT1 = "agent-a100-0", "agent-a100-1"
SILENCE_S = 45.0


@pytest.fixture
def busy(store: PostgresStore) -> PostgresStore:
    """Return a store with two nodes of four GPUs, on both of which a runs while b waits."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a", max_retries=1), a_spec("b"))
    run(store, a=[(A0, range(4)), (A1, range(4))])
    return store


@pytest.fixture
def requests(busy: PostgresStore, database: Database) -> Iterator[RoundRequests]:
    with round_requests(database) as heard:
        yield heard


def make_silent(database: Database, agent: str, seconds: float = 3600.0) -> None:
    execute(
        database,
        f"UPDATE agents SET heard_at = clock_timestamp() - interval '{seconds} s' WHERE name = '{agent}'",
    )


def outlook(store: PostgresStore) -> ClusterOutlook:
    return store.outlooks([C])[C]


EVENTS: dict[str, Callable[[PostgresStore], object]] = {
    "a submission": lambda s: submit(s, a_spec("c")),
    "the end of a job": lambda s: agents_report(s, phase="succeeded"),
    "a failure": lambda s: fail(s, "a"),
    "a cancellation": lambda s: apply_event(s, "a", JobEvent.CANCEL),
    "a hold": lambda s: apply_event(s, "b", JobEvent.HOLD),
    "a changed job": lambda s: do(
        s, lambda w: w.update_job(C, a_spec("b", weight=9.0), ["weight"], None)
    ),
    "a drain": lambda s: do(s, lambda w: w.drain_nodes(C, [A0], draining=True)),
    "a new node": lambda s: s.hello(C, "new", "1", [NodeSpec(name="n", gpu_type="a100", gpus=4)]),
    "a changed node": lambda s: do(
        s, lambda w: w.upsert_nodes(C, [NodeSpec(name=A0, gpu_type="a100", gpus=8)])
    ),
    "a node that its agent leaves": lambda s: s.hello(C, AGENT1, "first", []),
    "changed estimates": lambda s: do(
        s, lambda w: w.upsert_estimates(C, [a_record(1, iter_time_s=0.5)])
    ),
    "first estimates": lambda s: do(
        s, lambda w: w.derive(C, [a_record(3, iter_time_s=0.2, nodes=1)], {BERT: "of the model"})
    ),
    "deleted estimates": lambda s: do(
        s, lambda w: w.delete_cells(C, CellFilter(workload=BERT, gpus=2))
    ),
    "a tenant's quota": lambda s: do(
        s, lambda w: w.upsert_tenants(C, [TenantSpec(name="t", quotas={"a100": 1})])
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_asks_for_a_round(name: str, busy: PostgresStore, requests: RoundRequests) -> None:
    EVENTS[name](busy)
    heard = requests.take()
    assert heard
    assert set(heard) == {C}


def test_the_end_of_a_hold_or_a_drain_asks_for_a_round(
    busy: PostgresStore, requests: RoundRequests
) -> None:
    apply_event(busy, "b", JobEvent.HOLD)
    do(busy, lambda w: w.drain_nodes(C, [A0], draining=True))
    requests.take()
    apply_event(busy, "b", JobEvent.RELEASE)
    assert requests.take() == [C]
    do(busy, lambda w: w.drain_nodes(C, [A0], draining=False))
    assert requests.take() == [C]


def test_a_lost_node_and_its_return_ask_for_rounds(
    busy: PostgresStore, database: Database, requests: RoundRequests
) -> None:
    make_silent(database, AGENT1)
    assert busy.expire(C) == ["a"]
    assert requests.take() == [C]
    busy.hello(C, AGENT1, "second", [NodeSpec(name=A1, gpu_type="a100", gpus=4)])
    assert requests.take() == [C]


QUIET: dict[str, Callable[[PostgresStore], object]] = {
    "progress": lambda s: agent_reports(s, AGENT0, iterations_done=5.0, iter_time_s=1.0),
    "a heartbeat": lambda s: record_heartbeat(s, AGENT0),
    "a reconnection": lambda s: s.hello(
        C, AGENT0, "first", [NodeSpec(name=A0, gpu_type="a100", gpus=4)]
    ),
    "a label": lambda s: do(
        s, lambda w: w.update_job(C, a_spec("b", labels={"x": "y"}), ["labels"], None)
    ),
    "a repeated drain": lambda s: do(s, lambda w: w.drain_nodes(C, [A0], draining=False)),
    "estimates that no live job needs": lambda s: do(
        s,
        lambda w: w.upsert_estimates(
            C, [a_record(1, workload=Workload(model="other", params="", global_batch=8))]
        ),
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_changes_no_decision_asks_for_no_round(
    name: str, busy: PostgresStore, requests: RoundRequests
) -> None:
    QUIET[name](busy)
    assert requests.take() == []


def test_decisions_of_a_round_ask_for_no_other_round(
    busy: PostgresStore, requests: RoundRequests
) -> None:
    snapshot = busy.snapshot(C)
    gpus = [(A0, range(1))]
    commit(busy, snapshot, wait(snapshot, "a", DecisionKind.SUSPEND), start(snapshot, "b", gpus))
    agents_report(busy)
    assert states(busy)["b"] is JobState.RUNNING
    assert requests.take() == []


def test_a_cluster_without_a_live_job_asks_for_no_round(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    with round_requests(database) as requests:
        store.hello(C, "new", "1", [NodeSpec(name="n", gpu_type="a100", gpus=4)])
        do(store, lambda w: w.drain_nodes(C, [A0], draining=True))
        do(store, lambda w: w.upsert_estimates(C, [a_record(1, iter_time_s=0.5)]))
        assert requests.take() == []


def test_a_refused_or_dry_change_asks_for_no_round(
    busy: PostgresStore, requests: RoundRequests
) -> None:
    def work(writer: object) -> bytes:
        writer.submit_jobs(C, [a_spec("c")])  # type: ignore[attr-defined]
        return b""

    busy.write(None, work, validate_only=True)
    assert requests.take() == []


def test_the_outlook_says_when_the_next_node_falls_silent(
    busy: PostgresStore, database: Database
) -> None:
    make_silent(database, AGENT1, seconds=30.0)
    seen = outlook(busy)
    assert 0.0 < seen.look_in_s <= SILENCE_S - 30.0
    assert seen.event_in_s == math.inf
    record_heartbeat(busy, AGENT1)
    assert outlook(busy).look_in_s > SILENCE_S - 30.0
    assert outlook(busy).schedulable == seen.schedulable


def test_a_node_that_fell_silent_with_jobs_needs_a_round_at_once(
    busy: PostgresStore, database: Database
) -> None:
    make_silent(database, AGENT1)
    assert outlook(busy).event_in_s == 0.0
    busy.expire(C)
    assert outlook(busy).event_in_s == math.inf


def test_an_idle_node_that_falls_silent_or_returns_changes_the_schedulable_nodes(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"))
    both = outlook(store).schedulable
    make_silent(database, AGENT1)
    one = outlook(store)
    assert one.schedulable != both
    assert one.event_in_s == math.inf
    record_heartbeat(store, AGENT1)
    assert outlook(store).schedulable == both


def test_a_clock_that_was_set_back_needs_a_round(busy: PostgresStore, database: Database) -> None:
    make_silent(database, AGENT1, seconds=-3600.0)
    assert outlook(busy).event_in_s == 0.0
    busy.expire(C)
    assert outlook(busy).event_in_s == math.inf


def commit_promise(store: PostgresStore, due_in_s: float, **overrides: object) -> Snapshot:
    """Commit a round whose promises need the next one after ``due_in_s``."""
    snapshot = store.snapshot(C)
    summary = a_summary(snapshot, promises_due_s=snapshot.now_s + due_in_s, **overrides)
    store.commit(replace(a_round(snapshot, wait(snapshot, "b")), summary=summary))
    return snapshot


def test_the_outlook_says_when_promises_need_the_next_round(busy: PostgresStore) -> None:
    commit_promise(busy, 600.0)
    assert 500.0 < outlook(busy).promises_due_in_s <= 600.0
    commit_promise(busy, -5.0)
    assert outlook(busy).promises_due_in_s == 0.0
    commit_promise(busy, math.inf)
    assert outlook(busy).promises_due_in_s == math.inf


def test_a_promise_does_not_repeat_a_round_that_was_refused(busy: PostgresStore) -> None:
    commit_promise(busy, -5.0)
    commit_promise(busy, math.inf, outcome="refused")
    assert outlook(busy).promises_due_in_s == math.inf


def test_clusters_that_do_not_exist_have_no_outlook(busy: PostgresStore) -> None:
    assert set(busy.outlooks([C, "nowhere"])) == {C}
