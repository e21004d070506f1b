"""The database's clock is set forward and back: no live node is lost, and no dead one stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from tessera.db.engine import Database, connect_database
from tessera.db.store import PostgresStore
from tessera.formulation.lifecycle import JobState
from tests.support.stored import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    commit,
    execute,
    hear,
    job,
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


def hear_both(store: PostgresStore) -> None:
    for agent in ("agent-a100-0", "agent-a100-1"):
        hear(store, agent)


class Seconds:
    """A process's own clock, which only tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def skewed(database: Database, seconds: Seconds) -> PostgresStore:
    """Return a store on a database whose clock can be set, with a job that runs on a node."""
    execute(database, SKEW)
    name = database.engine.url.database
    execute(database, f'ALTER DATABASE "{name}" SET search_path = skewed, pg_catalog, public')
    database.engine.dispose()  # new connections have the path
    store = PostgresStore(database, monotonic_s=seconds)
    a_cluster(store)
    submit(store, a_spec("a"))
    run(store, a=[("a100-0", [0])])
    store.ready()
    return store


def step(database: Database, by_s: float) -> None:
    execute(database, f"UPDATE skewed.clock SET ahead = ahead + make_interval(secs => {by_s})")


def pass_time(database: Database, seconds: Seconds, by_s: float) -> None:
    """Let time pass for both clocks."""
    step(database, by_s)
    seconds.now_s += by_s


def test_the_fixture_moves_the_database_s_clock(skewed: PostgresStore, database: Database) -> None:
    with connect_database(database.url).read() as connection:
        before = connection.execute(sa.text("SELECT extract(epoch FROM now())")).scalar_one()
    step(database, 3600.0)
    with connect_database(database.url).read() as connection:
        assert (
            connection.execute(sa.text("SELECT extract(epoch FROM now())")).scalar_one()
            > before + 3599
        )


def test_a_minute_forward_loses_no_job_of_a_live_node(
    skewed: PostgresStore, database: Database, seconds: Seconds
) -> None:
    step(database, 60.0)
    assert skewed.expire(C) == []
    assert skewed.snapshot(C).nodes.schedulable.all()
    hear_both(skewed)
    for _ in range(4):
        pass_time(database, seconds, 20.0)
        hear_both(skewed)
        assert skewed.expire(C) == []
    assert (job(skewed, "a").state, job(skewed, "a").generation) == (JobState.RUNNING, 1)


def test_after_a_minute_forward_an_agent_that_connects_again_keeps_its_gangs(
    skewed: PostgresStore, database: Database
) -> None:
    step(database, 60.0)
    spec = skewed.get_node(C, "a100-0").spec
    skewed.hello(C, AGENT, "second", [spec])
    assert (job(skewed, "a").state, job(skewed, "a").generation) == (JobState.RUNNING, 1)


def test_a_node_that_died_before_the_clock_was_set_forward_is_lost_after_the_grace(
    skewed: PostgresStore, database: Database, seconds: Seconds
) -> None:
    step(database, 60.0)
    assert skewed.expire(C) == []
    pass_time(database, seconds, SILENCE_S + 1)
    assert skewed.expire(C) == ["a"]


@pytest.mark.parametrize("back_s", [60.0, 3600.0])
def test_a_node_that_dies_when_the_clock_is_set_back_is_lost_as_soon_as_any(
    skewed: PostgresStore, database: Database, seconds: Seconds, back_s: float
) -> None:
    step(database, -back_s)
    assert skewed.expire(C) == []
    pass_time(database, seconds, SILENCE_S - 5)
    assert skewed.expire(C) == []
    pass_time(database, seconds, 6.0)
    assert skewed.expire(C) == ["a"]


def test_live_nodes_live_on_when_the_clock_is_set_back_by_an_hour(
    skewed: PostgresStore, database: Database, seconds: Seconds
) -> None:
    step(database, -3600.0)
    for _ in range(4):
        hear_both(skewed)
        pass_time(database, seconds, 20.0)
        assert skewed.expire(C) == []
    snapshot = skewed.snapshot(C)
    commit(skewed, snapshot, start(snapshot, "a", [("a100-1", [1])]))
    agents_report(skewed)
    assert job(skewed, "a").state is JobState.RUNNING


def test_a_dead_replica_s_lease_is_taken_over_though_the_clock_was_set_back(
    skewed: PostgresStore, database: Database, seconds: Seconds
) -> None:
    assert skewed.acquire_lease(C, "dead", 15.0)
    assert not skewed.acquire_lease(C, "alive", 15.0)
    step(database, -3600.0)
    assert skewed.acquire_lease(C, "alive", 15.0)
    assert not skewed.acquire_lease(C, "third", 15.0)
    pass_time(database, seconds, 16.0)
    assert skewed.acquire_lease(C, "third", 15.0)


@pytest.mark.parametrize(
    "change",
    [lambda d, s: pass_time(d, s, 46.0), lambda d, s: step(d, -46.0)],
    ids=["time", "back"],
)
def test_only_a_step_forward_is_held_against_the_clock(
    skewed: PostgresStore,
    database: Database,
    seconds: Seconds,
    change: Callable[[Database, Seconds], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    change(database, seconds)
    skewed.ready()
    assert "set forward" not in caplog.text
