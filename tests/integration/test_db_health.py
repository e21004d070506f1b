"""Nodes whose agents report faults: drained by the report, and returned after probation."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest

from tessera.db.agents.health import DRAINED_BY, MAX_REASON_CHARS, PROBATION_S
from tessera.db.clusters.deletion import delete_nodes
from tessera.db.clusters.drains import drain_nodes
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_nodes
from tessera.db.store.reads import get_node, list_nodes
from tessera.db.store.store import Store
from tessera.formulation.base.errors import NotAllowed
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.agents import VALIDATION, HealthFault, NodeHealth
from tessera.formulation.records.clusters import NodeSpec
from tests.support.logged import logged_lines
from tests.support.notices import round_requests
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    execute,
    run,
    states,
    submit,
)

A0, A1 = "a100-0", "a100-1"
XID = HealthFault(gpu=3, kind="xid", detail="Xid 79, GPU has fallen off the bus")
HOT = HealthFault(gpu=1, kind="thermal", detail="slowed down by heat")
UNTRIED = HealthFault(gpu=-1, kind=VALIDATION, detail="the validation has not passed yet")


@pytest.fixture
def pair(store: Store) -> Store:
    """Return a store with two nodes, where a runs on the first."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [3])])
    return store


def report(store: Store, *faults: HealthFault, node: str = A0) -> float:
    """Let the agent of a node report its faults."""
    health = [NodeHealth(node=node, faults=faults)]
    return store.record_health(C, f"agent-{node}", "first", health)


def drain(store: Store, **details: str) -> None:
    store.change(drain_nodes, C, [A0], draining=True, **details)


def undrain(store: Store) -> None:
    store.change(drain_nodes, C, [A0], draining=False)


def end_probation(database: Database) -> None:
    statement = "UPDATE nodes SET probation_until = now() WHERE probation_until IS NOT NULL"
    execute(database, statement)


def test_a_report_of_a_fault_drains_its_node_and_says_why(pair: Store) -> None:
    before = pair.read(get_node, C, A0)
    assert report(pair) == math.inf
    assert pair.read(get_node, C, A0).version == before.version
    assert report(pair, XID, HOT) == math.inf
    node = pair.read(get_node, C, A0)
    reason = "GPU 3: Xid 79, GPU has fallen off the bus; GPU 1: slowed down by heat"
    assert (node.draining, node.drained_by, node.drain_reason) == (True, DRAINED_BY, reason)
    assert node.faults == (XID.sentence, HOT.sentence)
    assert node.drained_s is not None
    assert node.version == before.version + 1
    assert node.probation_end_s is None
    assert not pair.read(get_node, C, A1).draining
    snapshot = pair.snapshot(C)
    assert snapshot.nodes.schedulable.tolist() == [False, True]
    assert states(pair)["a"] is JobState.RUNNING  # until the next round moves it


def test_a_round_is_requested_once_by_a_drain_and_not_by_the_same_report_again(
    pair: Store, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with round_requests(database) as requests, caplog.at_level(logging.INFO):
        report(pair, XID)
        assert requests.take() == [C]
        for _ in range(3):
            report(pair, XID)
        report(pair)  # probation begins, which changes nothing for rounds
        assert requests.take() == []
    facts = f"cluster={C} node={A0}"
    assert [line.partition("changed ")[2] for line in logged_lines(caplog, "node_health")] == [
        f'{facts} change=drain cause="{XID.sentence}"',
        f'{facts} change=probation cause=""',
    ]


def test_a_healthy_node_returns_in_the_first_round_after_its_probation(
    pair: Store, database: Database
) -> None:
    report(pair, XID)
    assert report(pair) == PROBATION_S
    node, now_s = pair.read(get_node, C, A0), pair.snapshot(C).now_s
    assert node.draining
    assert node.faults == ()
    assert node.probation_end_s is not None
    assert 0 < node.probation_end_s - now_s <= PROBATION_S
    outlook = pair.outlooks([C])[C]
    assert 0 < outlook.event_in_s <= PROBATION_S
    pair.begin_round(C, None)
    assert pair.read(get_node, C, A0).draining
    end_probation(database)
    assert pair.outlooks([C])[C].event_in_s == 0.0
    snapshot = pair.begin_round(C, None)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.drain_reason, node.drained_by) == (False, "", "")
    assert (node.drained_s, node.probation_end_s) == (None, None)
    assert snapshot.nodes.schedulable.tolist() == [True, True]  # type: ignore[union-attr]
    assert pair.outlooks([C])[C].event_in_s == math.inf


def test_without_rounds_the_agents_next_report_ends_the_probation(
    pair: Store, database: Database
) -> None:
    report(pair, XID)
    report(pair)
    assert 0 < report(pair) <= PROBATION_S
    end_probation(database)
    assert report(pair) <= PROBATION_S
    assert not pair.read(get_node, C, A0).draining


def test_without_a_probation_a_node_returns_as_soon_as_it_is_healthy(database: Database) -> None:
    hasty = Store(database, probation_s=0.0)
    a_cluster(hasty)
    report(hasty, XID)
    assert hasty.read(get_node, C, A0).draining
    report(hasty)
    assert not hasty.read(get_node, C, A0).draining


def test_a_fault_during_probation_begins_it_again_and_replaces_the_reason(
    pair: Store,
) -> None:
    report(pair, XID)
    report(pair)
    report(pair, HOT)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.probation_end_s) == (True, None)
    assert node.drain_reason == HOT.sentence
    report(pair)
    assert pair.read(get_node, C, A0).probation_end_s is not None


def test_an_agent_that_stops_watching_or_falls_silent_interrupts_the_probation(
    pair: Store, database: Database
) -> None:
    def on_probation() -> bool:
        return pair.read(get_node, C, A0).probation_end_s is not None

    report(pair, XID)
    report(pair)
    pair.record_health(C, f"agent-{A0}", "first", [])
    assert pair.read(get_node, C, A0).draining
    assert not on_probation()
    report(pair)
    assert on_probation()
    # A short loss of the stream changes nothing, but a silence longer than the lease does.
    spec = NodeSpec(name=A0, gpu_type="a100", gpus=4)
    pair.hello(C, f"agent-{A0}", "first", [spec])
    assert on_probation()
    execute(database, "UPDATE agents SET heard_at = now() - interval '1 h'")
    end_probation(database)
    pair.begin_round(C, None)
    assert pair.read(get_node, C, A0).draining  # nobody knows whether it is healthy now
    assert pair.outlooks([C])[C].event_in_s == math.inf
    pair.hello(C, f"agent-{A0}", "first", [spec])
    assert not on_probation()


def test_an_operators_drain_stays_whatever_health_reports(pair: Store, database: Database) -> None:
    drain(pair, reason="new fans", drained_by="ann")
    report(pair, XID)
    node = pair.read(get_node, C, A0)
    assert (node.drain_reason, node.drained_by) == ("new fans", "ann")
    assert node.faults == (XID.sentence,)
    report(pair)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.probation_end_s) == (True, None)


def test_an_operator_who_drains_a_node_that_health_drained_takes_it_over(
    pair: Store, database: Database
) -> None:
    report(pair, XID)
    report(pair)
    drain(pair, drained_by="ann")
    node = pair.read(get_node, C, A0)
    assert (node.drain_reason, node.drained_by) == (XID.sentence, "ann")
    assert node.probation_end_s is None
    report(pair)
    end_probation(database)
    pair.begin_round(C, None)
    assert pair.read(get_node, C, A0).draining


def test_an_operators_undrain_is_respected_until_a_new_fault_comes(pair: Store) -> None:
    report(pair, XID)
    undrain(pair)
    report(pair, XID)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.faults) == (False, (XID.sentence,))
    report(pair, XID, HOT)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.drain_reason) == (True, HOT.sentence)
    report(pair, XID)  # it is excused, so the node is as healthy as the operator wants it
    assert pair.read(get_node, C, A0).probation_end_s is not None


def test_an_excused_fault_that_comes_back_is_a_new_one(pair: Store) -> None:
    report(pair, HOT)
    undrain(pair)
    report(pair)
    assert not pair.read(get_node, C, A0).draining
    report(pair, HOT)
    assert pair.read(get_node, C, A0).draining


def test_the_text_of_a_sites_check_may_vary_while_it_is_excused(pair: Store) -> None:
    for detail in ("load 31", "load 32"):
        report(pair, HealthFault(gpu=-1, kind="site", detail=detail))
        if detail == "load 31":
            undrain(pair)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.faults) == (False, ("load 32",))


def test_a_validation_delays_the_probation_but_drains_no_node(pair: Store) -> None:
    report(pair, UNTRIED)
    assert not pair.read(get_node, C, A0).draining
    report(pair, XID)
    report(pair, UNTRIED)
    node = pair.read(get_node, C, A0)
    assert (node.draining, node.probation_end_s) == (True, None)
    assert node.drain_reason == XID.sentence
    assert node.faults == (UNTRIED.sentence,)
    report(pair)
    assert pair.read(get_node, C, A0).probation_end_s is not None


def test_an_agent_changes_only_its_own_nodes(pair: Store) -> None:
    health = [NodeHealth(node=name, faults=(XID,)) for name in (A1, "nowhere")]
    pair.record_health(C, f"agent-{A0}", "first", health)
    assert not any(node.draining or node.faults for node in pair.read(list_nodes, C, "", 10))
    with pytest.raises(NotAllowed, match="taken over"):
        pair.record_health(C, f"agent-{A0}", "another", [])


def test_many_long_faults_have_a_reason_of_bounded_length(pair: Store) -> None:
    faults = [HealthFault(gpu=k, kind="xid", detail=f"{k}" * 200) for k in range(9)]
    report(pair, *faults)
    node = pair.read(get_node, C, A0)
    assert len(node.drain_reason) == MAX_REASON_CHARS
    assert node.drain_reason.endswith("...; and 6 more")
    assert len(node.faults) == 9


def test_a_node_that_was_created_again_is_drained_by_the_same_report(pair: Store) -> None:
    report(pair, XID, node=A1)
    pair.change(delete_nodes, C, [A1], {}, allow_missing=False)
    pair.change(upsert_nodes, C, [NodeSpec(name=A1, gpu_type="a100", gpus=4)])
    assert not pair.read(get_node, C, A1).draining
    report(pair, XID, node=A1)
    assert pair.read(get_node, C, A1).draining


async def test_a_drain_and_an_undrain_at_the_same_time_leave_one_of_both_in_force(
    pair: Store,
) -> None:
    for _ in range(10):
        await asyncio.gather(
            asyncio.to_thread(report, pair, XID),
            asyncio.to_thread(undrain, pair),
            asyncio.to_thread(report, pair, HOT),
        )
        node = pair.read(get_node, C, A0)
        assert node.draining == bool(node.drain_reason)
        report(pair)
        undrain(pair)
        assert not pair.read(get_node, C, A0).draining
