"""The migration of a database's schema to this release's, or back, under a lock of all replicas."""

from __future__ import annotations

from functools import cache

import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy.exc import ProgrammingError

from tessera.db.schema.engine import Database, sqlstate_of
from tessera.db.schema.revision import head_revision as head_revision
from tessera.db.schema.revision import migrations_config
from tessera.db.schema.tables.triggers import MIGRATION, STATED_SCHEMA
from tessera.formulation.base.errors import NotMigrated

_LOCK = 7_365_737_365  # any number, as long as every release uses this one

_REVISION = sa.text("SELECT version_num FROM alembic_version")

_NO_TABLE = "42P01"

_LOCK_REVISION = sa.text("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
"""A lock that waits until every transaction that has read the revision has ended. Later ones wait
for it.
"""


@cache
def _known() -> frozenset[str]:
    scripts = ScriptDirectory.from_config(migrations_config())
    return frozenset(script.revision for script in scripts.walk_revisions())


def current_revision(connection: sa.Connection) -> str | None:
    """Return the revision of the database, or None if it has no schema.

    No migration can end during this transaction.
    """
    try:
        with connection.begin_nested():
            revision = connection.execute(_REVISION).scalar()
    except ProgrammingError as error:
        if sqlstate_of(error) != _NO_TABLE:
            raise
        return None
    return None if revision is None else str(revision)


def require_head(connection: sa.Connection) -> None:
    """Check that the schema is this release's, and keep it so until the transaction ends.

    Raises:
        NotMigrated: it is an older or a newer release's.
    """
    try:
        revision = connection.execute(_REVISION).scalar()
    except ProgrammingError as error:
        if sqlstate_of(error) != _NO_TABLE:
            raise
        revision = None
    if revision == head_revision():
        return
    if revision is None:
        raise NotMigrated("the database has no schema yet; run `tessera migrate`")
    _require_known(revision)
    raise NotMigrated(
        f"the database has schema {revision}, but this release needs {head_revision()}; run `tessera migrate`"
    )


def _require_known(revision: str) -> None:
    if revision in _known():
        return
    if _number_of(revision) <= _number_of(head_revision()):
        raise NotMigrated(
            f"the database has schema {revision} of a commit before the first release, which cannot be"
            f" migrated to {head_revision()}; use that commit, or an empty database (`tessera up"
            " --data-dir DIR`)"
        )
    raise NotMigrated(
        f"the database has schema {revision} of a newer release, but this program needs"
        f" {head_revision()}; upgrade this program"
    )


def _number_of(revision: str) -> str:
    return revision.partition("_")[0]


class MigratedDatabase(Database):
    """A database that is only used while its schema is this release's.

    Each transaction first reads the revision, with one short statement, so a server notices when
    another release migrates its database. Reading takes a lock until the transaction ends, and a
    migration waits for it, so the schema never changes during a transaction.
    """

    def verify(self, connection: sa.Connection) -> None:
        """Require this release's schema. Raises NotMigrated."""
        require_head(connection)


def upgrade_schema(database: Database, revision: str = "head") -> None:
    """Apply the migrations up to ``revision``, all or none.

    Raises:
        NotMigrated: the schema is a newer release's. Unavailable.
    """
    _run(database, revision, up=True)


def downgrade_schema(database: Database, revision: str) -> None:
    """Undo the migrations down to ``revision``, all or none.

    The revision "base" undoes all of them.

    Raises:
        NotMigrated: the schema is a newer release's. Unavailable.
    """
    _run(database, revision, up=False)


def _run(database: Database, revision: str, *, up: bool) -> None:
    def work(connection: sa.Connection) -> None:
        # A migration may take as long as it needs.
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        connection.execute(sa.text(f"SET LOCAL {STATED_SCHEMA} = '{MIGRATION}'"))
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if (found := current_revision(connection)) is not None:
            # Wait for the transactions that still use the old schema.
            connection.execute(_LOCK_REVISION)
            _require_known(found)
        config = migrations_config()
        config.attributes["connection"] = connection
        (command.upgrade if up else command.downgrade)(config, revision)

    database.write(work)
