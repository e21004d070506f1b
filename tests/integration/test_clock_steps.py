"""Steps of the database's clock: no live node is lost, and no dead node stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from tessera.db.rounds.leases import acquire_lease
from tessera.db.schema.engine import Database, connect_database
from tessera.db.store.reads import get_node
from tessera.db.store.store import Store
from tessera.formulation.job.lifecycle import JobState
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    commit,
    execute,
    job,
    record_heartbeat,
    run,
    start,
    submit,
)

AGENT, SILENCE_S = "agent-a100-0", 45.0

SKEW = """
    CREATE SCHEMA skewed;
    CREATE TABLE skewed.clock AS SELECT interval '0' AS ahead;
    CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
        'SELECT pg_catalog.clock_timestamp() + ahead FROM skewed.clock';
    CREATE FUNCTION skewed.now() RETURNS timestamptz LANGUAGE sql STABLE AS
        'SELECT pg_catalog.now() + ahead FROM skewed.clock'
"""


def record_both_heartbeats(store: Store) -> None:
    for agent in ("agent-a100-0", "agent-a100-1"):
        record_heartbeat(store, agent)


class ManualClock:
    """A process's own clock, which only the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def seconds() -> ManualClock:
    return ManualClock()


@pytest.fixture
def skewed(database: Database, seconds: ManualClock) -> Store:
    """Return a store on a database whose clock can be set, with a job that runs on a node."""
    execute(database, SKEW)
    name = database.engine.url.database
    execute(database, f'ALTER DATABASE "{name}" SET search_path = skewed, pg_catalog, public')
    database.engine.dispose()  # new connections have the search path
    store = Store(database, monotonic_s=seconds)
    a_cluster(store)
    submit(store, a_spec("a"))
    run(store, a=[("a100-0", [0])])
    store.ready()
    return store


def step_clock(database: Database, by_s: float) -> None:
    execute(database, f"UPDATE skewed.clock SET ahead = ahead + make_interval(secs => {by_s})")


def pass_time(database: Database, seconds: ManualClock, by_s: float) -> None:
    """Let time pass for both clocks."""
    step_clock(database, by_s)
    seconds.now_s += by_s


def test_a_clock_step_of_a_minute_forward_loses_no_job_of_a_live_node(
    skewed: Store, database: Database, seconds: ManualClock
) -> None:
    step_clock(database, 60.0)
    assert skewed.expire(C) == []
    assert skewed.snapshot(C).nodes.schedulable.all()
    record_both_heartbeats(skewed)
    for _ in range(4):
        pass_time(database, seconds, 20.0)
        record_both_heartbeats(skewed)
        assert skewed.expire(C) == []
    assert (job(skewed, "a").state, job(skewed, "a").generation) == (JobState.RUNNING, 1)


def test_an_agent_that_reconnects_after_a_step_forward_keeps_its_gangs(
    skewed: Store, database: Database
) -> None:
    step_clock(database, 60.0)
    spec = skewed.read(get_node, C, "a100-0").spec
    skewed.hello(C, AGENT, "second", [spec])
    assert (job(skewed, "a").state, job(skewed, "a").generation) == (JobState.RUNNING, 1)


def test_a_node_that_died_before_a_step_forward_is_lost_after_the_grace(
    skewed: Store, database: Database, seconds: ManualClock
) -> None:
    step_clock(database, 60.0)
    assert skewed.expire(C) == []
    pass_time(database, seconds, SILENCE_S + 1)
    assert skewed.expire(C) == ["a"]


@pytest.mark.parametrize("back_s", [60.0, 3600.0])
def test_a_node_that_dies_while_the_clock_is_set_back_is_lost_after_the_usual_time(
    skewed: Store, database: Database, seconds: ManualClock, back_s: float
) -> None:
    step_clock(database, -back_s)
    assert skewed.expire(C) == []
    pass_time(database, seconds, SILENCE_S - 5)
    assert skewed.expire(C) == []
    pass_time(database, seconds, 6.0)
    assert skewed.expire(C) == ["a"]


def test_live_nodes_survive_a_clock_set_back_by_an_hour(
    skewed: Store, database: Database, seconds: ManualClock
) -> None:
    step_clock(database, -3600.0)
    for _ in range(4):
        record_both_heartbeats(skewed)
        pass_time(database, seconds, 20.0)
        assert skewed.expire(C) == []
    snapshot = skewed.snapshot(C)
    commit(skewed, snapshot, start(snapshot, "a", [("a100-1", [1])]))
    agents_report(skewed)
    assert job(skewed, "a").state is JobState.RUNNING


def test_a_step_back_lets_no_turn_wait_for_heartbeats_that_are_being_recorded(
    skewed: Store, database: Database, seconds: ManualClock
) -> None:
    record_both_heartbeats(skewed)
    step_clock(database, -3600.0)
    with connect_database(database.url).engine.begin() as recording:
        recording.execute(sa.text("SELECT FROM agents WHERE name = 'agent-a100-1' FOR UPDATE"))
        assert skewed.expire(C) == []
        agents_report(skewed)
    pass_time(database, seconds, SILENCE_S + 1)
    record_heartbeat(skewed, "agent-a100-1")
    assert skewed.expire(C) == ["a"]


def test_the_lease_of_a_dead_replica_is_taken_over_although_the_clock_was_set_back(
    skewed: Store, database: Database, seconds: ManualClock
) -> None:
    assert skewed.update(acquire_lease, C, "dead", 15.0)
    assert not skewed.update(acquire_lease, C, "alive", 15.0)
    step_clock(database, -3600.0)
    assert skewed.update(acquire_lease, C, "alive", 15.0)
    assert not skewed.update(acquire_lease, C, "third", 15.0)
    pass_time(database, seconds, 16.0)
    assert skewed.update(acquire_lease, C, "third", 15.0)


@pytest.mark.parametrize(
    "change",
    [lambda d, s: pass_time(d, s, 46.0), lambda d, s: step_clock(d, -46.0)],
    ids=["time passes", "step back"],
)
def test_only_a_step_forward_is_reported_as_set_forward(
    skewed: Store,
    database: Database,
    seconds: ManualClock,
    change: Callable[[Database, ManualClock], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    change(database, seconds)
    skewed.ready()
    assert "set forward" not in caplog.text
