"""The options of ``tessera serve`` that are settings of the server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tessera.service.cli import options


def serving_options(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address on which the server listens. Default: 127.0.0.1:7070.",
        ),
    ] = "",
    tls: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Directory of certificates made by `tessera ca init`. The server then takes only TLS"
            " connections of callers with a token or a certificate.",
        ),
    ] = "",
    socket: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Unix socket on which the server listens, too. Callers there need no token.",
        ),
    ] = "",
    insecure: options.Insecure = False,
    database_url: Annotated[
        str,
        typer.Option(
            help="URL of a PostgreSQL database, postgresql://... Default: the embedded PostgreSQL."
        ),
    ] = "",
    period: Annotated[
        str, typer.Option(help="Time between two rounds. 0: rounds only on request. Default: 300s.")
    ] = "",
    policy: options.Policy = "",
    log_format: Annotated[
        str,
        typer.Option(help="Form of log records, each with its facts: text or json. Default: text."),
    ] = "",
) -> dict[str, Any]:
    """Return the settings that the options give, by their names."""
    given: dict[str, Any] = {
        "insecure": insecure or "",
        "tls_directory": tls,
        "socket": socket,
        "listen": listen,
        "database_url": database_url,
        "period_s": options.parse_seconds("--period", period) if period else "",
        "policy": policy,
        "log_format": log_format,
    }
    return {name: value for name, value in given.items() if value != ""}
