"""Networks on a real database: plans of rounds and replans, what agents receive, refusals and races."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.clusters.network import (
    commit_plan,
    drop_topology,
    list_plans,
    load_topology,
    plan_in_force,
)
from tessera.db.schema.engine import Database
from tessera.db.store.reads import get_job
from tessera.db.store.store import Store
from tessera.formulation.answer.check import Violation
from tessera.formulation.answer.network.outcome import NetworkDecision
from tessera.formulation.answer.network.running import running_now
from tessera.formulation.base.errors import NotAllowed, NotFound, RoundSuperseded, StaleEtag
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.rounds import NetworkCommit
from tessera.formulation.records.store import Request
from tessera.formulation.state.topologies.described import decode_topology
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.network_planner import NetworkPlanner
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.solvers.rounds import network
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions
from tests.support.decided_rounds import schedule
from tests.support.networked_cluster import CLOS, a_network, describe_network, start_two_jobs
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_of,
    apply_event,
    execute,
    submit,
)
from tests.support.worlds import StoppedClock


def a_planner(store: Any) -> NetworkPlanner:
    return NetworkPlanner(store, StoppedClock(), StandingPolicies(store))


@pytest.fixture
def sending(store: Store) -> Store:
    """Return a store with a network, and two jobs that run across it."""
    a_network(store)
    start_two_jobs(store)
    return store


def decisions_of(store: Store) -> dict[str, NetworkDecision]:
    return {d.job: d for d in store.read(plan_in_force, C).decisions}


class StoreWithInterference:
    """A store in which something happens after each snapshot."""

    def __init__(self, store: Store, happens: Callable[[], object]) -> None:
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


def test_nothing_is_planned_again_until_something_changes_and_tags_stay(
    sending: Store,
) -> None:
    planner = a_planner(sending)
    assert planner.keep(C) is not None
    assert planner.keep(C) is None
    tags = {name: d.tag for name, d in decisions_of(sending).items()}
    apply_event(sending, "two", JobEvent.CANCEL)
    ended = planner.keep(C)
    assert ended is not None
    assert ended.cause == "end"
    assert planner.keep(C) is None
    assert {name: d.tag for name, d in decisions_of(sending).items()} == {"one": tags["one"]}
    describe_network(sending, CLOS | {"aggregations": 1})
    again = planner.keep(C)
    assert again is not None
    assert again.cause == "topology"
    assert [p.number for p in sending.read(list_plans, C, 0, 10)] == [3, 2, 1]
    assert [p.number for p in sending.read(list_plans, C, 3, 1)] == [2]
    schedule(RoundLoop(sending, StoppedClock()))
    assert planner.keep(C) is None


def test_a_tag_assigned_during_planning_is_kept(sending: Store) -> None:
    snapshot = sending.snapshot(C)
    outcome = plan_network(snapshot, running_now(snapshot), RoundOptions())
    tags = {d.job: d.tag for d in outcome.decisions}
    assert tags["one"] != tags["two"]
    expected = {"one": tags["two"], "two": tags["one"]}
    swapped = tuple(replace(d, tag=expected[d.job], rank=1 - d.rank) for d in outcome.decisions)
    first = NetworkCommit(
        snapshot=snapshot, outcome=replace(outcome, decisions=swapped), cause="x", seconds=0.0
    )
    sending.update(commit_plan, first)
    sending.update(commit_plan, replace(first, outcome=outcome))
    decisions = sending.read(plan_in_force, C).decisions
    assert {d.job: d.tag for d in decisions} == expected
    assert {d.job: d.rank for d in decisions} == {d.job: d.rank for d in outcome.decisions}


def test_plans_that_a_round_or_another_topology_overtook_do_not_come_into_force(
    sending: Store,
) -> None:
    snapshot = sending.snapshot(C)
    outcome = plan_network(snapshot, running_now(snapshot), RoundOptions())
    late = NetworkCommit(snapshot=snapshot, outcome=outcome, cause="start", seconds=0.1)
    other = [replace(d, generation=d.generation + 7) for d in outcome.decisions if d.job == "one"]
    mixed = replace(outcome, decisions=(*other, *(d for d in outcome.decisions if d.job == "two")))
    sending.update(commit_plan, replace(late, outcome=mixed, cause="x"))
    assert decisions_of(sending).keys() == {"two"}  # the allocation of the other has ended
    describe_network(sending, CLOS | {"aggregations": 1})
    with pytest.raises(StaleEtag, match="plan again"):
        sending.update(commit_plan, late)
    schedule(RoundLoop(sending, StoppedClock()))
    with pytest.raises(RoundSuperseded):
        sending.update(commit_plan, late)
    assert sending.read(plan_in_force, C).cause == "round"


def test_a_planner_whose_topology_changes_meanwhile_plans_again(sending: Store) -> None:
    changing = StoreWithInterference(sending, lambda: describe_network(sending, CLOS))
    describe_network(sending, CLOS | {"aggregations": 1})
    planner = a_planner(changing)
    assert planner.keep(C) is None
    assert planner.keep(C) is not None


def test_a_round_is_committed_although_its_network_was_dropped_during_the_solve(
    sending: Store,
) -> None:
    def drop() -> None:
        sending.change(drop_topology, C)

    dropping: Any = StoreWithInterference(sending, drop)
    record = schedule(RoundLoop(dropping, StoppedClock()))
    assert record.summary.outcome == "committed"
    with pytest.raises(NotFound):
        sending.read(plan_in_force, C)
    assert len(sending.snapshot(C).network_plan) == 0


def test_a_round_made_for_another_topology_leaves_the_plan_in_force(
    sending: Store,
) -> None:
    planner = a_planner(sending)
    planner.keep(C)

    def replace_topology() -> None:
        describe_network(sending, CLOS | {"aggregations": 1})
        assert planner.keep(C) is not None

    interfered: Any = StoreWithInterference(sending, replace_topology)
    schedule(RoundLoop(interfered, StoppedClock()))
    assert sending.read(plan_in_force, C).cause == "topology"
    switches = {via for d in decisions_of(sending).values() for r in d.routes for via in r.via}
    assert "agg-1" not in switches


def test_snapshots_share_a_topology_until_it_changes(store: Store) -> None:
    a_network(store)
    first = store.snapshot(C).topology
    assert first is not None
    assert first.document == json.dumps(CLOS, sort_keys=True)
    assert store.snapshot(C).topology is first
    assert decode_topology(store.read(load_topology, C)[0]) is first
    store.change(drop_topology, C)
    describe_network(store, CLOS | {"aggregations": 1})  # at version 1, like the dropped topology
    assert store.snapshot(C).topology != first


def test_a_network_plan_that_breaks_a_rule_is_refused_and_the_current_one_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_network(store)
    start_two_jobs(store)
    a_planner(store).keep(C)
    before = store.read(plan_in_force, C)
    apply_event(store, "two", JobEvent.CANCEL)
    broken = Violation(rule="no inversion", detail="planted")
    monkeypatch.setattr(network, "find_network_violations", lambda *_: [broken])
    with pytest.raises(NotAllowed, match="no inversion: planted"):
        a_planner(store).keep(C)
    assert store.read(plan_in_force, C).number == before.number


def test_a_round_whose_network_plan_breaks_a_rule_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_network(store)
    submit(store, a_spec("one", requested_gpus=8))
    broken = Violation(rule="own path", detail="planted")
    monkeypatch.setattr(network, "find_network_violations", lambda *_: [broken])
    record = schedule(RoundLoop(store, StoppedClock()))
    assert (record.summary.outcome, record.decisions) == ("refused", ())
    assert "own path: planted" in record.summary.violations
    assert store.read(get_job, C, "one").allocation is None


def test_old_plans_are_pruned_and_the_latest_ones_are_kept(
    store: Store, database: Database
) -> None:
    a_network(store)
    start_two_jobs(store)
    a_planner(store).keep(C)
    for aggregations in (1, 2, 3):
        describe_network(store, CLOS | {"aggregations": aggregations})
        a_planner(store).keep(C)
    numbers = [plan.number for plan in store.read(list_plans, C, 0, 10)]
    execute(database, "UPDATE network_plans SET planned_at = planned_at - interval '1 day'")
    assert store.prune(3600.0, 2)["network_plans"] == len(numbers) - 2
    assert [plan.number for plan in store.read(list_plans, C, 0, 10)] == numbers[:2]


def test_without_a_topology_there_are_no_plans(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store, nodes=4)
    start_two_jobs(store)
    assert a_planner(store).keep(C) is None
    with pytest.raises(NotFound):
        store.read(plan_in_force, C)
    with pytest.raises(NotFound):
        a_planner(store).keep("nowhere")
    # The topology is deleted only after this check.
    monkeypatch.setattr("tessera.db.clusters.network.has_topology", lambda *_: True)
    assert a_planner(store).keep(C) is None


def test_a_dropped_topology_takes_its_plans_along(store: Store, database: Database) -> None:
    a_network(store)
    start_two_jobs(store)
    a_planner(store).keep(C)
    store.change(drop_topology, C)
    assert store.read(load_desired_gangs, C, agents_of(store)[0]).network_levels == 0
    assert store.read(list_plans, C, 0, 10) == []
    assert store.snapshot(C).topology is None
