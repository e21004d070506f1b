"""Measured traffic on a real database: it is kept, used in network plans, and waited for."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.clusters import network
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.notify import Listener
from tessera.db.store.store import Store
from tessera.formulation.answer.codec import decode, encode
from tessera.formulation.answer.network.outcome import NetworkDecision
from tessera.formulation.answer.network.running import running_now
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.cluster_task import ClusterTask
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.network_planner import MEASUREMENT_DELAY_S, NetworkPlanner
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.tasks.calls import Calls
from tessera.service.server.wiring import run_server
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions
from tests.support.agents import until
from tests.support.decided_rounds import schedule
from tests.support.networked_cluster import BOTH, a_network, start_two_jobs
from tests.support.patience import PATIENCE_S
from tests.support.running_server import settings
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    apply_event,
    execute,
    run,
    submit,
)
from tests.support.worlds import StoppedClock

LEAVES = 5e9
"""Bytes per iteration from each of a job's two hosts to the other, over which the whole ring passes."""

MEASURE = RoundOptions(network_measure_s=30.0)
NODE_OF = {"one": "a100-0", "two": "a100-2"}


def report_traffic(store: Store, node: str, job: str, **facts: Any) -> None:
    """Let a node's agent report what it measured of a job."""
    desired = store.read(load_desired_gangs, C, f"agent-{node}")
    gangs = [
        ObservedGang(
            job=gang.spec.name,
            generation=gang.generation,
            node=node,
            phase="running",
            **(facts if gang.spec.name == job else {}),
        )
        for gang in desired.gangs
    ]
    store.update(record_observation, C, f"agent-{node}", "first", gangs, desired.revision)


def measured_rows(store: Store) -> list[tuple[Any, ...]]:
    """Return the measurements in the snapshot."""
    s = store.snapshot(C)
    return [
        (s.jobs.name[row["job"]], s.nodes.name[row["node"]], row["period_s"], row["sent_bytes"])
        for row in (s.traffic_measurements.row(k) for k in range(len(s.traffic_measurements)))
    ]


def start_one_job(store: Store) -> None:
    a_network(store)
    submit(store, a_spec("one", requested_gpus=8))
    run(store, one=BOTH[0])


def decisions_by_job(store: Store) -> dict[str, NetworkDecision]:
    return {d.job: d for d in store.read(network.plan_in_force, C).decisions}


def a_planner(store: Store, options: RoundOptions = MEASURE) -> NetworkPlanner:
    return NetworkPlanner(store, StoppedClock(), StandingPolicies(store, options))


def make_allocation_older(database: Database, job: str, seconds: float) -> None:
    """Move the start of a job's allocation back by ``seconds``."""
    execute(
        database,
        f"UPDATE jobs SET since_at = since_at - {seconds} * interval '1 s' WHERE name = '{job}'",
    )


def test_agents_measurements_are_kept_by_node_once_for_an_allocation(store: Store) -> None:
    start_one_job(store)
    report_traffic(store, "a100-1", "one", period_s=0.5, sent_bytes=6e9)
    report_traffic(store, "a100-0", "one", period_s=0.4, sent_bytes=5e9)
    report_traffic(store, "a100-0", "one", period_s=0.9, sent_bytes=1e9)
    expected = [("one", "a100-0", 0.4, 5e9), ("one", "a100-1", 0.5, 6e9)]
    assert measured_rows(store) == expected
    apply_event(store, "one", JobEvent.HOLD)
    for node in ("a100-0", "a100-1"):
        store.update(
            record_observation,
            C,
            f"agent-{node}",
            "first",
            [],
            store.read(load_desired_gangs, C, f"agent-{node}").revision,
        )
    apply_event(store, "one", JobEvent.RELEASE)
    run(store, one=BOTH[0])
    assert measured_rows(store) == []  # the job is the same, but its allocation is new
    report_traffic(store, "a100-0", "one", period_s=0.9, sent_bytes=1e9)
    assert measured_rows(store) == [("one", "a100-0", 0.9, 1e9)]


def test_meaningless_measurements_and_those_of_older_allocations_are_not_kept(
    store: Store,
) -> None:
    start_one_job(store)
    for period_s, sent_bytes in (
        (math.nan, 1e9),
        (0.5, math.nan),
        (-0.5, 1e9),
        (0.5, -1.0),
        (0.5, 0.0),
        (math.inf, 1e9),
        (1e9, 1e9),
        (0.5, 1e40),
        (0.0, 0.0),
    ):
        report_traffic(store, "a100-0", "one", period_s=period_s, sent_bytes=sent_bytes)
    desired = store.read(load_desired_gangs, C, "agent-a100-0")
    now = ObservedGang(
        job="one", generation=desired.gangs[0].generation, node="a100-0", phase="running"
    )
    late = replace(now, generation=now.generation - 1, period_s=0.5, sent_bytes=5e9)
    store.update(record_observation, C, "agent-a100-0", "first", [late, now], desired.revision)
    assert measured_rows(store) == []
    assert len(store.snapshot(C).traffic_measurements) == 0
    report_traffic(store, "a100-0", "one", period_s=0.5, sent_bytes=5e9)
    snapshot = store.snapshot(C)
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert again.traffic_measurements.equals(snapshot.traffic_measurements)
    assert len(again.traffic_measurements) == 1


def test_a_measurement_wakes_network_planning_once(store: Store, database: Database) -> None:
    start_one_job(store)
    notifications: list[str] = []
    with Listener(database.url) as listener:
        listener.subscribe(notifications.append)
        assert listener.listening.wait(PATIENCE_S)
        report_traffic(store, "a100-0", "one", period_s=0.5, sent_bytes=5e9)
        report_traffic(store, "a100-0", "one", period_s=0.5, sent_bytes=5e9)
        report_traffic(store, "a100-0", "one")
        execute(database, "SELECT pg_notify('tessera', 'end')")
        asyncio.run(until(lambda: "end" in notifications))
    assert [name for name in notifications if name == C] == [C]


def test_without_a_topology_no_measurement_is_kept(store: Store) -> None:
    a_cluster(store, nodes=4)
    start_two_jobs(store)
    report_traffic(store, "a100-0", "one", period_s=0.5, sent_bytes=5e9)
    assert measured_rows(store) == []


def test_the_measured_period_is_used_only_of_a_job_without_contention(store: Store) -> None:
    """The job served last waits for the other, so its period does not show its own times."""
    a_network(store, aggregations=1)
    start_two_jobs(store)
    a_planner(store, RoundOptions()).keep(C)
    first, last = sorted(decisions_by_job(store).values(), key=lambda d: d.rank)
    assert first.level > last.level
    assert last.contending_jobs == (first.job,)
    for decision in (first, last):
        facts = {"period_s": 0.7, "sent_bytes": LEAVES}
        report_traffic(store, NODE_OF[decision.job], decision.job, **facts)
    s = store.snapshot(C)
    flags = dict(
        zip(
            (s.jobs.name[j] for j in s.traffic_measurements.job),
            s.traffic_measurements.unhindered,
            strict=True,
        )
    )
    assert flags == {first.job: True, last.job: False}
    notes = {d.job: d.note for d in plan_network(s, running_now(s), RoundOptions()).decisions}
    assert "an iteration takes 0.7 s" in notes[first.job]
    assert notes[last.job] == "measured on 1 node: 1 times the estimate"


def test_a_new_job_gets_the_highest_priority_until_it_is_measured(store: Store) -> None:
    a_network(store, aggregations=1)
    start_two_jobs(store)
    planner = a_planner(store)
    planner.keep(C)
    first, last = sorted(decisions_by_job(store).values(), key=lambda d: d.rank)
    assert first.level == 7 > last.level  # alone on the highest level, since they share links
    assert first.note == "has the highest level until it is measured, for at most 30 s"
    assert last.note == ""
    report_traffic(store, NODE_OF[first.job], first.job, period_s=0.5, sent_bytes=LEAVES)
    assert planner.keep(C) is not None
    turned = decisions_by_job(store)  # now it is the other job's turn
    assert turned[last.job].level == 7 > turned[first.job].level
    assert turned[last.job].note.startswith("has the highest level")
    report_traffic(store, NODE_OF[last.job], last.job, period_s=0.5, sent_bytes=LEAVES)
    planner.keep(C)
    assert all(d.note.startswith("measured") for d in decisions_by_job(store).values())
    assert planner.again_in_s(C) is None


def test_the_measuring_time_is_bounded_and_known_in_advance(
    store: Store, database: Database
) -> None:
    start_one_job(store)
    plain = a_planner(store, RoundOptions())
    plain.keep(C)
    assert decisions_by_job(store)["one"].note == ""  # by default a new job gets no precedence
    assert plain.again_in_s(C) is None
    planner = a_planner(store)
    assert planner.again_in_s(C) is None
    schedule(RoundLoop(store, StoppedClock()), MEASURE)
    planner.keep(C)
    assert decisions_by_job(store)["one"].note.startswith("has the highest level")
    left_s = planner.again_in_s(C)
    assert left_s is not None
    assert 0 < left_s <= 30 + MEASUREMENT_DELAY_S
    make_allocation_older(database, "one", 31)
    ended = planner.keep(C)
    assert ended is not None
    assert ended.cause == "measured"
    assert decisions_by_job(store)["one"].note == ""
    assert planner.again_in_s(C) is None


def test_a_job_on_one_node_is_not_measured_first(store: Store) -> None:
    a_network(store)
    submit(store, a_spec("small", requested_gpus=4))
    run(store, small=[("a100-0", range(4))])
    replanning = NetworkPlanner(store, StoppedClock(), StandingPolicies(store, MEASURE))
    replanning.keep(C)
    assert replanning.again_in_s(C) is None


async def test_a_scheduled_wake_up_happens_and_a_later_one_replaces_it(
    store: Store,
) -> None:
    a_cluster(store)
    store.change(upsert_cluster, "other", [], None)
    looked: list[str] = []

    def attend(cluster: str, *_: object) -> None:
        looked.append(cluster)

    calls, work = Calls(1, "store"), Calls(1, "work")
    watching = ClusterTask(
        store,
        StoppedClock(),
        attend,
        calls=calls,
        work=work,
        holder="me",
        period_s=1e6,
        fails="nothing",
        event="failed",
        idle_too=True,
    )
    watching.start()
    await until(lambda: looked)
    first = len(looked)  # at most both clusters, one at a time
    watching.wake_in(C, 1e5)
    watching.wake_in(C, 0.0)
    watching.wake_in("other", 0.0)
    await until(lambda: len(looked) >= 4)
    assert first <= 2
    assert sorted(looked) == [C, C, "other", "other"]
    watching.wake_in(C, 0.0)
    await watching.stop()
    watching.wake_in(C, 0.0)
    await asyncio.gather(calls.close(), work.close())
    assert len(looked) == 4


async def test_a_server_replans_soon_after_the_measuring_time_ends(
    store: Store, database: Database
) -> None:
    start_one_job(store)
    make_allocation_older(database, "one", 99)
    config = settings(database, policy="{network_measure: 101s}")
    async with run_server(config):
        await until(lambda: store.read(network.list_plans, C, 0, 9))
        assert decisions_by_job(store)["one"].note.startswith("has the highest level")
        await until(lambda: len(store.read(network.list_plans, C, 0, 9)) == 2)
    assert store.read(network.list_plans, C, 0, 9)[0].cause == "measured"
    assert decisions_by_job(store)["one"].note == ""
