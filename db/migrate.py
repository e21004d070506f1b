"""Bring a database's schema to this release's, or back, under a lock that all replicas respect."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from db.engine import Database
from formulation.errors import NotMigrated

_LOCK = 7_365_737_365  # any number, as long as every release uses this one


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


@cache
def head() -> str:
    """Return the revision that this release needs."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise AssertionError("there are no migrations")
    return revision


def _known() -> frozenset[str]:
    scripts = ScriptDirectory.from_config(_config())
    return frozenset(script.revision for script in scripts.walk_revisions())


def current(connection: sa.Connection) -> str | None:
    """Return the revision that the database is at; None: no schema."""
    return MigrationContext.configure(connection).get_current_revision()


def require_head(connection: sa.Connection) -> None:
    """Check that the schema is this release's. Raises NotMigrated."""
    found = current(connection)
    if found == head():
        return
    if found is None:
        raise NotMigrated("the database has no schema yet; run `tessera migrate`")
    if found not in _known():
        raise NotMigrated(
            f"the database's schema {found} is a newer release's; upgrade this program"
        )
    raise NotMigrated(
        f"the database's schema is {found}, this release needs {head()}; run `tessera migrate`"
    )


def upgrade(database: Database, revision: str = "head") -> None:
    """Apply the migrations up to ``revision``, all or none. Raises Unavailable."""
    _run(database, revision, up=True)


def downgrade(database: Database, revision: str) -> None:
    """Undo the migrations down to ``revision`` ("base": all), all or none. Raises Unavailable."""
    _run(database, revision, up=False)


def _run(database: Database, revision: str, *, up: bool) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config = _config()
        config.attributes["connection"] = connection
        (command.upgrade if up else command.downgrade)(config, revision)

    database.write(work)
