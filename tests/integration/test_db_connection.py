"""The connection: clear errors, lost connections, notifications."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tessera.db.engine import Database, connect_database, sqlalchemy_url
from tessera.db.migrate import MigratedDatabase
from tessera.db.notify import EVERY_CLUSTER, Listener
from tessera.db.revision import head_revision
from tessera.db.store import PostgresStore
from tessera.db.tables.triggers import STATED_SCHEMA
from tessera.formulation.errors import InvalidInput, Unavailable
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    execute,
    run,
    submit,
)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@127.0.0.1:1/none",
        "postgresql://user@127.0.0.1:1/none?password=secret",
        "postgresql://user@127.0.0.1:1/none?sslmode=require&sslpassword=secret",
    ],
)
def test_an_unreachable_database_says_what_to_do_and_keeps_the_password(url: str) -> None:
    store = PostgresStore(connect_database(url))
    with pytest.raises(Unavailable, match="TESSERA_DATABASE_URL") as error:
        store.ready()
    assert "secret" not in str(error.value)
    assert "127.0.0.1:1" in str(error.value)


@pytest.mark.parametrize("url", ["postgresql://h/d", "postgres://h/d", "postgresql+psycopg://h/d"])
def test_any_postgresql_url_is_read_by_the_installed_driver(url: str) -> None:
    assert sqlalchemy_url(url).render_as_string() == "postgresql+psycopg2://h/d"


@pytest.mark.parametrize("url", ["sqlite://", "nonsense", "mysql://h/d"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="postgresql://"):
        connect_database(url)


def test_what_a_url_states_of_the_connection_is_kept(server_url: str) -> None:
    stated = {"options": "-c search_path=mine -c lock_timeout=7s", "application_name": "ours"}
    url = sqlalchemy_url(server_url).update_query_dict(stated)
    database = connect_database(url.render_as_string(hide_password=False))
    names = ("search_path", "lock_timeout", "application_name", "statement_timeout", STATED_SCHEMA)
    with database.read() as connection:
        show = [connection.execute(sa.text(f"SHOW {name}")).scalar() for name in names]
    database.engine.dispose()
    assert show == ["mine", "7s", "ours", "1min", head_revision()]


def test_slow_statements_locks_and_a_full_pool_are_reported_as_a_busy_database(
    database: Database,
) -> None:
    a_cluster(PostgresStore(database))
    slow = connect_database(database.url, statement_timeout_s=0.05)
    with pytest.raises(Unavailable, match="too busy"):
        slow.write(lambda c: c.execute(sa.text("SELECT pg_sleep(10)")))
    hasty = connect_database(database.url, lock_timeout_s=0.05)
    with database.engine.begin() as connection:
        connection.execute(sa.text("SELECT FROM clusters FOR UPDATE"))
        with pytest.raises(Unavailable, match="too busy"):
            PostgresStore(hasty).hello(C, "a", "i", [])
    small = connect_database(database.url, pool_size=1, lock_timeout_s=0.05)
    with small.engine.connect(), pytest.raises(Unavailable, match="too busy"):
        small.write(lambda c: None)
    for other in (slow, hasty, small):
        other.engine.dispose()


def read_one(database: Database) -> object:
    with database.read() as connection:
        return connection.execute(sa.text("SELECT 1")).scalar()


def write_one(database: Database) -> object:
    return database.write(lambda c: c.execute(sa.text("SELECT 1")).scalar())


def try_lock(database: Database) -> object:
    with database.held("a name") as free:
        return free


@pytest.mark.parametrize("use", [read_one, write_one, try_lock])
@pytest.mark.parametrize("kind", [Database, MigratedDatabase])
def test_cut_connections_are_replaced(
    database: Database, kind: type[Database], use: Callable[[Database], object]
) -> None:
    tried, admin = kind(database.engine), connect_database(database.url)
    with database.engine.connect() as first, database.engine.connect() as second:
        idle = [c.execute(sa.text("SELECT pg_backend_pid()")).scalar() for c in (first, second)]
    with admin.engine.connect() as connection:
        connection.execute(sa.text("SELECT pg_terminate_backend(p) FROM unnest(:p) p"), {"p": idle})
    admin.engine.dispose()
    for _ in range(3):
        assert use(tried)


def test_a_connection_cut_halfway_is_reported_as_unavailable(database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(Unavailable, match="cannot be reached or has failed"):
        database.write(work)


def test_a_listener_that_lost_its_connection_reconnects(
    store: PostgresStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.db.notify.RETRY_S", 0.01)
    a_cluster(store)
    notifications: queue.Queue[str] = queue.Queue()
    listener = Listener(database.url)
    listener.subscribe(notifications.put)
    with listener:
        assert notifications.get(timeout=PATIENCE_S) == EVERY_CLUSTER
        execute(
            database,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'tessera-listen' AND datname = current_database()",
        )
        assert notifications.get(timeout=PATIENCE_S) == EVERY_CLUSTER
        submit(store, a_spec("a"))
        run(store, a=[("a100-0", [0])])
        assert notifications.get(timeout=PATIENCE_S) == C
    assert "tessera-listen" not in {thread.name for thread in threading.enumerate()}


def test_a_database_without_notifications_is_logged_once_and_retried_ever_less_often(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float | None] = []

    class Patient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return False

    def refuse_at_first(dsn: str, **settings: Any) -> object:
        if len(waits) < 8:
            raise psycopg2.OperationalError("no\nroute")
        return really_connect(dsn, **settings)

    really_connect = psycopg2.connect
    monkeypatch.setattr("tessera.db.notify.psycopg2.connect", refuse_at_first)
    listener = Listener(database.url)
    monkeypatch.setattr(listener, "_closed", Patient())
    with caplog.at_level("INFO", "tessera.db.notify"), listener:
        assert listener.listening.wait(PATIENCE_S)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    lost, begun = logged_lines(caplog)
    assert lost.startswith("WARNING notices_lost ")
    assert lost.endswith(' error="no route"')
    assert begun.startswith("INFO notices_begun ")
