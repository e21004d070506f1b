"""``tessera config print``: every effective setting, its value, and where it came from."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tessera.client import ChannelRefused, find_settings
from tessera.formulation.base.secrets import HIDDEN, hide_secrets
from tessera.service.cli import options
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.options import DEFAULT_CLUSTER, DEFAULT_SERVER
from tessera.service.cli.render import Column, print_line, print_note, show_table
from tessera.service.cli.servers.serveoptions import serving_options

SERVER_LIBRARIES: Final = ("sqlalchemy", "numba", "ortools")
"""Libraries without which this machine runs no server, so that it has no settings of one."""


class Origin(StrEnum):
    """The origin of a setting. A later one takes precedence over an earlier one."""

    DEFAULT = "default"
    FILE = "file"
    LOGIN = "login"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSetting:
    """A setting with its value, without secrets, and its origin.

    ``part`` is the part of Tessera that reads it: ``client`` or ``server``.
    """

    part: str
    setting: str
    value: str
    origin: Origin


COLUMNS: Final[Sequence[Column[EffectiveSetting]]] = (
    Column("PART", lambda s: s.part),
    Column("SETTING", lambda s: s.setting),
    Column("VALUE", lambda s: s.value),
    Column("FROM", lambda s: str(s.origin)),
)


def add_commands(app: typer.Typer) -> None:
    """Add ``config``."""
    group = typer.Typer(help="Show the settings in effect.", no_args_is_help=True)
    group.command("print")(options.with_options(print_settings, "given", serving_options))
    app.add_typer(group, name="config", rich_help_panel="Servers")


def print_settings(
    *,
    context: typer.Context,
    given: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="File with settings (TOML).")
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Leave out settings that have their default.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    server: options.Server = DEFAULT_SERVER,
    cluster: options.Cluster = DEFAULT_CLUSTER,
) -> None:
    """Print each setting of the client and of a server here: its value and where it came from.

    The options are those of `tessera serve`. Secrets are hidden.
    """
    settings = client_settings(
        (server, _source(context, "server")), (cluster, _source(context, "cluster")), os.environ
    )
    if missing := [name for name in SERVER_LIBRARIES if find_spec(name) is None]:
        print_note(f"no server runs here without {missing[0]}, so its settings are left out")
    else:
        flags = {name: value for name, value in given.items() if not _is_variable(context, name)}
        settings += server_settings(config, flags, os.environ)
    if changed:
        settings = [s for s in settings if s.origin is not Origin.DEFAULT]
    if json:
        print_line(json_format.dumps([asdict(s) for s in settings], indent=2))
    else:
        show_table(settings, COLUMNS)


def _source(context: typer.Context, name: str) -> Origin:
    """Return the origin of an option's value."""
    source = context.get_parameter_source(name)
    names = {"COMMANDLINE": Origin.FLAG, "ENVIRONMENT": Origin.ENVIRONMENT}
    return names.get(source.name if source is not None else "", Origin.DEFAULT)


def _is_variable(context: typer.Context, name: str) -> bool:
    """Return whether an option has the value of its environment variable."""
    return _source(context, name) is Origin.ENVIRONMENT


def client_settings(
    server: tuple[str, Origin], cluster: tuple[str, Origin], environment: Mapping[str, str]
) -> list[EffectiveSetting]:
    """Return the settings by which the command line reaches a server.

    The address and the cluster are given with their origins.

    Raises:
        CallFailed: they contradict each other, or a file cannot be used.
    """
    try:
        channel = find_settings(server[0], environment)
    except ChannelRefused as error:
        raise CallFailed(str(error), Exit.REFUSED) from error
    values = (
        ("TESSERA_CA", channel.authorities),
        ("TESSERA_CERTIFICATE", str(channel.certificate or "")),
        ("TESSERA_KEY", str(channel.key or "")),
        ("TESSERA_SERVER_NAME", channel.server_name),
        ("TESSERA_TOKEN", HIDDEN if channel.token else ""),
    )

    def origin(name: str, value: str) -> Origin:
        if environment.get(name) or environment.get(f"{name}_FILE"):
            return Origin.ENVIRONMENT
        return Origin.LOGIN if value else Origin.DEFAULT  # only logins have others

    return [
        EffectiveSetting(
            part="client", setting=name, value=hide_secrets(value), origin=origin_of_value
        )
        for name, value, origin_of_value in (
            ("TESSERA_SERVER", *server),
            ("TESSERA_CLUSTER", *cluster),
            *((name, value, origin(name, value)) for name, value in values),
        )
    ]


def server_settings(
    file: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> list[EffectiveSetting]:
    """Return the settings with which ``tessera serve`` would start. Raises InvalidInput."""
    from tessera.service.server.settings.config import Config  # noqa: PLC0415 - a client has no libraries of the server
    from tessera.service.server.settings.sources import (  # noqa: PLC0415 - a client has no libraries of the server
        load_config,
        read_setting_file,
        read_setting_variables,
    )

    settings = replace(load_config(file, environment), **flags)
    origins = dict.fromkeys((f.name for f in fields(Config)), Origin.DEFAULT)
    if file is not None:
        origins |= dict.fromkeys(read_setting_file(file), Origin.FILE)
    origins |= dict.fromkeys(read_setting_variables(environment), Origin.ENVIRONMENT)
    origins |= dict.fromkeys(flags, Origin.FLAG)
    return [
        EffectiveSetting(
            part="server",
            setting=name,
            value=hide_secrets(str(settings.shown(name))),
            origin=origin,
        )
        for name, origin in origins.items()
    ]
