"""The values of options of a round, whose absence means that they were not given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import typer
from google.protobuf import duration_pb2

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import options

Text: TypeAlias = str | None
Flag: TypeAlias = bool | None
Whole: TypeAlias = int | None
Real: TypeAlias = float | None


def panel_option(panel: str, text: str, *names: str, **rest: Any) -> Any:
    """Return an option of a panel of the help, whose text names its default."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **rest)


def check_option(option: str, read: Callable[[], object]) -> None:
    """Read the value of an option; raise InvalidInput with the option's name."""
    try:
        read()
    except InvalidInput as wrong:
        raise InvalidInput(option, wrong.problem) from wrong


def read_duration(duration: duration_pb2.Duration, option: str, text: str | None) -> None:
    """Set ``duration`` from ``text``, if given."""
    if text:
        duration.CopyFrom(options.to_duration(options.parse_seconds(option, text)))
