"""Rounds that are decided periodically and after events."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tessera.db.clusters.deletion import delete_cells
from tessera.db.clusters.drains import drain_nodes
from tessera.db.clusters.tenants import upsert_tenants
from tessera.db.estimates.derived_estimates import put_derived_estimates
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs.job_changes import update_job
from tessera.db.jobs.submission import submit_jobs
from tessera.db.rounds.leases import acquire_lease
from tessera.db.rounds.rounds import list_rounds
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_nodes
from tessera.db.store.reads import get_cluster
from tessera.db.store.store import Connection, Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import DeadlineTooShort, Unavailable
from tessera.formulation.base.values import Workload
from tessera.formulation.job.lifecycle import ACTIVE, JobEvent, JobState
from tessera.formulation.records.clusters import ClusterOutlook, NodeSpec, TenantSpec
from tessera.formulation.records.estimates import CellFilter
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server
from tests.support.hand_clock import HandClock
from tests.support.notices import RoundRequests, round_requests
from tests.support.patience import PATIENCE_S
from tests.support.periodic import HOUR_S, Replica, a_replica
from tests.support.running_server import a_cluster as a_served_cluster
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
    end_back_off,
    execute,
    fail,
    job,
    prolong_back_off,
    record_heartbeat,
    run,
    start,
    states,
    submit,
    wait,
)

A0, A1 = "a100-0", "a100-1"


@pytest.fixture
def lasting(database: Database) -> Store:
    """Return a store whose agents do not expire, however slow the machine is."""
    return Store(database, lease_s=HOUR_S)


@pytest.fixture
def one(lasting: Store) -> Store:
    """Return a store with a node of four GPUs, on which a runs while b waits."""
    a_cluster(lasting, nodes=1, gpus=4)
    submit(lasting, a_spec("a", max_retries=20, iterations=10**9), a_spec("b", requested_gpus=4))
    run(lasting, a=[(A0, range(4))])
    return lasting


def settings(database: Database) -> Config:
    """Return the settings of a server whose period never ends within a test."""
    return Config(
        listen="127.0.0.1:0",
        database_url=database.url,
        period_s=HOUR_S,
        round_spacing_s=0.1,
        estimate_cells=False,
        grace_s=2.0,
        default_deadline_s=60.0,
        store_threads=4,
        lease_s=HOUR_S,
    )


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


async def test_a_failure_triggers_a_round_that_gives_the_gpus_to_another_job_at_once(
    lasting: Store, database: Database
) -> None:
    a_cluster(lasting, nodes=1, gpus=4)
    submit(lasting, a_spec("a", weight=50.0), a_spec("b"))
    async with run_server(settings(database)):
        await until(lambda: states(lasting)["a"] is JobState.STARTING)  # the first round
        await asyncio.to_thread(agents_report, lasting)
        await asyncio.to_thread(fail, lasting, "a")
        await asyncio.to_thread(prolong_back_off, database)
        await until(lambda: states(lasting)["b"] in ACTIVE)
        assert states(lasting)["a"] is JobState.QUEUED


async def test_rounds_triggered_by_back_off_ends_and_event_storms_are_spaced(
    one: Store, database: Database
) -> None:
    fail(one, "a")
    prolong_back_off(database)
    async with a_replica(one) as replica:
        assert await replica.tick_after(0.0) == 2  # one of the fixture, and the first of the period
        assert await replica.rounds_after(10.0) == 2
        end_back_off(database)
        assert await replica.rounds_after(HOUR_S) == 3
        for _ in range(20):
            replica.rounds.wake(C)
            last = await replica.rounds_after(0.1)
        assert last == 3
        assert await replica.rounds_after(1.1) == 4
        assert await replica.rounds_after(10.0) == 4


async def test_after_a_lost_connection_every_cluster_of_the_replica_has_a_round(
    one: Store,
) -> None:
    async with a_replica(one) as replica:
        assert await replica.tick_after(0.0) == 2
        replica.rounds.wake("")  # any event may have been missed
        assert await replica.rounds_after(2.9) == 2
        assert await replica.rounds_after(0.2) == 3


async def test_a_replica_that_takes_a_lease_over_makes_up_for_missed_events(
    one: Store, database: Database
) -> None:
    assert one.update(acquire_lease, C, "another", 60.0)
    async with a_replica(one) as replica:
        assert await replica.tick_after(0.0) == 1
        replica.rounds.wake(C)  # the other replica would answer it, but it ends before that
        assert await replica.rounds_after(3.0) == 1
        execute(database, "UPDATE leases SET expires_at = now() - interval '1 s'")
        assert await replica.tick_after(5.0) == 2


async def test_a_wake_up_survives_a_database_outage(
    one: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise Unavailable("no database")

    async with a_replica(one) as replica:
        replica.rounds.wake(C)
        with monkeypatch.context() as outage:
            outage.setattr("tessera.service.server.rounds.periodic.acquire_lease", refuse)
            with pytest.raises(Unavailable):
                await replica.rounds.begin_due()
            await replica.rounds.begin_due()  # the next attempt is not made at once
        assert await replica.rounds_after(5.0) == 2


async def test_a_round_that_fails_is_tried_again_after_longer_and_longer(
    one: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[float]()
    async with a_replica(one) as replica:

        def fail_to_commit(*_: object, **__: object) -> object:
            tries.append(replica.clock.now_s)
            raise DeadlineTooShort("too slow")

        with monkeypatch.context() as slow:
            slow.setattr(one, "commit", fail_to_commit)
            await replica.tick_after(0.0)
            for _ in range(40):
                await replica.rounds_after(1.0)
        assert tries == [0.0, 3.0, 9.0, 21.0]
        assert await replica.rounds_after(10.0) == 2
        replica.rounds.wake(C)
        assert await replica.rounds_after(3.0) == 3


async def test_a_node_is_looked_at_when_it_would_fall_silent(
    one: Store, database: Database
) -> None:
    async with a_replica(one) as replica:
        assert await replica.tick_after(0.0) == 2
        execute(database, "UPDATE agents SET heard_at = heard_at - interval '2 h'")
        assert await replica.rounds_after(HOUR_S / 2) == 2
        execute(database, "UPDATE leases SET expires_at = now() + interval '1 min'")
        # No tick has come, but the moment of which the last look knew: lease and margin are over.
        assert await replica.rounds_after(HOUR_S / 2 - 1.0 + 20.0) == 3


async def test_an_idle_node_that_returns_has_a_round(one: Store, database: Database) -> None:
    async with a_replica(one) as replica:
        execute(database, "UPDATE agents SET heard_at = heard_at - interval '2 h'")
        last = await replica.tick_after(0.0)
        assert await replica.tick_after(10.0) == last
        record_heartbeat(one, f"agent-{A0}")
        assert await replica.tick_after(5.0) == last + 1
        assert states(one)["b"] is JobState.STARTING or states(one)["a"] is JobState.STARTING


async def test_a_promised_schedule_has_its_round_in_time(one: Store) -> None:
    async with a_replica(one) as replica:
        assert await replica.tick_after(0.0) == 2
        snapshot = one.snapshot(C)
        summary = a_summary(snapshot, promises_due_s=snapshot.now_s + 600.0)
        one.commit(replace(a_round(snapshot, wait(snapshot, "b")), summary=summary))
        assert await replica.tick_after(5.0) == 3
        assert await replica.rounds_after(500.0) == 3
        assert await replica.rounds_after(100.0) == 4


async def test_a_storm_of_events_piles_up_no_tasks_rounds_or_memory(one: Store) -> None:
    async with a_replica(one) as replica:
        assert await replica.tick_after(0.0) == 2
        replica.rounds.start()
        before = len(asyncio.all_tasks())
        size = deep_size(replica.rounds._clusters)
        for k in range(100_000):
            replica.clock.now_s += 1e-5
            replica.rounds.wake(C)
            if k % 10_000 == 0:
                await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= before + 1
        assert deep_size(replica.rounds._clusters) <= size + 100
        assert one.read(get_cluster, C).last_round == 2  # it is too early for another
        assert await replica.rounds_after(2.5) == 3
        assert await replica.rounds_after(60.0) == 3
        assert job(one, "a").state is JobState.RUNNING


def deep_size(known: dict[str, Any]) -> int:
    """Return the bytes of a dictionary of objects with slots, with what they refer to."""
    return sys.getsizeof(known) + sum(
        sys.getsizeof(name)
        + sum(sys.getsizeof(getattr(value, slot)) for slot in type(value).__slots__)
        for name, value in known.items()
    )


async def test_one_replica_commits_one_round_in_each_period(lasting: Store) -> None:
    clock = HandClock()
    for name in ("c", "d"):
        a_served_cluster(lasting, name)

    async def rounds_after_ticks(*replicas: Replica) -> list[int]:
        for replica in replicas:
            last = [await replica.tick_after(0.0, cluster) for cluster in ("c", "d")]
        return last

    async with (
        a_replica(lasting, clock, holder="one") as first,
        a_replica(lasting, clock, holder="other") as second,
    ):
        assert await rounds_after_ticks(first, second) == [1, 1]
        clock.now_s += HOUR_S - 1.0
        assert await rounds_after_ticks(first, second) == [1, 1]
        clock.now_s += 2.0
        assert await rounds_after_ticks(first, second) == [2, 2]


async def test_a_periodic_round_follows_the_standing_policy(one: Store) -> None:
    config = Config(policy="{objective: max-min then jct, max_changes: 1}", period_s=60.0)
    policies = StandingPolicies(one, config.round_options())
    async with a_replica(one, policies=policies) as replica:
        await replica.tick_after(0.0)
    decided = one.read(list_rounds, C, 0, 1)[0]
    assert decided.options["objective"] == "max-min then jct"
    assert (decided.options["max_changes"], decided.options["round_s"]) == (1, 60.0)


AGENT0, AGENT1 = "agent-a100-0", "agent-a100-1"
SILENCE_S = 45.0


@pytest.fixture
def busy(store: Store) -> Store:
    """Return a store with two nodes of four GPUs, on both of which a runs while b waits."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a", max_retries=1), a_spec("b"))
    run(store, a=[(A0, range(4)), (A1, range(4))])
    return store


@pytest.fixture
def requests(busy: Store, database: Database) -> Iterator[RoundRequests]:
    with round_requests(database) as heard:
        yield heard


def make_silent(database: Database, agent: str, seconds: float = 3600.0) -> None:
    execute(
        database,
        f"UPDATE agents SET heard_at = clock_timestamp() - interval '{seconds} s' WHERE name = '{agent}'",
    )


def outlook(store: Store) -> ClusterOutlook:
    return store.outlooks([C])[C]


EVENTS: dict[str, Callable[[Store], object]] = {
    "a submission": lambda s: submit(s, a_spec("c")),
    "the end of a job": lambda s: agents_report(s, phase="succeeded"),
    "a failure": lambda s: fail(s, "a"),
    "a cancellation": lambda s: apply_event(s, "a", JobEvent.CANCEL),
    "a hold": lambda s: apply_event(s, "b", JobEvent.HOLD),
    "a changed job": lambda s: s.change(update_job, C, a_spec("b", weight=9.0), ["weight"], None),
    "a drain": lambda s: s.change(drain_nodes, C, [A0], draining=True),
    "a new node": lambda s: s.hello(C, "new", "1", [NodeSpec(name="n", gpu_type="a100", gpus=4)]),
    "a changed node": lambda s: s.change(
        upsert_nodes, C, [NodeSpec(name=A0, gpu_type="a100", gpus=8)]
    ),
    "a node that its agent leaves": lambda s: s.hello(C, AGENT1, "first", []),
    "changed estimates": lambda s: s.change(upsert_estimates, C, [a_record(1, iter_time_s=0.5)]),
    "first estimates": lambda s: s.change(
        put_derived_estimates, C, [a_record(3, iter_time_s=0.2, nodes=1)], {BERT: "of the model"}
    ),
    "deleted estimates": lambda s: s.change(delete_cells, C, CellFilter(workload=BERT, gpus=2)),
    "a tenant's quota": lambda s: s.change(
        upsert_tenants, C, [TenantSpec(name="t", quotas={"a100": 1})]
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_asks_for_a_round(name: str, busy: Store, requests: RoundRequests) -> None:
    EVENTS[name](busy)
    heard = requests.take()
    assert heard
    assert set(heard) == {C}


def test_lost_nodes_holds_and_drains_ask_for_rounds_when_they_begin_and_end(
    busy: Store, requests: RoundRequests, database: Database
) -> None:
    apply_event(busy, "b", JobEvent.HOLD)
    busy.change(drain_nodes, C, [A0], draining=True)
    requests.take()
    apply_event(busy, "b", JobEvent.RELEASE)
    assert requests.take() == [C]
    busy.change(drain_nodes, C, [A0], draining=False)
    assert requests.take() == [C]
    make_silent(database, AGENT1)
    assert busy.expire(C) == ["a"]
    assert requests.take() == [C]
    busy.hello(C, AGENT1, "second", [NodeSpec(name=A1, gpu_type="a100", gpus=4)])
    assert requests.take() == [C]


QUIET: dict[str, Callable[[Store], object]] = {
    "progress": lambda s: agent_reports(s, AGENT0, iterations_done=5.0, iter_time_s=1.0),
    "a heartbeat": lambda s: record_heartbeat(s, AGENT0),
    "a reconnection": lambda s: s.hello(
        C, AGENT0, "first", [NodeSpec(name=A0, gpu_type="a100", gpus=4)]
    ),
    "a label": lambda s: s.change(update_job, C, a_spec("b", labels={"x": "y"}), ["labels"], None),
    "a repeated drain": lambda s: s.change(drain_nodes, C, [A0], draining=False),
    "estimates that no live job needs": lambda s: s.change(
        upsert_estimates,
        C,
        [a_record(1, workload=Workload(model="other", params="", global_batch=8))],
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_changes_no_decision_asks_for_no_round(
    name: str, busy: Store, requests: RoundRequests
) -> None:
    QUIET[name](busy)
    assert requests.take() == []


def test_a_cluster_without_a_live_job_asks_for_no_round(store: Store, database: Database) -> None:
    a_cluster(store)
    with round_requests(database) as requests:
        store.hello(C, "new", "1", [NodeSpec(name="n", gpu_type="a100", gpus=4)])
        store.change(drain_nodes, C, [A0], draining=True)
        store.change(upsert_estimates, C, [a_record(1, iter_time_s=0.5)])
        assert requests.take() == []


def test_decisions_of_a_round_and_dry_changes_ask_for_no_other_round(
    busy: Store, requests: RoundRequests
) -> None:
    def work(connection: Connection) -> bytes:
        submit_jobs(connection, C, [a_spec("c")])
        return b""

    busy.write(None, work, validate_only=True)
    assert requests.take() == []
    snapshot = busy.snapshot(C)
    gpus = [(A0, range(1))]
    commit(busy, snapshot, wait(snapshot, "a", DecisionKind.SUSPEND), start(snapshot, "b", gpus))
    agents_report(busy)
    assert states(busy)["b"] is JobState.RUNNING
    assert requests.take() == []


def test_the_outlook_follows_nodes_that_fall_silent_with_and_without_jobs(
    busy: Store, database: Database
) -> None:
    make_silent(database, AGENT1, seconds=30.0)
    seen = outlook(busy)
    assert 0.0 < seen.look_in_s <= SILENCE_S - 30.0
    assert seen.event_in_s == math.inf
    record_heartbeat(busy, AGENT1)
    assert outlook(busy).look_in_s > SILENCE_S - 30.0
    assert outlook(busy).schedulable == seen.schedulable
    assert set(busy.outlooks([C, "nowhere"])) == {C}
    make_silent(database, AGENT1)
    assert outlook(busy).event_in_s == 0.0
    busy.expire(C)
    assert outlook(busy).event_in_s == math.inf
    make_silent(database, AGENT1, seconds=-3600.0)
    assert outlook(busy).event_in_s == 0.0
    busy.expire(C)
    assert outlook(busy).event_in_s == math.inf


def test_an_idle_node_that_falls_silent_or_returns_changes_the_schedulable_nodes(
    store: Store, database: Database
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


def commit_promise(store: Store, due_in_s: float, **overrides: object) -> Snapshot:
    """Commit a round whose promises need the next one after ``due_in_s``."""
    snapshot = store.snapshot(C)
    summary = a_summary(snapshot, promises_due_s=snapshot.now_s + due_in_s, **overrides)
    store.commit(replace(a_round(snapshot, wait(snapshot, "b")), summary=summary))
    return snapshot


def test_the_outlook_says_when_promises_need_the_next_round(busy: Store) -> None:
    commit_promise(busy, 600.0)
    assert 500.0 < outlook(busy).promises_due_in_s <= 600.0
    commit_promise(busy, -5.0)
    assert outlook(busy).promises_due_in_s == 0.0
    commit_promise(busy, math.inf)
    assert outlook(busy).promises_due_in_s == math.inf
    commit_promise(busy, -5.0)
    commit_promise(busy, math.inf, outcome="refused")  # it does not repeat one that was refused
    assert outlook(busy).promises_due_in_s == math.inf
