"""The command ``tessera``: its subcommands, some of them loaded on demand, and its exit codes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tessera.formulation.base.errors import InvalidInput, NotFound, TesseraError, Unavailable
from tessera.formulation.base.release import install_hint, installed_version
from tessera.formulation.base.secrets import HIDDEN, hide_secrets
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.render import print_error, print_line

PLUGIN_GROUP: Final = "tessera.commands"
"""The group of entry points. Each entry point is a function that adds its command to a Typer."""

EPILOG: Final = (
    "Data is written to stdout, progress and messages to stderr. Exit codes: 0 success; 1 the request was"
    " refused; 2 wrong usage or file; 3 no server (or database) answers; 4 not found; with --watch: 5 the job"
    " failed, 6 it was cancelled, 7 it was rejected; 130 interrupted."
)


@dataclass(frozen=True, slots=True)
class DeferredCommand:
    """A command whose module is imported only when it is called, so that ``--help`` stays fast."""

    target: str  # module:function
    help: str = ""  # "" for a plugin, whose help is read from its module when shown
    panel: str = "Servers"
    extra: str = "server"  # extra to install if a library is missing; "" if unknown


CLIENT_MODULES: Final = {
    "tessera.service.cli.jobs.jobs": ("submit", "jobs", "job"),
    "tessera.service.cli.jobs.queue": ("queue", "top"),
    "tessera.service.cli.jobs.explain": ("explain",),
    "tessera.service.cli.rounds.whatif": ("whatif",),
    "tessera.service.cli.estimates.curves": ("curve",),
    "tessera.service.cli.jobs.logs": ("logs",),
    "tessera.service.cli.jobs.jobchanges": ("update", "cancel", "hold", "release"),
    "tessera.service.cli.rounds.rounds": ("round", "rounds", "replay"),
    "tessera.service.cli.rounds.policies": ("policy",),
    "tessera.service.cli.clusters.networks": ("network",),
    "tessera.service.cli.clusters.clusters": ("cluster",),
    "tessera.service.cli.clusters.nodes": ("nodes",),
    "tessera.service.cli.clusters.drains": ("drain", "undrain"),
    "tessera.service.cli.clusters.tenants": ("tenants",),
    "tessera.service.cli.clusters.usage": ("usage",),
    "tessera.service.cli.clusters.webhooks": ("webhooks",),
    "tessera.service.cli.clusters.reservations": ("reserve",),
    "tessera.service.cli.estimates.cells": ("cells",),
    "tessera.service.cli.estimates.models": ("models",),
    "tessera.service.cli.access.access": ("token", "join-token", "certificate", "audit"),
    "tessera.service.cli.servers.doctor": ("doctor",),
    "tessera.service.cli.servers.configprint": ("config",),
}
"""The modules of the client's commands, with the names of the commands that each of them adds.

A call imports one of them. The help imports all, because they are light."""

_CLIENT: Final = {
    name: DeferredCommand(f"{module}:add_commands", extra="client")
    for module, names in CLIENT_MODULES.items()
    for name in names
}

_BUILT_IN: Final = {
    "login": DeferredCommand(
        "tessera.service.cli.access.login:add_commands",
        "Log in to a server, with a code that you confirm in a browser on any device.",
        "Access",
        "client",
    ),
    "logout": DeferredCommand(
        "tessera.service.cli.access.login:add_commands",
        "Forget the login at a server.",
        "Access",
        "client",
    ),
    "whoami": DeferredCommand(
        "tessera.service.cli.access.login:add_commands",
        "Show who you are to a server: your name, role, tenants and clusters.",
        "Access",
        "client",
    ),
    "import": DeferredCommand(
        "tessera.service.cli.simulation.importing:add_commands",
        "Import estimates of workloads, or the jobs of a trace.",
        "Clusters",
        "estimates",
    ),
    "topology": DeferredCommand(
        "tessera.service.cli.clusters.topology:add_commands",
        "Show, describe or delete the network of a cluster.",
        "Clusters",
        "estimates",
    ),
    "estimate": DeferredCommand(
        "tessera.service.cli.estimates.estimate:add_commands",
        "Estimate how fast a model trains on GPUs, with or without a server.",
        "Estimates",
        "estimates",
    ),
    "profile": DeferredCommand(
        "tessera.service.cli.estimates.profile:add_commands",
        "Measure a model's layers, or collectives, on this machine.",
        "Estimates",
        "estimator",
    ),
    "solve": DeferredCommand(
        "tessera.service.cli.rounds.solve:add_commands",
        "Solve a saved snapshot on this machine, without a server.",
        "Rounds",
    ),
    "demo": DeferredCommand(
        "tessera.service.cli.demo.command:add_commands",
        "Schedule a simulated 1,280-GPU cluster for a few rounds, with real server processes.",
        "Simulation",
    ),
    "simulate": DeferredCommand(
        "tessera.service.cli.simulation.command:add_commands",
        "Simulate a trace of jobs under one or more policies and compare them. Needs no server.",
        "Simulation",
    ),
    "up": DeferredCommand(
        "tessera.service.cli.servers.up.command:add_commands",
        "Start a database, a server and agents on this machine.",
    ),
    "serve": DeferredCommand("tessera.service.cli.servers.serve:add_commands", "Run a server."),
    "agent": DeferredCommand(
        "tessera.service.cli.servers.serve:add_commands", "Run an agent on a GPU node."
    ),
    "ca": DeferredCommand(
        "tessera.service.cli.access.authority:add_commands",
        "Make and replace the certificates of a server and its authority.",
        extra="secure",
    ),
    "migrate": DeferredCommand(
        "tessera.service.cli.servers.database:add_commands",
        "Upgrade the database schema to this release.",
    ),
    "prune": DeferredCommand(
        "tessera.service.cli.servers.database:add_commands",
        "Delete old request ids, rounds, ended jobs and history from the database.",
    ),
    "db": DeferredCommand(
        "tessera.service.cli.servers.database:add_commands",
        "Show the database's address, or create the first administrator's token in it.",
    ),
}

_UsageError: Final[Any] = typer.BadParameter.__bases__[0]
"""The class of errors about the command line, which Typer does not export."""

_LONG_WORD: Final = re.compile(r"(?<![\w./-])[A-Za-z0-9_+/=][A-Za-z0-9_+/=-]{23,}(?![\w./-])")
"""A word without dots that is longer than names of options and most names of resources."""

OWN_PLUGIN_PREFIX: Final = "tessera.benchmarks."
"""The package of `bench`, which is one of our own commands but must not be imported by the service."""

OWN_PACKAGES: Final = frozenset({"tessera", "tests"})
"""Our own packages. They are not libraries that a user could install."""


class CommandGroup(TyperGroup):
    """The root command. It is also the outermost guard, which turns errors into exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, those of the client first."""
        self._load_client()
        return [
            *super().list_commands(ctx),
            *(n for n in deferred_commands() if n not in self.commands),
        ]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the root command."""
        parameters = super().get_params(ctx)
        _name_values(parameters)
        return parameters

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or a stub with its ``--help`` text if it is not loaded yet."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (entry := deferred_commands().get(cmd_name)) is not None:
            line_of_help = entry.help or _plugin_help(cmd_name, entry.target.partition(":")[0])
            return TyperCommand(cmd_name, help=line_of_help, rich_help_panel=entry.panel)
        if command is not None:
            _prepare_help(command, ctx)
        return command

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Return the context of a command line."""
        try:
            return super().make_context(*arguments, **settings)
        except _UsageError as error:
            raise _without_secrets(error) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` name, and load it if needed."""
        name = args[0]
        if name not in self.commands:
            entry = _CLIENT.get(name) or deferred_commands().get(name)
            if entry is not None:
                self._load(name, entry)
            else:
                self._load_client()  # so that the error can suggest a command with a similar name
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the called command."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            raise _without_secrets(error) from None
        except TesseraError as error:
            print_error(str(error))
            raise typer.Exit(exit_code(error)) from error
        except UnicodeEncodeError as error:  # the value may be a secret, so it is not repeated
            print_error(
                "a value of the command line is not text in UTF-8; retype it, or use a UTF-8 locale"
            )
            raise typer.Exit(Exit.USAGE) from error
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None

    def _load_client(self) -> None:
        """Register the client's commands, in the order in which the help shows them."""
        for name, entry in _CLIENT.items():
            if name not in self.commands:
                self._load(name, entry)

    def _load(self, name: str, entry: DeferredCommand) -> None:
        """Import a command's module and register the commands that it adds."""
        module, _, function = entry.target.partition(":")
        app = typer.Typer()
        try:
            add: Callable[[typer.Typer], None] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, SyntaxError) as error:
            if entry.extra and (missing := _missing_library(error)):
                raise CallFailed(
                    f"`tessera {name}` needs {missing}; install it with: {install_hint(entry.extra)}",
                    Exit.REFUSED,
                ) from error
            raise CallFailed(
                f"the command {name!r} cannot be loaded from {entry.target}: {error}", Exit.REFUSED
            ) from error
        add(app)
        for added, command in typer.main.get_group(app).commands.items():
            self.commands.setdefault(added, command)


def _without_secrets(error: Any) -> Any:
    """Return an error about the command line that repeats no secret in it."""
    text = error.format_message()
    shown = _LONG_WORD.sub(lambda m: HIDDEN if _is_random(m[0]) else m[0], hide_secrets(text))
    if shown == text:
        return error
    return _UsageError(
        f"{shown} (Other users of this machine can read arguments: consider this secret known, and have it"
        " revoked. Give tokens to `tessera login --token` on stdin, or in TESSERA_TOKEN.)",
        ctx=error.ctx,
    )


def _is_random(word: str) -> bool:
    """Return whether a word may be a secret of a form that we do not know."""
    return any(c.isdigit() for c in word) and any(c.isalpha() for c in word)


def deferred_commands() -> dict[str, DeferredCommand]:
    """Return the commands that are loaded on demand: our own, then those of plugins."""
    commands = dict(_BUILT_IN)
    for point in entry_points(group=PLUGIN_GROUP):
        is_ours = point.value.startswith(OWN_PLUGIN_PREFIX)
        panel, extra = ("Simulation", "server") if is_ours else ("Plugins", "")
        commands.setdefault(point.name, DeferredCommand(point.value, panel=panel, extra=extra))
    return commands


def _prepare_help(command: Any, ctx: Any) -> None:
    """Prepare the help of a command and its subcommands for terminals of any width, and for people."""
    if command.help:
        command.help = unwrap_paragraphs(command.help)
    _name_values(command.get_params(ctx))
    for subcommand in getattr(command, "commands", {}).values():
        _prepare_help(subcommand, ctx)


def _name_values(parameters: list[Any]) -> None:
    """Let the help show `N`, `TEXT`, or nothing for a flag, instead of Python's types."""
    for parameter in parameters:
        if parameter.metavar is None and parameter.param_type_name == "option":
            if parameter.is_flag or parameter.count:
                parameter.metavar = ""
            elif parameter.type_descriptor.annotation in (int, float):
                parameter.metavar = "N"
            elif parameter.type_descriptor.annotation in (str, list[str]):
                parameter.metavar = "TEXT"


def unwrap_paragraphs(text: str) -> str:
    """Join the lines of each paragraph of a docstring, so that the terminal can wrap them.

    Bullets and lines that are indented by four spaces or more stay on lines of their own. Double
    backticks become single ones.
    """
    lines: list[str] = []
    for row in inspect.cleandoc(text).split("\n"):
        is_separate = not row or row.startswith(("    ", "* "))
        if is_separate or not lines or not lines[-1]:
            lines.append(row)
        else:
            lines[-1] += f" {row.strip()}"
    return "\n".join(lines).replace("``", "`")


def _missing_library(error: Exception) -> str:
    """Return the library that an import did not find, or "" for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    library = error.name.partition(".")[0]
    return "" if library in OWN_PACKAGES else library


def _plugin_help(name: str, module: str) -> str:
    """Return the first line of a module's docstring, without importing the module.

    The prefix "``tessera NAME``: " is removed.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None:
        return f"Cannot be loaded: no module named {module}."
    try:
        text = ast.get_docstring(ast.parse(Path(spec.origin or "").read_bytes()))
    except (OSError, SyntaxError, ValueError):  # compiled or broken; a call will report the error
        text = None
    summary = (text or f"From {module}.").partition("\n")[0].removeprefix(f"``tessera {name}``: ")
    return summary[:1].upper() + summary[1:]


def exit_code(error: TesseraError) -> Exit:
    """Return the exit code for ``error``."""
    match error:
        case CallFailed():
            return error.exit_code
        case InvalidInput():
            return Exit.USAGE
        case NotFound():
            return Exit.NOT_FOUND
        case Unavailable():
            return Exit.UNREACHABLE
    return Exit.REFUSED


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_line(f"tessera {installed_version()}")
        raise typer.Exit


@app.callback()
def root_command(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Schedule the training of large models on clusters with different types of GPUs."""


def main() -> None:
    """Run the command line and end the process."""
    app(prog_name="tessera")


if __name__ == "__main__":
    main()
