"""A newer release, whose schema has a second migration."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tessera.db.schema import migrate, revision
from tessera.db.schema.engine import Database, connect_database

_SECOND_MIGRATION: Final = f"""
from alembic import op

revision = "0002"
down_revision = "{revision.head_revision()}"
branch_labels = None
depends_on = None


def upgrade():
    op.execute("CREATE TABLE mottos (motto text)")


def downgrade():
    op.execute("DROP TABLE mottos")
"""


@contextmanager
def a_newer_release(folder: Path, url: str) -> Iterator[Database]:
    """Be the newer release inside the block, and yield its connection to a database.

    ``folder`` gets its migrations.
    """
    migrations = folder / "migrations"
    shutil.copytree(revision.MIGRATIONS, migrations)
    (migrations / "versions" / "0002_mottos.py").write_text(_SECOND_MIGRATION, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(revision, "MIGRATIONS", migrations)
        _forget_revisions()
        database = connect_database(url)
        try:
            yield database
        finally:
            database.engine.dispose()
            patch.undo()
            _forget_revisions()


def _forget_revisions() -> None:
    revision.head_revision.cache_clear()
    migrate._known.cache_clear()
