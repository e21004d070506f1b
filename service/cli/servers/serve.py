"""``tessera serve`` and ``tessera agent``, the two long-running programs."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.db.schema.migrate import upgrade_schema
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.logs import make_handler
from tessera.service.agent import main as agent_program
from tessera.service.cli import options
from tessera.service.cli.render import print_note
from tessera.service.cli.servers.serveoptions import serving_options
from tessera.service.server import wiring
from tessera.service.server.settings.database import open_database
from tessera.service.server.settings.sources import load_config
from tessera.service.server.tasks.file_limit import raise_file_limit

SWITCH_S = 0.001
"""Seconds that a thread keeps the interpreter while others wait for it.

With Python's default of 5 ms, each statement of a transaction waits for each of the computing threads.
Under attack from all sides, the longest round of another caller took 1.2 to 2.2 s with 5 ms in four
runs. It took 0.8 to 1.2 s with this value, and also with 0.25 ms, which costs a tenth of the calls.
"""

COLLECTION_THRESHOLDS = (10_000, 20, 100)
"""Thresholds of Python's cycle collector.

With Python's defaults, it repeatedly scans all objects that a large document or batch has made. This
takes up to 0.2 s each time, and blocks all threads. ``memory`` collects the rest.
"""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def add_commands(app: typer.Typer) -> None:
    """Add ``run_server`` and ``run_agent``."""
    serve = options.with_options(run_server, "given", serving_options)
    app.command("serve", rich_help_panel="Servers")(serve)
    app.command(
        "agent",
        rich_help_panel="Servers",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )(run_agent)


def run_server(
    *,
    given: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="File with settings (TOML).")
    ] = None,
    migrate: Annotated[
        bool | None,
        typer.Option(
            "--migrate/--no-migrate",
            help="Whether to upgrade the database schema to this release before serving. Default:"
            " only for the"
            " embedded database.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings, without secrets, and exit.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(help=f"Level of log messages: {', '.join(LOG_LEVELS)}.")
    ] = "INFO",
) -> None:
    """Run a server until Ctrl-C or SIGTERM. Several servers may share one database.

    Options take precedence over TESSERA_* environment variables, and these over the settings file.
    """
    settings = replace(
        load_config(config, os.environ),
        **given,
    )
    if print_config:
        typer.echo(str(settings), nl=False)
        return
    if log_level not in LOG_LEVELS:
        raise InvalidInput(
            "--log-level", f"unknown level {log_level!r}; must be one of {', '.join(LOG_LEVELS)}"
        )
    _set_up_logging(log_level, settings.log_format)
    if migrate if migrate is not None else not settings.database_url:
        database = open_database(settings)
        upgrade_schema(database)
        database.engine.dispose()
    host = settings.listen.rpartition(":")[0]
    sys.setswitchinterval(SWITCH_S)
    raise_file_limit()

    def serving(port: int) -> None:
        # Loaded objects live until the end, so the collector need not scan them again, which takes
        # 0.1 s each time.
        gc.freeze()
        gc.set_threshold(*COLLECTION_THRESHOLDS)
        print_note(f"serving on {host}:{port}")

    asyncio.run(wiring.serve_until_signal(settings, serving))


def run_agent(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of `tessera-agent`.")
    ] = None,
) -> None:
    """Run an agent on a GPU node, like the command `tessera-agent`, which needs fewer packages."""
    raise typer.Exit(agent_program.main(arguments or []))


def _set_up_logging(level: str, form: str) -> None:
    logging.basicConfig(level=level, handlers=[make_handler(form)])
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs each look at the schema
