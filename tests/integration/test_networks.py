"""Networks on a real database: plans of rounds and replans, what agents receive, and refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.check import Violation
from tessera.formulation.errors import NotAllowed, NotFound, RoundSuperseded, StaleEtag
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.network.outcome import NetworkPlanRecord
from tessera.formulation.network.running import running_now
from tessera.formulation.records.rounds import NetworkCommit, RoundRecord
from tessera.formulation.topologies.described import decode_topology
from tessera.service.loop import RoundLoop
from tessera.service.network_planner import NetworkPlanner
from tessera.service.standing_policy import StandingPolicies
from tessera.solvers.rounds import network
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions
from tests.support.networked_cluster import CLOS, a_network, set_topology, start_two_jobs
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_of,
    agents_report,
    apply_event,
    do,
    execute,
    submit,
)
from tests.support.worlds import StoppedClock


def replan(store: PostgresStore) -> NetworkPlanRecord | None:
    return NetworkPlanner(store, StoppedClock(), StandingPolicies(store)).keep(C)


def a_round(store: PostgresStore) -> RoundRecord:
    return RoundLoop(store, StoppedClock()).schedule(
        C,
        RoundOptions(),
        remaining_s=lambda: math.inf,
        dry_run=False,
        request=None,
        cancelled=lambda: False,
    )


def test_a_round_plans_the_network_of_the_jobs_it_starts(store: PostgresStore) -> None:
    a_network(store)
    submit(store, a_spec("one", requested_gpus=8), a_spec("two", requested_gpus=8))
    record = a_round(store)
    plan = store.network_in_force(C)
    assert (plan.cause, plan.round, plan.levels) == ("round", record.summary.number, 8)
    assert {d.job for d in plan.decisions} == {"one", "two"}
    assert sorted(d.rank for d in plan.decisions) == [0, 1]
    for decision in plan.decisions:
        assert decision.generation == store.get_job(C, decision.job).generation


def test_contending_jobs_get_different_paths_or_levels_and_name_each_other(
    store: PostgresStore,
) -> None:
    a_network(store)
    start_two_jobs(store)
    plan = replan(store)
    assert plan is not None
    assert plan.cause == "start"
    decisions = {d.job: d for d in store.network_in_force(C).decisions}
    for job in ("one", "two"):
        routes = decisions[job].routes
        assert {r.via[0] for r in routes} | {r.via[-1] for r in routes} == {"tor-0", "tor-1"}
        assert sum(r.sent_bytes for r in routes) == pytest.approx(2 * 5e9)
        assert decisions[job].tag >= 0
    assert decisions["one"].tag != decisions["two"].tag
    contending = {name: set(d.meets) for name, d in decisions.items()}
    if contending["one"]:
        assert contending == {"one": {"two"}, "two": {"one"}}
        assert decisions["one"].level != decisions["two"].level


def test_nothing_is_planned_again_until_something_changes(store: PostgresStore) -> None:
    a_network(store)
    start_two_jobs(store)
    replanning = NetworkPlanner(store, StoppedClock(), StandingPolicies(store))
    assert replanning.keep(C) is not None
    assert replanning.keep(C) is None
    apply_event(store, "two", JobEvent.CANCEL)
    ended = replanning.keep(C)
    assert ended is not None
    assert ended.cause == "end"
    assert [d.job for d in store.network_in_force(C).decisions] == ["one"]
    assert replanning.keep(C) is None
    set_topology(store, CLOS | {"aggregations": 1})
    again = replanning.keep(C)
    assert again is not None
    assert again.cause == "topology"
    assert [p.number for p in store.list_network_plans(C, 0, 10)] == [3, 2, 1]
    assert [p.number for p in store.list_network_plans(C, 3, 1)] == [2]


def test_agents_receive_levels_tags_and_paths(store: PostgresStore) -> None:
    a_network(store)
    start_two_jobs(store)
    agents_report(store)
    before = store.desired(C, agents_of(store)[0])
    assert before.network_levels == 0
    assert before.gangs[0].network is None
    replan(store)
    after = store.desired(C, agents_of(store)[0])
    assert after.revision > before.revision
    assert after.network_levels == 8
    decisions = {d.job: d for d in store.network_in_force(C).decisions}
    assert after.gangs[0].network == decisions[after.gangs[0].spec.name]


def test_a_tag_stays_as_long_as_the_allocation(store: PostgresStore) -> None:
    a_network(store)
    start_two_jobs(store)
    replan(store)
    before = {d.job: d.tag for d in store.network_in_force(C).decisions}
    apply_event(store, "one", JobEvent.CANCEL)
    replan(store)
    after = {d.job: d.tag for d in store.network_in_force(C).decisions}
    assert after == {"two": before["two"]}


def test_a_network_plan_overtaken_by_a_round_does_not_come_into_force(store: PostgresStore) -> None:
    a_network(store)
    start_two_jobs(store)
    snapshot = store.snapshot(C)
    outcome = plan_network(snapshot, running_now(snapshot), RoundOptions())
    late = NetworkCommit(snapshot=snapshot, outcome=outcome, cause="start", seconds=0.1)
    a_round(store)
    with pytest.raises(RoundSuperseded):
        store.commit_network(late)
    assert [p.cause for p in store.list_network_plans(C, 0, 10)] == ["round"]


def test_decisions_for_ended_allocations_are_left_out(store: PostgresStore) -> None:
    a_network(store)
    start_two_jobs(store)
    snapshot = store.snapshot(C)
    outcome = plan_network(snapshot, running_now(snapshot), RoundOptions())
    other = [replace(d, generation=d.generation + 7) for d in outcome.decisions if d.job == "one"]
    mixed = replace(outcome, decisions=(*other, *(d for d in outcome.decisions if d.job == "two")))
    store.commit_network(NetworkCommit(snapshot=snapshot, outcome=mixed, cause="x", seconds=0.0))
    assert [d.job for d in store.network_in_force(C).decisions] == ["two"]


def test_a_job_with_unknown_traffic_is_noted_to_have_no_part(store: PostgresStore) -> None:
    a_cluster(store, nodes=4)
    set_topology(store, CLOS)
    start_two_jobs(store)
    replan(store)
    for decision in store.network_in_force(C).decisions:
        assert "is not known" in decision.note
        assert (decision.tag, decision.level, decision.routes) == (-1, 0, ())


def test_a_node_missing_from_the_topology_is_reported(store: PostgresStore) -> None:
    a_network(store, nodes=["a100-0", "a100-1"])
    start_two_jobs(store)
    replan(store)
    decisions = {d.job: d for d in store.network_in_force(C).decisions}
    assert decisions["one"].note == ""
    assert "a100-2 is not in the topology" in decisions["two"].note


def test_a_topology_is_changed_by_its_etag(store: PostgresStore) -> None:
    a_cluster(store)
    first, second = (decode_topology(json.dumps(CLOS | {"aggregations": n})) for n in (1, 2))
    with pytest.raises(NotFound):
        store.get_topology(C)
    do(store, lambda w: w.set_topology(C, first, 0))
    assert store.get_topology(C).version == 1
    do(store, lambda w: w.set_topology(C, first, 1))
    assert store.get_topology(C).version == 1
    do(store, lambda w: w.set_topology(C, second, 1))
    with pytest.raises(StaleEtag):
        do(store, lambda w: w.set_topology(C, first, 1))
    with pytest.raises(StaleEtag):
        do(store, lambda w: w.set_topology(C, first, 0))


def test_snapshots_share_a_topology_until_it_changes(store: PostgresStore) -> None:
    a_network(store)
    first = store.snapshot(C).topology
    assert first is not None
    assert first.document == json.dumps(CLOS, sort_keys=True)
    assert store.snapshot(C).topology is first
    assert store.get_topology(C).described is first
    do(store, lambda w: w.drop_topology(C))
    set_topology(store, CLOS | {"aggregations": 1})  # at version 1, like the dropped topology
    assert store.snapshot(C).topology != first


def test_a_network_plan_that_breaks_a_rule_is_refused_and_the_current_one_stays(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_network(store)
    start_two_jobs(store)
    replan(store)
    before = store.network_in_force(C)
    apply_event(store, "two", JobEvent.CANCEL)
    broken = Violation(rule="no inversion", detail="planted")
    monkeypatch.setattr(network, "find_network_violations", lambda *_: [broken])
    with pytest.raises(NotAllowed, match="no inversion: planted"):
        replan(store)
    assert store.network_in_force(C).number == before.number


def test_a_round_whose_network_plan_breaks_a_rule_is_refused(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_network(store)
    submit(store, a_spec("one", requested_gpus=8))
    broken = Violation(rule="own path", detail="planted")
    monkeypatch.setattr(network, "find_network_violations", lambda *_: [broken])
    record = a_round(store)
    assert (record.summary.outcome, record.decisions) == ("refused", ())
    assert "own path: planted" in record.summary.violations
    assert store.get_job(C, "one").allocation is None


def test_old_plans_are_pruned_and_the_latest_ones_are_kept(
    store: PostgresStore, database: Database
) -> None:
    a_network(store)
    start_two_jobs(store)
    replan(store)
    for aggregations in (1, 2, 3):
        set_topology(store, CLOS | {"aggregations": aggregations})
        replan(store)
    numbers = [plan.number for plan in store.list_network_plans(C, 0, 10)]
    execute(database, "UPDATE network_plans SET planned_at = planned_at - interval '1 day'")
    assert store.prune(3600.0, 2)["network_plans"] == len(numbers) - 2
    assert [plan.number for plan in store.list_network_plans(C, 0, 10)] == numbers[:2]


def test_a_topology_that_is_deleted_meanwhile_needs_no_plan(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store, nodes=4)
    start_two_jobs(store)
    # The topology is deleted only after this check.
    monkeypatch.setattr(store, "has_topology", lambda cluster: True)
    assert replan(store) is None


def test_without_a_topology_there_are_no_plans(store: PostgresStore) -> None:
    a_cluster(store, nodes=4)
    start_two_jobs(store)
    assert replan(store) is None
    with pytest.raises(NotFound):
        store.network_in_force(C)
    with pytest.raises(NotFound):
        NetworkPlanner(store, StoppedClock(), StandingPolicies(store)).keep("nowhere")


def test_a_dropped_topology_takes_its_plans_along(store: PostgresStore, database: Database) -> None:
    a_network(store)
    start_two_jobs(store)
    replan(store)
    do(store, lambda w: w.drop_topology(C))
    assert store.desired(C, agents_of(store)[0]).network_levels == 0
    assert store.list_network_plans(C, 0, 10) == []
    assert store.snapshot(C).topology is None
