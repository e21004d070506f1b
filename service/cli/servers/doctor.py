"""``tessera doctor``: what is wrong here and at the server, and what to do about it."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.names import cluster_name
from tessera.service.cli.options import DEFAULT_CLUSTER, DEFAULT_SERVER, Cluster, Server
from tessera.service.cli.render import Column, count_noun, print_line, show_table
from tessera.service.cli.servers.doctoring.checks import Check, CheckResult
from tessera.service.cli.servers.doctoring.machine import check_machine
from tessera.service.cli.servers.doctoring.reach import check_server

COLUMNS: Final[Sequence[Column[Check]]] = (
    Column("CHECK", lambda c: c.name),
    Column("RESULT", lambda c: str(c.result)),
    Column("FOUND", lambda c: c.found),
    Column("WHAT TO DO", lambda c: c.advice),
)


def add_commands(app: typer.Typer) -> None:
    """Add ``doctor``."""
    app.command("doctor", rich_help_panel="Servers")(examine)


def examine(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="File with the server's settings (TOML)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Check this machine, the way to the server, the server and its agents.

    Each line is ok, warn or fail, and says what to do. If a check fails, the exit code is 1.
    """
    checks = [*check_server(server, cluster_name(cluster)), *check_machine(config, server)]
    failed = [check for check in checks if check.result is CheckResult.FAIL]
    if json:
        print_line(json_format.dumps([asdict(check) for check in checks], indent=2))
    else:
        show_table(checks, COLUMNS)
    if failed:
        raise CallFailed(
            f"{count_noun(len(failed), 'check')} failed: {', '.join(c.name for c in failed)}",
            Exit.REFUSED,
        )
