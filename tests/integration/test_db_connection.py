"""The connection: clear errors, the embedded server, notifications, retention."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tessera.db import embedded
from tessera.db.engine import Database, connect_database, sqlalchemy_url
from tessera.db.migrate import MigratedDatabase
from tessera.db.notify import EVERY_CLUSTER, Listener
from tessera.db.revision import head_revision
from tessera.db.store import PostgresStore
from tessera.db.tables.triggers import STATED_SCHEMA
from tessera.formulation.errors import InvalidInput, NotFound, Unavailable
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.store import Request
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    execute,
    run,
    states,
    submit,
    wait,
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


def test_a_statement_that_takes_too_long_is_cancelled(server_url: str) -> None:
    database = connect_database(server_url, statement_timeout_s=0.05)
    with pytest.raises(Unavailable, match="too busy"):
        database.write(lambda c: c.execute(sa.text("SELECT pg_sleep(10)")))
    database.engine.dispose()


def test_waiting_for_a_lock_times_out(database: Database) -> None:
    a_cluster(PostgresStore(database))
    hasty = connect_database(database.url, lock_timeout_s=0.05)
    with database.engine.begin() as connection:
        connection.execute(sa.text("SELECT FROM clusters FOR UPDATE"))
        with pytest.raises(Unavailable, match="too busy"):
            PostgresStore(hasty).hello(C, "a", "i", [])
    hasty.engine.dispose()


def test_the_connection_pool_is_bounded_and_its_error_says_so(server_url: str) -> None:
    database = connect_database(server_url, pool_size=1, lock_timeout_s=0.05)
    with database.engine.connect(), pytest.raises(Unavailable, match="too busy"):
        database.write(lambda c: None)
    database.engine.dispose()


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


def test_two_processes_share_the_embedded_server(postgres_url: str) -> None:
    directory = sa.make_url(postgres_url).query["host"]
    program = (
        "from pathlib import Path; from tessera.db.engine import connect_database; import sys\n"
        "sys.stdout.write(connect_database(directory=Path(sys.argv[1])).url)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True
    )
    assert sa.make_url(done.stdout).query["host"] == directory
    # The server is still there after the other process has left.
    with connect_database(postgres_url).read() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar() == 1


def test_an_embedded_server_that_cannot_start_names_its_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unavailable, match="does not start"):
        embedded.start_server(tmp_path / "file" / "pg")


def test_subscribers_are_notified_of_changes_of_the_desired_state(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    notifications: queue.Queue[str] = queue.Queue()
    listener = Listener(database.url)
    listener.subscribe(notifications.put)
    with listener:
        assert notifications.get(timeout=PATIENCE_S) == EVERY_CLUSTER
        run(store, a=[("a100-0", [0])])
        assert notifications.get(timeout=PATIENCE_S) == C


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


def make_older(database: Database, *changes: str) -> None:
    for change in changes:
        execute(database, f"UPDATE {change} - interval '1 day'")


def test_old_rows_are_pruned_and_young_ones_are_kept(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("old"), a_spec("young"), a_spec("waits"))
    for name in ("old", "young"):
        apply_event(store, name, JobEvent.CANCEL)
    for key in ("r1", "r2"):
        store.write(Request(id=key, method="m", digest="d"), lambda w: b"x")
    for _ in range(4):
        snapshot = store.snapshot(C)
        commit(store, snapshot, wait(snapshot, "waits"))
    make_older(
        database, "request_ids SET created_at = created_at", "rounds SET created_at = created_at"
    )
    execute(database, "UPDATE jobs SET ended_at = ended_at - interval '1 day' WHERE name = 'old'")
    store.write(Request(id="r3", method="m", digest="d"), lambda w: b"x")
    deleted = {
        "request_ids": 2,
        "rounds": 2,
        "snapshots": 0,
        "jobs": 1,
        "job_history": 0,
        "job_starts": 0,
        "log_reads": 0,
        "network_plans": 0,
        "measurements": 0,
        "workloads": 0,
        "tunings": 0,
        "plans": 0,
        "audit_log": 0,
        "tokens": 0,
        "join_tokens": 0,
        "agent_certificates": 0,
        "job_arrays": 0,
        "policies": 0,
        "shadow_rounds": 0,
        "stints": 0,
        "usage_days": 0,
        "webhook_events": 0,
    }
    assert store.prune(3600.0, 2) == deleted
    assert states(store) == {"young": JobState.CANCELLED, "waits": JobState.QUEUED}
    assert [r.number for r in store.list_rounds(C, 0, 9)] == [4, 3]
    with pytest.raises(NotFound):
        store.get_round(C, 1)
    assert store.get_job(C, "waits").reason is not None
    submit(store, a_spec("old"))  # the name is free again


def test_the_latest_history_of_a_live_job_is_kept(store: PostgresStore, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("long"), a_spec("short"), a_spec("young"))
    for name, times in (("long", 30), ("short", 2), ("young", 30)):
        for _ in range(times):
            apply_event(store, name, JobEvent.HOLD)
            apply_event(store, name, JobEvent.RELEASE)
    before = store.job_history(C, "long")
    make_older(database, "job_history SET at = at")
    execute(
        database,
        "UPDATE job_history SET at = now()"
        " WHERE job_id = (SELECT id FROM jobs WHERE name = 'young')",
    )
    assert store.prune(3600.0, 0)["job_history"] == 10
    history = store.job_history(C, "long")
    assert [(e.event, e.state) for e in history] == [(e.event, e.state) for e in before[-50:]]
    assert len(store.job_history(C, "short")) == 4
    assert len(store.job_history(C, "young")) == 60


def test_a_job_is_not_pruned_before_its_gpus_are_free(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    run(store, a=[("a100-0", [0])])
    agent_reports(store, "agent-a100-0", phase="succeeded")
    make_older(database, "jobs SET ended_at = ended_at")
    assert store.prune(0.0, 0)["jobs"] == 0
    agents_report(store)
    assert store.prune(0.0, 0)["jobs"] == 1
