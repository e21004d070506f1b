"""Networks that change while plans for them are made, on a real database."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera.db.store import PostgresStore
from tessera.formulation.errors import NotFound, StaleEtag
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.network.running import running_now
from tessera.formulation.network.traffic import CellTraffic, StageTraffic
from tessera.formulation.records.rounds import NetworkCommit, RoundRecord
from tessera.formulation.records.store import Request
from tessera.formulation.topologies.described import decode_topology
from tessera.service.loop import RoundLoop
from tessera.service.network_planner import NetworkPlanner
from tessera.service.standing_policy import StandingPolicies
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    agents_report,
    apply_event,
    do,
    run,
    submit,
)
from tests.support.worlds import StoppedClock

CLOS: dict[str, Any] = {
    "kind": "clos",
    "nodes": ["a100-0", "a100-2", "a100-1", "a100-3"],
    "tors": 2,
    "aggregations": 2,
    "tor_bytes_per_s": 12.5e9,
    "host": "a100",
}
BOTH = (("a100-0", range(4)), ("a100-1", range(4))), (("a100-2", range(4)), ("a100-3", range(4)))


def set_described_topology(store: PostgresStore, **changes: object) -> None:
    text = json.dumps(CLOS | changes, sort_keys=True)
    do(store, lambda w: w.set_topology(C, decode_topology(text), None))


@pytest.fixture
def sending(store: PostgresStore) -> PostgresStore:
    """Return a store with a network, and two jobs that run across it."""
    a_cluster(store, nodes=4)
    set_described_topology(store)
    stage = StageTraffic(dp=8, tp=1, data=(5e9, 14))
    cell = CellTraffic(work_flop=1e15, compute_s=0.1, start_s=0.05, stages=(stage,))
    do(store, lambda w: w.upsert_estimates(C, [a_record(8, nodes=2, traffic=cell)]))
    submit(store, a_spec("one", requested_gpus=8), a_spec("two", requested_gpus=8))
    run(store, one=BOTH[0], two=BOTH[1])
    return store


class StoreWithInterference:
    """A store in which something happens after each snapshot."""

    def __init__(self, store: PostgresStore, happens: Callable[[], object]) -> None:
        self._store, self._happens = store, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Any:
        loaded = self._store.snapshot(cluster, use_half_life_s)
        self._happens()
        return loaded

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Any:
        begun = self._store.begin_round(cluster, request, use_half_life_s)
        self._happens()
        return begun


def commit_round(store: Any) -> RoundRecord:
    return RoundLoop(store, StoppedClock()).schedule(
        C,
        RoundOptions(),
        remaining_s=lambda: math.inf,
        dry_run=False,
        request=None,
        cancelled=lambda: False,
    )


def test_a_round_is_committed_although_its_network_was_dropped_during_the_solve(
    sending: PostgresStore,
) -> None:
    record = commit_round(
        StoreWithInterference(sending, lambda: do(sending, lambda w: w.drop_topology(C)))
    )
    assert record.summary.outcome == "committed"
    with pytest.raises(NotFound):
        sending.network_in_force(C)
    assert len(sending.snapshot(C).standing) == 0


def test_a_round_made_for_another_topology_leaves_the_plan_in_force(
    sending: PostgresStore,
) -> None:
    replanning = NetworkPlanner(sending, StoppedClock(), StandingPolicies(sending))
    replanning.keep(C)

    def replaced() -> None:
        set_described_topology(sending, aggregations=1)
        assert replanning.keep(C) is not None

    commit_round(StoreWithInterference(sending, replaced))
    assert sending.network_in_force(C).cause == "topology"
    switches = {
        via for d in sending.network_in_force(C).decisions for r in d.routes for via in r.via
    }
    assert "agg-1" not in switches


def test_a_network_plan_for_another_topology_does_not_come_into_force(
    sending: PostgresStore,
) -> None:
    snapshot = sending.snapshot(C)
    outcome = plan_network(snapshot, running_now(snapshot), RoundOptions())
    set_described_topology(sending, aggregations=1)
    late = NetworkCommit(snapshot=snapshot, outcome=outcome, cause="call", seconds=0.1)
    with pytest.raises(StaleEtag, match="plan again"):
        sending.commit_network(late)
    other = NetworkPlanner(
        StoreWithInterference(sending, lambda: set_described_topology(sending)),
        StoppedClock(),
        StandingPolicies(sending),
    )
    assert other.keep(C) is None
    assert other.keep(C) is not None


def test_a_tag_assigned_during_planning_is_kept(sending: PostgresStore) -> None:
    snapshot = sending.snapshot(C)
    outcome = plan_network(snapshot, running_now(snapshot), RoundOptions())
    tags = {d.job: d.tag for d in outcome.decisions}
    assert tags["one"] != tags["two"]
    expected = {"one": tags["two"], "two": tags["one"]}
    swapped = tuple(replace(d, tag=expected[d.job], rank=1 - d.rank) for d in outcome.decisions)
    first = NetworkCommit(
        snapshot=snapshot, outcome=replace(outcome, decisions=swapped), cause="x", seconds=0.0
    )
    sending.commit_network(first)
    sending.commit_network(replace(first, outcome=outcome))
    decisions = sending.network_in_force(C).decisions
    assert {d.job: d.tag for d in decisions} == expected
    assert {d.job: d.rank for d in decisions} == {d.job: d.rank for d in outcome.decisions}


def test_replanning_reaches_a_fixed_point(sending: PostgresStore) -> None:
    """A plan that is put in force wakes its planner, which must then keep the plan."""
    replanning = NetworkPlanner(sending, StoppedClock(), StandingPolicies(sending))
    for happens in (
        lambda: None,
        lambda: set_described_topology(sending, aggregations=1),
        lambda: commit_round(sending),
    ):
        happens()
        plans = [replanning.keep(C) for _ in range(3)]
        assert plans[1:] == [None, None]


def test_a_tag_released_by_an_ended_job_is_not_reused_at_once(sending: PostgresStore) -> None:
    replanning = NetworkPlanner(sending, StoppedClock(), StandingPolicies(sending))
    replanning.keep(C)
    before = {d.job: d.tag for d in sending.network_in_force(C).decisions}
    apply_event(sending, "one", JobEvent.CANCEL)
    agents_report(sending)
    submit(sending, a_spec("three", requested_gpus=8))
    run(sending, three=BOTH[0])
    replanning.keep(C)
    after = {d.job: d.tag for d in sending.network_in_force(C).decisions}
    assert after.keys() == {"two", "three"}
    assert after["two"] == before["two"]
    assert after["three"] not in before.values()
