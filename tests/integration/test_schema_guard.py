"""A program and a schema of different releases: nothing is written, and no traceback is shown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc.aio
import pytest
import sqlalchemy as sa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner, Result

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.rounds.leases import acquire_lease
from tessera.db.rounds.rounds import list_rounds
from tessera.db.schema import migrate
from tessera.db.schema.engine import Database, connect_database
from tessera.db.schema.revision import head_revision
from tessera.db.store.reads import get_job, list_jobs
from tessera.db.store.store import Store
from tessera.formulation.base.errors import NotMigrated
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.store import Request, Retention
from tessera.service.cli.main import app
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server
from tessera.v1 import agents_pb2, agents_pb2_grpc, estimates_pb2, jobs_pb2, jobs_pb2_grpc
from tests.support.migrations import a_newer_release
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_round,
    a_spec,
    apply_event,
    record_heartbeat,
    submit,
    wait,
)

FIRST_REVISION = head_revision()
"""The revision of this release."""
NEWER = "9999"

CHANGES: dict[str, Callable[[Store], object]] = {
    "a change of a user": lambda s: apply_event(s, "a", JobEvent.CANCEL),
    "a submission": lambda s: submit(s, a_spec("b")),
    "a dry run": lambda s: s.write(None, lambda w: b"", validate_only=True),
    "a repeated request": lambda s: s.write(Request(id="r", method="m", digest="d"), lambda w: b""),
    "a lease": lambda s: s.update(acquire_lease, C, "me", 5.0),
    "nodes that fell silent": lambda s: s.expire(C),
    "an agent's hello": lambda s: s.hello(C, "agent-a100-0", "second", []),
    "an agent's heartbeat": lambda s: record_heartbeat(s, "agent-a100-0", "first"),
    "an agent's report": lambda s: s.update(record_observation, C, "agent-a100-0", "first", [], 1),
    "retention": lambda s: s.prune_batch(C, Retention(jobs_s=0.0)),
    "prune": lambda s: s.prune(-1.0, 0),
    "the desired state of an agent": lambda s: s.read(load_desired_gangs, C, "agent-a100-0"),
    "a job": lambda s: s.read(get_job, C, "a"),
}


def set_revision(database: Database, revision: str) -> None:
    with database.engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision}
        )


@contextmanager
def migrated_by_a_newer_release(database: Database) -> Iterator[None]:
    set_revision(database, NEWER)
    yield
    set_revision(database, migrate.head_revision())


def all_rows(database: Database) -> dict[str, list[tuple[object, ...]]]:
    """Return every row of every table."""
    with database.read() as connection:
        names = connection.execute(
            sa.text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ).scalars()
        return {
            name: sorted(
                (tuple(row) for row in connection.execute(sa.text(f"TABLE {name}"))), key=repr
            )
            for name in names.all()
        }


@pytest.mark.parametrize("what", CHANGES)
def test_a_running_program_neither_writes_nor_reads_once_a_newer_one_has_migrated(
    store: Store, database: Database, what: str
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    store.ready()
    with migrated_by_a_newer_release(database):
        before = all_rows(database)
        with pytest.raises(
            NotMigrated, match=r"schema 9999 of a newer release.*upgrade this program"
        ):
            CHANGES[what](store)
        assert all_rows(database) == before


def test_a_round_that_was_decided_before_a_newer_release_migrated_is_not_committed(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    snapshot = store.snapshot(C)
    decided = a_round(snapshot, wait(snapshot, "a"))
    with (
        migrated_by_a_newer_release(database),
        pytest.raises(NotMigrated, match="upgrade this program"),
    ):
        store.commit(decided)
    assert store.read(list_rounds, C, 0, 9) == []
    assert store.commit(decided).summary.number == 1


def test_the_schema_of_a_commit_before_the_first_release_is_refused(
    store: Store, database: Database
) -> None:
    set_revision(database, "0001")
    for use in (store.ready, lambda: migrate.upgrade_schema(database)):
        with pytest.raises(NotMigrated, match=r"schema 0001 of a commit before .* empty database"):
            use()


def test_an_older_schema_says_how_to_migrate(
    store: Store, database: Database, tmp_path: Path
) -> None:
    a_cluster(store)
    with a_newer_release(tmp_path, database.url) as newer:
        for change in CHANGES.values():
            with pytest.raises(
                NotMigrated,
                match=f"has schema {FIRST_REVISION}, but this release needs 0002; run `tessera migrate`",
            ):
                change(Store(newer))


def test_a_migration_waits_for_changes_under_way_and_later_ones_wait_for_it(
    database: Database, tmp_path: Path
) -> None:
    with a_newer_release(tmp_path, database.url) as newer:
        migrate.upgrade_schema(newer)
        _change_during_a_migration(newer)


def _change_during_a_migration(database: Database) -> None:
    store = Store(database)
    a_cluster(store)
    submit(store, a_spec("a"))
    within, go_on = threading.Event(), threading.Event()

    def change_slowly() -> None:
        def work(writer: object) -> None:
            within.set()
            assert go_on.wait(PATIENCE_S)

        store.change(work)

    other = connect_database(database.url)
    changing = threading.Thread(target=change_slowly)
    migrating = threading.Thread(target=migrate.downgrade_schema, args=(other, FIRST_REVISION))
    changing.start()
    assert within.wait(PATIENCE_S)
    migrating.start()
    waits = sa.text(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = "
        "(SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with database.engine.connect() as plain:
        connection = plain.execution_options(isolation_level="AUTOCOMMIT")
        while not connection.execute(waits).scalar_one():
            assert migrating.is_alive()
    go_on.set()
    # The change waits, and then sees the migrated schema.
    with pytest.raises(NotMigrated, match="tessera migrate"):
        apply_event(store, "a", JobEvent.CANCEL)
    changing.join()
    migrating.join()
    other.engine.dispose()


@pytest.mark.parametrize(
    "change", [migrate.upgrade_schema, lambda d: migrate.downgrade_schema(d, "base")]
)
def test_migrating_a_newer_schema_is_refused(
    database: Database, change: Callable[[Database], None]
) -> None:
    with (
        migrated_by_a_newer_release(database),
        pytest.raises(NotMigrated, match="upgrade this program"),
    ):
        change(database)


def run_tessera(database: Database, *arguments: str) -> Result:
    url = database.url.replace("+psycopg2", "", 1)
    return CliRunner().invoke(app, arguments, env={"TESSERA_DATABASE_URL": url})


@pytest.mark.parametrize(
    "command", [("migrate",), ("prune",), ("prune", "--dry-run"), ("serve", "--migrate")]
)
def test_commands_on_a_newer_schema_print_one_line_of_error(
    database: Database, command: tuple[str, ...]
) -> None:
    with migrated_by_a_newer_release(database):
        done = run_tessera(database, *command)
    assert done.exit_code not in (0, 1)
    assert "schema 9999 of a newer release" in done.stderr
    assert "upgrade this program" in done.stderr
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


async def test_a_running_server_stops_writing_once_a_newer_release_has_migrated_its_database(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    config = Config(
        listen="127.0.0.1:0",
        database_url=database.url,
        period_s=0.2,
        health_period_s=0.1,
        heartbeat_s=0.2,
        lease_s=6.0,
        margin_s=1.0,
    )
    async with (
        run_server(config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        jobs, health = jobs_pb2_grpc.JobsStub(channel), health_pb2_grpc.HealthStub(channel)
        agents = agents_pb2_grpc.AgentsStub(channel)
        hello = agents_pb2.AgentMessage(
            hello=agents_pb2.Hello(
                parent=f"clusters/{C}",
                agent_id="agent-new",
                incarnation="1",
                nodes=[agents_pb2.AgentNode(node="new", gpu_type="a100", gpus=4)],
            )
        )
        await wait_for(health, health_pb2.HealthCheckResponse.SERVING)
        set_revision(database, NEWER)
        before = all_rows(database)
        name = jobs_pb2.SubmitJobRequest(parent=f"clusters/{C}", job=a_job())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await jobs.SubmitJob(name)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "upgrade this program" in str(refused.value.details())
        stream = agents.Sync()
        await stream.write(hello)
        with pytest.raises(grpc.aio.AioRpcError) as turned_away:
            await stream.read()
        assert turned_away.value.code() is grpc.StatusCode.UNAVAILABLE
        await wait_for(health, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert all_rows(database) == before
        set_revision(database, migrate.head_revision())
        await wait_for(health, health_pb2.HealthCheckResponse.SERVING)
        await jobs.SubmitJob(name)
    assert len(store.read(list_jobs, C, [], 0, 9)[0]) == 1


def a_job() -> jobs_pb2.Job:
    return jobs_pb2.Job(
        workload=estimates_pb2.Workload(model="bert", params="1B", global_batch=256),
        iterations=10,
        requested_gpus=1,
    )


async def wait_for(health: health_pb2_grpc.HealthStub, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                if (await health.Check(health_pb2.HealthCheckRequest())).status == status:
                    return
            await asyncio.sleep(0.02)
