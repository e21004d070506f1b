"""The fence in the database: programs of other releases read, and write nothing."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest
import sqlalchemy as sa

from tessera.db.clusters.tenants import delete_tenants
from tessera.db.rounds.leases import acquire_lease
from tessera.db.schema import migrate
from tessera.db.schema.engine import Database
from tessera.db.schema.pgserver import _programs
from tessera.db.schema.tables import metadata
from tessera.db.schema.tables.triggers import SCHEMA_FENCE
from tessera.db.store.reads import get_job
from tessera.db.store.store import Store
from tessera.formulation.base.errors import NotMigrated
from tessera.formulation.job.lifecycle import JobEvent
from tests.support.database import a_database
from tests.support.stored_cluster import C, a_cluster, a_spec, apply_event, run, submit

OLDER, NEWER = "0000", "9999"
TABLES = sorted(metadata.tables)


def a_column(table: str) -> str:
    """Return a column that may be written."""
    return next(c.name for c in metadata.tables[table].columns if c.identity is None)


WRITES = {
    "insert": "INSERT INTO {table} DEFAULT VALUES",
    "update": "UPDATE {table} SET {column} = {column}",
    "update of nothing": "UPDATE {table} SET {column} = {column} WHERE false",
    "delete": "DELETE FROM {table}",
    "delete of nothing": "DELETE FROM {table} WHERE false",
    "truncate": "TRUNCATE {table} CASCADE",
    "merge": "MERGE INTO {table} t USING (SELECT) s ON true WHEN MATCHED THEN DELETE",
    "write in a query": "WITH gone AS (DELETE FROM {table} RETURNING *) SELECT count(*) FROM gone",
}


def plain_url(database: Database) -> str:
    return database.url.replace("+psycopg2", "", 1)


def fill(database: Database) -> Store:
    store = Store(database)
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[("a100-0", [0])])
    return store


def all_rows(database: Database) -> dict[str, list[str]]:
    with database.read() as connection:
        return {
            table: sorted(connection.execute(sa.text(f"SELECT t::text FROM {table} t")).scalars())
            for table in TABLES
        }


def test_every_table_is_fenced(database: Database) -> None:
    """A migration that makes a table makes its fence, too."""
    query = (
        "SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname = :name AND tgenabled = 'O'"
    )
    with database.read() as connection:
        fenced = connection.execute(sa.text(query), {"name": SCHEMA_FENCE}).scalars().all()
        tables = sa.inspect(connection).get_table_names()
    assert sorted(fenced) == sorted(set(tables) - {"alembic_version"}) == TABLES


@contextmanager
def a_program(database: Database, stated: str | None) -> Iterator[psycopg2.extensions.connection]:
    """Yield the connection of a program that states a schema, or none if it is of an old release."""
    options = "" if stated is None else f"-c tessera.schema={stated}"
    connection = psycopg2.connect(plain_url(database), options=options)
    try:
        yield connection
    finally:
        connection.close()


@pytest.mark.parametrize("stated", [None, "", OLDER, NEWER])
def test_a_program_of_another_release_writes_to_no_table(
    database: Database, stated: str | None
) -> None:
    fill(database)
    before = all_rows(database)
    with a_program(database, stated) as connection, connection.cursor() as cursor:
        for table in TABLES:
            for what, statement in WRITES.items():
                with pytest.raises(psycopg2.Error) as refused:
                    cursor.execute(statement.format(table=table, column=a_column(table)))
                fence = refused.value.diag.constraint_name
                is_closed = (table, fence) == ("audit_log", "audit_log_append_only")
                assert is_closed or fence == SCHEMA_FENCE, (what, table)
                connection.rollback()
            with pytest.raises(psycopg2.errors.UndefinedTable, match="has schema"):
                cursor.copy_expert(f"COPY {table} FROM STDIN", io.StringIO(""))
            connection.rollback()
            cursor.execute(f"SELECT count(*) FROM {table}")  # reading does no harm
    assert all_rows(database) == before


def test_a_refused_program_is_told_which_schema_there_is_and_what_to_do(
    database: Database,
) -> None:
    head = migrate.head_revision()
    for stated, what in ((None, "an older schema"), (OLDER, "schema 0000")):
        with a_program(database, stated) as connection, connection.cursor() as cursor:
            with pytest.raises(psycopg2.errors.UndefinedTable) as refused:
                cursor.execute("DELETE FROM jobs")
            assert refused.value.diag.message_primary == (
                f"the database has schema {head}, and a program for {what} may not write to it;"
                " upgrade that program, or run `tessera migrate` if it is newer"
            )


def test_a_program_that_does_not_look_at_the_schema_is_refused_once_a_newer_one_has_migrated(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database itself refuses what a program would otherwise write."""
    monkeypatch.setattr(migrate.MigratedDatabase, "verify", Database.verify)
    store = fill(database)
    with database.engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{NEWER}'"))
    before = all_rows(database)
    changes: dict[str, Callable[[], object]] = {
        "a cancellation": lambda: apply_event(store, "a", JobEvent.CANCEL),
        "a submission": lambda: submit(store, a_spec("c")),
        "a lease": lambda: store.update(acquire_lease, C, "me", 5.0),
        "a round": lambda: run(store, b=[("a100-0", [1])]),
        "an empty change": lambda: store.change(delete_tenants, C, ["x"], allow_missing=True),
    }
    for change in changes.values():
        with pytest.raises(NotMigrated, match=f"has schema {NEWER}, and a program for schema"):
            change()
    assert all_rows(database) == before
    assert store.read(get_job, C, "a").spec.name == "a"


@pytest.mark.parametrize("form", ["plain", "custom"])
def test_a_dump_is_restored_with_its_data_and_its_fences(
    database: Database, server_url: str, tmp_path: Path, form: str
) -> None:
    fill(database)
    dump = tmp_path / "dump"
    subprocess.run(
        [str(_programs() / "pg_dump"), "-F", form, "-f", dump, plain_url(database)], check=True
    )
    with a_database(server_url, "template0") as restored:
        to = plain_url(restored)
        if form == "plain":
            command = [
                str(_programs() / "psql"),
                "-q",
                "-v",
                "ON_ERROR_STOP=1",
                "-f",
                str(dump),
                to,
            ]
        else:
            command = [str(_programs() / "pg_restore"), "--exit-on-error", "-d", to, str(dump)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        assert all_rows(restored) == all_rows(database)
        test_every_table_is_fenced(restored)
        apply_event(Store(restored), "b", JobEvent.CANCEL)
        with (
            a_program(restored, None) as connection,
            connection.cursor() as cursor,
            pytest.raises(psycopg2.errors.UndefinedTable),
        ):
            cursor.execute("DELETE FROM jobs")


def test_tables_of_others_in_the_same_database_are_left_alone(server_url: str) -> None:
    with a_database(server_url, "template0") as fresh:
        with fresh.engine.begin() as own:
            own.execute(sa.text("CREATE TABLE guests (name text)"))
        migrate.upgrade_schema(fresh)
        with a_program(fresh, None) as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO guests VALUES ('ana')")
