"""PostgreSQL for tests: one server and migrated template per session, and an empty database per test.

A clone of the template takes PostgreSQL longer than most tests take. So a test gets the database of
the one before, emptied and under another name, which nothing that is left of that test knows.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from tessera.db.schema import embedded, migrate
from tessera.db.schema.engine import Database, connect_database
from tessera.db.store.store import Store

TEMPLATE = "tessera_template"

_FAST = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
)  # a test's data need not survive a crash

_numbers = itertools.count()

_SCHEMA = sa.text("""
SELECT md5(string_agg(part, ',' ORDER BY part)) FROM (
    SELECT concat_ws(' ', k.relname, k.relkind, a.attname, a.atttypid, a.attnotnull, a.attnum)
    FROM pg_class k JOIN pg_attribute a ON a.attrelid = k.oid AND a.attnum > 0
    WHERE k.relnamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(' ', conname, convalidated, pg_get_constraintdef(oid))
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(' ', tgrelid::regclass, tgname, tgenabled)
    FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL SELECT concat_ws(' ', proname, prosrc)
    FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    UNION ALL SELECT concat_ws(' ', setrole, setconfig)
    FROM pg_db_role_setting WHERE setdatabase = (
        SELECT oid FROM pg_database WHERE datname = current_database()
    )
    UNION ALL SELECT version_num FROM alembic_version
) AS parts(part)
""")
_DISCONNECT_FROM = sa.text("""
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = :name AND pid <> pg_backend_pid()
""")
_TABLES = sa.text("""
SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version'
""")
_CHANGED_TABLES = sa.text("""
SELECT tablename FROM pg_tables
WHERE schemaname = 'public' AND tablename NOT IN ('audit_log', 'leases') ORDER BY tablename
""")
_DIGEST = """
SELECT count(*), md5(coalesce(string_agg(t::text, chr(10) ORDER BY t::text), '')) FROM {table} t
"""
_RESTART = sa.text("""
SELECT setval(format('%I', sequencename)::regclass, start_value, false)
FROM pg_sequences WHERE last_value IS NOT NULL
""")


def _admin(url: str) -> sa.Engine:
    return sa.create_engine(
        connect_database(url).engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    )


def url_of(server_url: str, name: str) -> str:
    """Return the URL of the server's database ``name``."""
    return sa.make_url(server_url).set(database=name).render_as_string(hide_password=False)


def _clone(server_url: str, template: str) -> str:
    """Clone a database, and return the name of the clone."""
    name = f"test_{next(_numbers)}"
    with _admin(server_url).connect() as connection:
        connection.execute(sa.text(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'))
    return name


def _drop(server_url: str, name: str) -> None:
    with _admin(server_url).connect() as connection:
        connection.execute(sa.text(f'DROP DATABASE "{name}" WITH (FORCE)'))


@contextmanager
def _connected(server_url: str, name: str) -> Iterator[Database]:
    url = url_of(server_url, name)
    database = connect_database(url, statement_timeout_s=60, lock_timeout_s=20)
    try:
        yield database
    finally:
        database.engine.dispose()


@contextmanager
def a_database(server_url: str, template: str = TEMPLATE) -> Iterator[Database]:
    """Yield a new database that is cloned from ``template`` and dropped at the end."""
    name = _clone(server_url, template)
    try:
        with _connected(server_url, name) as database:
            yield database
    finally:
        _drop(server_url, name)


@dataclass(kw_only=True)
class EmptyDatabases:
    """The emptied databases of a server, by name, whose ``schema`` is that of the template."""

    server_url: str
    schema: str
    names: list[str] = field(default_factory=list)

    @contextmanager
    def take(self) -> Iterator[Database]:
        """Yield an empty database, which others get later, or drop it if its schema was changed."""
        name = self._rename(self.names.pop()) if self.names else _clone(self.server_url, TEMPLATE)
        try:
            with _connected(self.server_url, name) as database:
                yield database
        finally:
            if self._empty(name):
                self.names.append(name)
            else:
                _drop(self.server_url, name)

    def _rename(self, old: str) -> str:
        name = f"test_{next(_numbers)}"
        with _admin(self.server_url).connect() as connection:
            connection.execute(_DISCONNECT_FROM, {"name": old})
            connection.execute(sa.text(f'ALTER DATABASE "{old}" RENAME TO "{name}"'))
        return name

    def _empty(self, name: str) -> bool:
        """Delete all rows; return False if the database's schema is not the template's."""
        with _admin(url_of(self.server_url, name)).connect() as connection:
            connection.execute(_DISCONNECT_FROM, {"name": name})
            if read_schema(connection) != self.schema:
                return False
            tables = connection.execute(_TABLES).scalars().all()
            probes = (f"SELECT '{t}' WHERE EXISTS (SELECT FROM \"{t}\")" for t in tables)
            filled = connection.execute(sa.text(" UNION ALL ".join(probes))).scalars().all()
            # Without triggers and foreign keys, the order of tables does not matter.
            connection.execute(sa.text("SET session_replication_role = replica"))
            for table in filled:
                connection.execute(sa.text(f'DELETE FROM "{table}"'))
            connection.execute(_RESTART)
        return True


def digest_tables(database: Database) -> dict[str, tuple[int, str]]:
    """Return the number of rows and a digest of each table that calls change."""
    with database.engine.connect() as connection:
        tables = connection.execute(_CHANGED_TABLES).scalars().all()
        rows = {t: connection.execute(sa.text(_DIGEST.format(table=t))).one() for t in tables}
    return {table: (row[0], row[1]) for table, row in rows.items()}


def read_schema(connection: sa.Connection) -> str:
    """Return a digest of a database's tables, constraints, triggers, functions and settings."""
    return str(connection.execute(_SCHEMA).scalar_one())


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Start an embedded server in a temporary directory, not yet migrated."""
    with tempfile.TemporaryDirectory(prefix="tessera-pg-", ignore_cleanup_errors=True) as folder:
        place = Path(folder) / "pg"
        url = embedded.start_server(place)
        with _admin(url).connect() as connection:
            for setting in _FAST:
                connection.execute(sa.text(f"ALTER SYSTEM SET {setting} = off"))
            connection.execute(sa.text("SELECT pg_reload_conf()"))
        yield url
        embedded.stop_server(place)


@pytest.fixture(scope="session")
def server_url(postgres_url: str) -> str:
    """Return the URL of a server that has the migrated template database."""
    with _admin(postgres_url).connect() as connection:
        connection.execute(sa.text(f'CREATE DATABASE "{TEMPLATE}"'))
    database = connect_database(url_of(postgres_url, TEMPLATE))
    migrate.upgrade_schema(database)
    database.engine.dispose()
    return postgres_url


@pytest.fixture(scope="session")
def empty_databases(server_url: str) -> EmptyDatabases:
    """Return the databases of the server that tests have used and that are empty again."""
    with _admin(url_of(server_url, TEMPLATE)).connect() as connection:
        return EmptyDatabases(server_url=server_url, schema=read_schema(connection))


@pytest.fixture
def database(empty_databases: EmptyDatabases) -> Iterator[Database]:
    """Yield a migrated, empty database for one test."""
    with empty_databases.take() as database:
        yield database


@pytest.fixture
def store(database: Database) -> Store:
    """Return a store on the test's database."""
    return Store(database)


@pytest.fixture
def make_database(server_url: str) -> Callable[[], object]:
    """Return a context manager that creates further databases, for property tests."""
    return lambda: a_database(server_url)
