"""Jobs that a node cannot start go to another node, and a node that starts nothing is drained."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tessera.db.engine import Database
from tessera.db.failed_starts import DRAINED_BY, MAX_FAILED_STARTS
from tessera.db.store import PostgresStore
from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.lifecycle import JobState
from tessera.formulation.records.agents import ObservedGang
from tests.support.logged import logged_lines
from tests.support.notices import round_requests
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    commit,
    do,
    execute,
    job,
    start,
    submit,
)

A0, A1 = "a100-0", "a100-1"
FULL = "[Errno 28] No space left on device"


@pytest.fixture
def pair(store: PostgresStore) -> PostgresStore:
    """Return a store with two nodes of 8 GPUs."""
    a_cluster(store, nodes=2, gpus=8)
    return store


def begin(store: PostgresStore, name: str, node: str = A0, gpu: int = 0) -> None:
    """Submit a job, and give it a GPU."""
    submit(store, a_spec(name))
    give(store, name, node, gpu)


def give(store: PostgresStore, name: str, node: str, gpu: int = 0) -> None:
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, name, [(node, [gpu])]))


def report(
    store: PostgresStore, name: str, node: str = A0, phase: str = "failed", **facts: Any
) -> None:
    """Let the agent of a node report on a job's present generation."""
    facts = (
        {"exit_reason": ExitReason.NODE_UNFIT, "error": FULL} | facts if phase == "failed" else {}
    )
    gang = ObservedGang(
        job=name, generation=job(store, name).generation, node=node, phase=phase, **facts
    )
    store.observe(C, f"agent-{node}", "first", [gang], 0)


def fail(store: PostgresStore, name: str, node: str = A0, gpu: int = 0, **facts: Any) -> None:
    begin(store, name, node, gpu)
    report(store, name, node, **facts)
    agents_report(store)


def avoided(store: PostgresStore, name: str) -> set[str]:
    snapshot = store.snapshot(C)
    at = snapshot.jobs.name.index(name)
    return {snapshot.nodes.name[n] for n in snapshot.avoids.node[snapshot.avoids.job == at]}


@pytest.mark.parametrize("reason", [ExitReason.NODE_UNFIT, ExitReason.NOT_STARTED])
def test_what_a_node_cannot_start_uses_a_retry_and_avoids_the_node(
    pair: PostgresStore, reason: ExitReason
) -> None:
    fail(pair, "a", exit_reason=reason)
    record = job(pair, "a")
    assert (record.state, record.retries) == (JobState.QUEUED, 1)
    assert avoided(pair, "a") == {A0}
    give(pair, "a", A1)
    assert avoided(pair, "a") == set()  # it is not moved for that
    report(pair, "a", A1, "running")
    assert job(pair, "a").state is JobState.RUNNING
    report(pair, "a", A1, exit_reason=ExitReason.ERROR, error="crashed")
    agents_report(pair)
    assert avoided(pair, "a") == set()


def test_a_job_that_no_node_can_start_avoids_none(pair: PostgresStore) -> None:
    fail(pair, "a", exit_reason=ExitReason.NOT_STARTED)
    give(pair, "a", A1)
    report(pair, "a", A1, exit_reason=ExitReason.NOT_STARTED)
    agents_report(pair)
    assert avoided(pair, "a") == set()


def test_a_node_is_not_avoided_if_no_other_has_room(pair: PostgresStore) -> None:
    do(pair, lambda w: w.drain_nodes(C, [A1], draining=True))
    fail(pair, "a")
    assert avoided(pair, "a") == set()


def test_a_node_is_drained_after_three_starts_in_a_row_that_failed_because_of_it(
    pair: PostgresStore, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for place in range(MAX_FAILED_STARTS - 1):
        fail(pair, f"a{place}", gpu=place)
    assert not pair.get_node(C, A0).draining
    with round_requests(database) as requests, caplog.at_level(logging.WARNING):
        fail(pair, "last", gpu=7)
        assert C in requests.take()
    node = pair.get_node(C, A0)
    assert (node.draining, node.drained_by) == (True, DRAINED_BY)
    assert node.drain_reason == (
        f"3 starts in a row failed because of this node, the last one with: {FULL}; mend it, then"
        " restart its agent or undrain it"
    )
    (line,) = logged_lines(caplog, "node_unfit")
    assert f'node=a100-0 reason="{node.drain_reason}"' in line
    assert not pair.get_node(C, A1).draining


def test_failed_starts_of_the_same_report_count_each(pair: PostgresStore) -> None:
    for place in range(MAX_FAILED_STARTS):
        begin(pair, f"a{place}", gpu=place)
    gangs = [
        ObservedGang(
            job=f"a{place}",
            generation=1,
            node=A0,
            phase="failed",
            exit_reason=ExitReason.NODE_UNFIT,
            error=9 * FULL,
        )
        for place in range(MAX_FAILED_STARTS)
    ]
    pair.observe(C, f"agent-{A0}", "first", gangs, 0)
    assert pair.get_node(C, A0).draining
    pair.observe(C, f"agent-{A0}", "first", gangs, 0)
    assert pair.get_node(C, A0).drain_reason.startswith("3 starts")


def test_a_program_that_fails_everywhere_drains_no_node(pair: PostgresStore) -> None:
    for place in range(2 * MAX_FAILED_STARTS):
        node = (A0, A1)[place % 2]
        fail(pair, f"a{place}", node, place, exit_reason=ExitReason.NOT_STARTED, error="no program")
        fail(pair, f"b{place}", node, place, exit_reason=ExitReason.ERROR, error="crashed")
    assert not any(pair.get_node(C, node).draining for node in (A0, A1))


def test_a_start_that_succeeds_begins_the_count_again(pair: PostgresStore) -> None:
    for place in range(MAX_FAILED_STARTS - 1):
        fail(pair, f"a{place}", gpu=place)
    begin(pair, "good", gpu=6)
    report(pair, "good", phase="running")
    fail(pair, "last", gpu=7)
    assert not pair.get_node(C, A0).draining


def drain_by_failed_starts(store: PostgresStore) -> None:
    for place in range(MAX_FAILED_STARTS):
        fail(store, f"a{place}", gpu=place)
    assert store.get_node(C, A0).draining


def test_a_restart_of_the_agent_ends_the_drain_but_a_new_connection_does_not(
    pair: PostgresStore,
) -> None:
    drain_by_failed_starts(pair)
    spec = pair.get_node(C, A0).spec
    pair.hello(C, f"agent-{A0}", "first", [spec])
    assert pair.get_node(C, A0).draining
    pair.hello(C, f"agent-{A0}", "second", [spec])
    node = pair.get_node(C, A0)
    assert (node.draining, node.drain_reason, node.drained_by) == (False, "", "")
    assert node.drained_s is None


def test_an_operator_has_the_last_word(pair: PostgresStore) -> None:
    drain_by_failed_starts(pair)
    spec = pair.get_node(C, A0).spec
    do(pair, lambda w: w.drain_nodes(C, [A0], draining=True, drained_by="ana"))
    pair.hello(C, f"agent-{A0}", "second", [spec])
    node = pair.get_node(C, A0)
    assert (node.draining, node.drained_by) == (True, "ana")
    do(pair, lambda w: w.drain_nodes(C, [A0], draining=False))
    pair.hello(C, f"agent-{A0}", "first", [spec])
    fail(pair, "next")
    assert not pair.get_node(C, A0).draining  # the count has begun again


def test_a_node_that_could_not_start_a_job_can_be_deleted(
    pair: PostgresStore, database: Database
) -> None:
    fail(pair, "a")
    execute(
        database, "UPDATE agents SET heard_at = now() - interval '1 h' WHERE name = 'agent-a100-0'"
    )
    do(pair, lambda w: w.delete_nodes(C, [A0], {}, allow_missing=False))
    assert avoided(pair, "a") == set()
