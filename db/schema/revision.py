"""The schema that this release needs, from its migrations."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from alembic.config import Config
from alembic.script import ScriptDirectory

MIGRATIONS: Final = Path(__file__).parents[1] / "migrations"
"""The folder of this release's migrations."""


def migrations_config() -> Config:
    """Return the configuration of Alembic with the migrations of this release."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config


@cache
def head_revision() -> str:
    """Return the revision that this release needs."""
    revision = ScriptDirectory.from_config(migrations_config()).get_current_head()
    if revision is None:
        raise AssertionError("there are no migrations")
    return revision
