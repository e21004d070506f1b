"""Commands on the database that a server stands on; they go to it directly, not through a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from db.engine import Database
from db.migrate import head, upgrade
from db.store import PostgresStore
from formulation.errors import InvalidInput
from service.cli import limits, options
from service.cli.render import line, note
from service.config import load_config
from service.wiring import open_database

MAX_AGE_S: Final = 36_500 * 86_400.0
"""A century; the database knows no times before its own calendar."""

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The server's settings (TOML).")
]


def add(app: typer.Typer) -> None:
    """Add the commands on the database."""
    panel = "Servers"
    app.command("migrate", rich_help_panel=panel)(migrate)
    app.command("prune", rich_help_panel=panel)(prune)
    group = typer.Typer(help="Look at the database.", no_args_is_help=True)
    group.command("url")(url)
    app.add_typer(group, name="db", rich_help_panel=panel)


def _open(config: Path | None) -> Database:
    return open_database(load_config(config, os.environ))


def migrate(config: ConfigFile = None) -> None:
    """Bring the database's schema to this release's, all or nothing."""
    upgrade(_open(config))
    note(f"the database is at revision {head()}")


def prune(
    older_than: Annotated[str, typer.Option(help="Keep what is younger, e.g. 30d.")] = "30d",
    keep_rounds: Annotated[
        int,
        typer.Option(
            min=0,
            max=limits.MAX_ROWS,
            help="Keep at least the last so many rounds of each cluster.",
        ),
    ] = 100,
    config: ConfigFile = None,
) -> None:
    """Delete old request ids, rounds, jobs that have ended, and history; prints how many of each."""
    age_s = options.seconds("--older-than", older_than)
    if age_s > MAX_AGE_S:
        raise InvalidInput("--older-than", f"must be at most {MAX_AGE_S / 86400:,.0f}d")
    deleted = PostgresStore(_open(config)).prune(age_s, keep_rounds)
    for kind, count in deleted.items():
        line(f"{kind}\t{count}")


def url(config: ConfigFile = None) -> None:
    """Print the database's URL, password included; the embedded one answers while something uses it."""
    line(_open(config).url.replace("+psycopg2", "", 1))
