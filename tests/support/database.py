"""PostgreSQL for tests: one server and migrated template per session, and a clone per test."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from tessera.db import embedded, migrate
from tessera.db.engine import Database, connect_database
from tessera.db.store import PostgresStore

TEMPLATE = "tessera_template"

_FAST = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
)  # a test's data need not survive a crash

_numbers = itertools.count()


def _admin(url: str) -> sa.Engine:
    return sa.create_engine(
        connect_database(url).engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    )


def url_of(server_url: str, name: str) -> str:
    """Return the URL of the server's database ``name``."""
    return sa.make_url(server_url).set(database=name).render_as_string(hide_password=False)


@contextmanager
def a_database(server_url: str, template: str = TEMPLATE) -> Iterator[Database]:
    """Yield a new database that is cloned from ``template`` and dropped at the end."""
    name, admin = f"test_{next(_numbers)}", _admin(server_url)
    with admin.connect() as connection:
        connection.execute(sa.text(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'))
    database = connect_database(url_of(server_url, name), statement_timeout_s=60, lock_timeout_s=20)
    try:
        yield database
    finally:
        database.engine.dispose()
        with admin.connect() as connection:
            connection.execute(sa.text(f'DROP DATABASE "{name}" WITH (FORCE)'))


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


@pytest.fixture
def database(server_url: str) -> Iterator[Database]:
    """Yield a migrated, empty database for one test."""
    with a_database(server_url) as database:
        yield database


@pytest.fixture
def store(database: Database) -> PostgresStore:
    """Return a store on the test's database."""
    return PostgresStore(database)


@pytest.fixture
def make_database(server_url: str) -> Callable[[], object]:
    """Return a context manager that creates further databases, for property tests."""
    return lambda: a_database(server_url)
