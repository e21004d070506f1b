"""The parts that all deletions share: the confirmation and the output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from google.protobuf.empty_pb2 import Empty

from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.options import Output
from tessera.service.cli.render import err, print_line, show_message

Yes = Annotated[
    bool,
    typer.Option(
        "--yes",
        "-y",
        help="Do not ask for confirmation. Without a terminal, the command never asks.",
    ),
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Succeed even if it does not exist.")
]


def confirm_deletion(question: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal, unless ``yes``. Raises CallFailed if the answer is no."""
    if yes or not sys.stdin.isatty():
        return
    err.print(f"{question} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CallFailed("nothing was deleted", Exit.REFUSED)


def show_deleted(names: Sequence[str], output: Output) -> None:
    """Print the names of deleted resources, or the empty answer as JSON or YAML."""
    if output is Output.NAME:
        for name in names:
            print_line(name)
    else:
        show_message(Empty(), output)


def outcome_of(what: str, *, validate_only: bool) -> str:
    """Return a message on the outcome for ``what``, such as ``2 nodes``."""
    return f"{what}: valid, nothing changed" if validate_only else f"{what} deleted"
