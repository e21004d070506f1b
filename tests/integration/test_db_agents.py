"""Agents: their reports change jobs, and their GPUs are freed only by a report or by silence."""

from __future__ import annotations

import pytest

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.rounds.leases import acquire_lease
from tessera.db.schema.engine import Database
from tessera.db.store.reads import get_node, job_history
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import InvalidInput, NotAllowed, NotFound
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.state.snapshot import Snapshot
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    execute,
    job,
    record_heartbeat,
    run,
    start,
    states,
    submit,
    wait,
)

A0, A1 = "a100-0", "a100-1"
AGENT0, AGENT1 = f"agent-{A0}", f"agent-{A1}"


def make_silent(database: Database, agent: str, seconds: float = 46.0) -> None:
    execute(
        database,
        f"UPDATE agents SET heard_at = heard_at - {seconds} * interval '1 s' WHERE name = '{agent}'",
    )


def a_gang(node: str = A0, **facts: object) -> ObservedGang:
    fields = {"job": "a", "generation": 1, "node": node, "phase": "running"} | facts
    return ObservedGang(**fields)  # type: ignore[arg-type]  # a test's shorthand


@pytest.fixture
def pair(store: Store) -> Store:
    """Return a store where a, of 100 iterations, runs on both nodes and b waits."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a", iterations=100, max_retries=1), a_spec("b"))
    run(store, a=[(A0, range(4)), (A1, range(4))])
    assert states(store)["a"] is JobState.RUNNING
    return store


def test_a_gang_is_desired_by_every_agent_that_has_a_member(pair: Store) -> None:
    for agent in (AGENT0, AGENT1):
        (gang,) = pair.read(load_desired_gangs, C, agent).gangs
        assert (gang.spec.name, gang.generation, gang.leader) == ("a", 1, A0)
        assert gang.allocation.shares == ((A0, (0, 1, 2, 3)), (A1, (0, 1, 2, 3)))


def test_a_gang_is_desired_only_when_every_gpu_on_every_node_is_held(store: Store) -> None:
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, b=[(A1, [0])])
    snapshot = store.snapshot(C)
    commit(
        store,
        snapshot,
        start(snapshot, "a", [(A0, range(4)), (A1, range(4))]),
        wait(snapshot, "b", DecisionKind.SUSPEND),
    )
    assert store.read(load_desired_gangs, C, AGENT0).gangs == ()
    assert agent_reports(store, AGENT1)
    assert [g.spec.name for g in store.read(load_desired_gangs, C, AGENT0).gangs] == ["a"]


def test_a_gang_that_succeeded_is_done_and_its_gpus_are_freed_once_it_is_gone(
    pair: Store,
) -> None:
    over = a_gang(phase="succeeded", iterations_done=100.0)
    assert pair.update(record_observation, C, AGENT0, "first", [over], 1)
    record = job(pair, "a")
    assert (record.state, record.iterations_done, record.allocation) == (
        JobState.SUCCEEDED,
        100.0,
        None,
    )
    assert record.ended_s is not None
    assert record.started_s is not None
    assert pair.read(get_node, C, A0).free_gpus == 0
    agents_report(pair)
    assert [pair.read(get_node, C, node).free_gpus for node in (A0, A1)] == [4, 4]
    assert pair.read(get_node, C, A0).jobs == ()


def test_a_gpu_is_not_freed_by_a_report_older_than_its_release(pair: Store) -> None:
    old = pair.read(load_desired_gangs, C, AGENT0).revision
    apply_event(pair, "a", JobEvent.CANCEL)
    for agent in (AGENT0, AGENT1):
        assert not pair.update(record_observation, C, agent, "first", [], old)
    assert states(pair)["a"] is JobState.CANCELLING
    new = pair.read(load_desired_gangs, C, AGENT0).revision
    assert new > old
    pair.update(record_observation, C, AGENT0, "first", [a_gang(phase="stopping")], new)
    pair.update(record_observation, C, AGENT1, "first", [], new)
    assert states(pair)["a"] is JobState.CANCELLING
    pair.update(record_observation, C, AGENT0, "first", [], new)
    assert states(pair)["a"] is JobState.CANCELLED


@pytest.mark.parametrize(
    ("event", "leaving", "left"),
    [
        (JobEvent.CANCEL, JobState.CANCELLING, JobState.CANCELLED),
        (JobEvent.HOLD, JobState.HOLDING, JobState.HELD),
    ],
)
def test_a_user_takes_a_running_job_off_its_gpus(
    pair: Store, event: JobEvent, leaving: JobState, left: JobState
) -> None:
    apply_event(pair, "a", event)
    assert states(pair)["a"] is leaving
    assert pair.read(load_desired_gangs, C, AGENT0).gangs == ()
    agents_report(pair)
    assert states(pair)["a"] is left


def test_a_job_that_finishes_while_it_is_cancelled_has_succeeded(pair: Store) -> None:
    apply_event(pair, "a", JobEvent.CANCEL)
    pair.update(
        record_observation,
        C,
        AGENT0,
        "first",
        [a_gang(phase="succeeded", iterations_done=99.0)],
        99,
    )
    assert states(pair)["a"] is JobState.CANCELLING
    pair.update(
        record_observation,
        C,
        AGENT0,
        "first",
        [a_gang(phase="succeeded", iterations_done=100.0)],
        99,
    )
    assert states(pair)["a"] is JobState.SUCCEEDED


def test_a_crash_is_retried_until_no_retries_are_left(pair: Store) -> None:
    pair.update(
        record_observation,
        C,
        AGENT1,
        "first",
        [a_gang(A1, phase="failed", error="out of memory\0")],
        99,
    )
    record = job(pair, "a")
    assert (record.state, record.retries) == (JobState.STOPPING, 1)
    assert record.last_error == "out of memory"
    agents_report(pair)
    assert states(pair)["a"] is JobState.QUEUED
    run(pair, a=[(A0, [0])])
    pair.update(record_observation, C, AGENT0, "first", [a_gang(generation=2, phase="failed")], 99)
    assert states(pair)["a"] is JobState.FAILING
    agents_report(pair)
    record = job(pair, "a")
    assert (record.state, record.retries) == (JobState.FAILED, 2)


def test_a_job_is_running_once_its_leader_reports_it(store: Store) -> None:
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [(A0, range(4)), (A1, range(4))]))
    store.update(record_observation, C, AGENT1, "first", [a_gang(A1)], 1)
    store.update(record_observation, C, AGENT0, "first", [a_gang(A0, phase="starting")], 1)
    assert states(store) == {"a": JobState.STARTING}
    store.update(record_observation, C, AGENT0, "first", [a_gang(A0)], 1)
    record = job(store, "a")
    assert (record.state, record.version) == (JobState.RUNNING, 2)
    assert record.started_s is not None


def test_a_silent_node_loses_its_jobs(pair: Store, database: Database) -> None:
    assert pair.expire(C) == []
    make_silent(database, AGENT1)
    assert pair.expire(C) == ["a"]
    assert pair.expire(C) == []
    assert states(pair)["a"] is JobState.STOPPING
    assert pair.read(get_node, C, A1).free_gpus == 4
    # This agent is alive, and must report that a is gone.
    assert pair.read(get_node, C, A0).free_gpus == 0
    agent_reports(pair, AGENT0)
    assert states(pair)["a"] is JobState.QUEUED
    assert pair.read(get_node, C, A0).free_gpus == 4
    assert "lost" in [e.event for e in pair.read(job_history, C, "a")]


def test_a_leaving_job_on_a_silent_node_is_gone(pair: Store, database: Database) -> None:
    apply_event(pair, "a", JobEvent.CANCEL)
    for agent in (AGENT0, AGENT1):
        make_silent(database, agent)
    assert pair.expire(C) == []  # no job lost a GPU that it owned
    assert states(pair)["a"] is JobState.CANCELLED


def test_a_heartbeat_keeps_the_lease(pair: Store, database: Database) -> None:
    for agent in (AGENT0, AGENT1):
        make_silent(database, agent)
        record_heartbeat(pair, agent, "first")
    assert pair.expire(C) == []
    assert pair.read(get_node, C, A0).silent_s < 40


def test_a_node_has_one_live_agent(pair: Store, database: Database) -> None:
    node = NodeSpec(name=A0, gpu_type="a100", gpus=4)
    with pytest.raises(NotAllowed, match=f"belongs to agent {AGENT0}"):
        pair.hello(C, "thief", "x", [node])
    make_silent(database, AGENT0)
    pair.hello(C, "heir", "x", [node])  # the node had not been expired yet
    assert states(pair)["a"] is JobState.STOPPING
    assert pair.read(load_desired_gangs, C, AGENT0).gangs == ()
    agent_reports(pair, AGENT1)
    assert states(pair)["a"] is JobState.QUEUED


def test_a_node_no_longer_named_by_its_agent_falls_silent(pair: Store, database: Database) -> None:
    pair.hello(C, AGENT1, "second", [])
    assert pair.expire(C) == []  # the old process may still run there until its lease ends
    assert pair.snapshot(C).nodes.schedulable.tolist() == [True, False]
    execute(database, f"UPDATE nodes SET heard_at = now() - interval '46 s' WHERE name = '{A1}'")
    assert pair.expire(C) == ["a"]


def test_a_round_sees_no_silent_node_whose_jobs_still_have_gpus(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node falls silent while the jobs of the first one lose their GPUs."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[(A0, range(4))], b=[(A1, range(4))])
    make_silent(database, AGENT0)
    expire, lost = store.expire, list[list[str]]()

    def expire_and_wait(cluster: str) -> list[str]:
        lost.append(expire(cluster))
        if len(lost) == 1:
            make_silent(database, AGENT1)
        return lost[-1]

    monkeypatch.setattr(store, "expire", expire_and_wait)
    snapshot = store.begin_round(C, None)
    assert isinstance(snapshot, Snapshot)
    assert lost == [["a"], ["b"]]
    assert not snapshot.nodes.schedulable.any()
    assert not (snapshot.allocations.job >= 0).any()


def test_hello_registers_and_corrects_nodes(store: Store) -> None:
    a_cluster(store, nodes=1)
    store.hello(C, AGENT0, "2", [NodeSpec(name=A0, gpu_type="a100", gpus=8, rack="r")])
    store.hello(C, AGENT0, "3", [NodeSpec(name=A0, gpu_type="a100", gpus=8)])
    node = store.read(get_node, C, A0)
    assert (node.spec.gpus, node.spec.rack, node.version) == (8, "r", 2)
    for wrong in ({"gpu_type": "h100"}, {"gpus": 65}):
        spec = NodeSpec(**{"name": A0, "gpu_type": "a100", "gpus": 4} | wrong)  # type: ignore[arg-type]  # a test's shorthand
        with pytest.raises(InvalidInput):
            store.hello(C, AGENT0, "4", [spec])
    submit(store, a_spec("a"))
    run_on = store.snapshot(C)
    commit(store, run_on, start(run_on, "a", [(A0, [0])]))
    with pytest.raises(NotAllowed):
        store.hello(C, AGENT0, "5", [NodeSpec(name=A0, gpu_type="a100", gpus=4)])
    with pytest.raises(NotFound):
        store.hello("x", AGENT0, "5", [])


def test_the_revision_rises_only_when_the_desired_state_changes(pair: Store) -> None:
    before = pair.read(load_desired_gangs, C, AGENT0).revision
    pair.update(record_observation, C, AGENT0, "first", [a_gang(iterations_done=3.0)], before)
    snapshot = pair.snapshot(C)
    keep = start(snapshot, "a", [(A0, range(4)), (A1, range(4))], DecisionKind.KEEP)
    commit(pair, snapshot, keep, wait(snapshot, "b"))
    apply_event(pair, "b", JobEvent.CANCEL)
    assert pair.read(load_desired_gangs, C, AGENT0).revision == before
    apply_event(pair, "a", JobEvent.HOLD)
    assert pair.read(load_desired_gangs, C, AGENT0).revision == before + 1


def test_only_one_replica_holds_the_lease(store: Store, database: Database) -> None:
    a_cluster(store)
    assert store.update(acquire_lease, C, "one", 60.0)
    assert not store.update(acquire_lease, C, "two", 60.0)
    assert store.update(acquire_lease, C, "one", 60.0)
    execute(database, "UPDATE leases SET expires_at = now() - interval '1 s'")
    assert store.update(acquire_lease, C, "two", 60.0)
    assert not store.update(acquire_lease, C, "one", 60.0)
    assert not store.update(acquire_lease, "x", "one", 60.0)


def test_an_agents_network_report_stays_with_its_nodes_until_the_next_report(
    pair: Store,
) -> None:
    def remarks() -> list[tuple[str, ...]]:
        return [pair.read(get_node, C, node).network_remarks for node in (A0, A1)]

    assert remarks() == [(), ()]
    record_heartbeat(pair, AGENT0, "first", ["eth1: not strict", "eth2: gone"])
    assert remarks() == [("eth1: not strict", "eth2: gone"), ()]
    record_heartbeat(pair, AGENT0, "first")
    assert remarks() == [("eth1: not strict", "eth2: gone"), ()]
    record_heartbeat(pair, AGENT0, "first", [])
    assert remarks() == [(), ()]
    record_heartbeat(pair, AGENT0, "first", ["eth1: not strict"])
    pair.hello(C, AGENT0, "second", [NodeSpec(name=A0, gpu_type="a100", gpus=4)])
    assert remarks() == [(), ()]
