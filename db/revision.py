"""The schema that this release needs, from its migrations."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory


def migrations_config() -> Config:
    """Return the configuration of Alembic with the migrations of this release."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


@cache
def head_revision() -> str:
    """Return the revision that this release needs."""
    revision = ScriptDirectory.from_config(migrations_config()).get_current_head()
    if revision is None:
        raise AssertionError("there are no migrations")
    return revision
