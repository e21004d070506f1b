"""Output: data on stdout in the requested format, everything else on stderr."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import yaml
from google.protobuf.json_format import MessageToDict, MessageToJson
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tessera.formulation.base.secrets import hide_secrets
from tessera.service.cli.options import Output
from tessera.service.cli.terminal import make_cell, make_visible, print_long

_UNBOUNDED: Final = 1_000_000
"""Width in characters of a console that never folds or cuts; wrapping is left to the terminal."""

GIB: Final = 2**30
"""Bytes of a GiB."""

GAP: Final = 2
"""Width in characters of the gap between two columns of a table."""

MIN_COLUMN_WIDTH: Final = 6
"""Width in characters below which a column of a table is not cut to fit a terminal."""

_STYLES: Final = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "READY": "green",
    "committed": "green",
    "STARTING": "cyan",
    "QUEUED": "yellow",
    "HELD": "yellow",
    "DRAINING": "yellow",
    "DRAINED": "cyan",
    "FAILED": "red",
    "REJECTED": "red",
    "FAILING": "red",
    "UNREACHABLE": "red",
    "refused": "red",
}

_RAW_CONTROLS: Final = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters that JSON need not escape. They occur within its strings only."""

err = Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
"""The console for progress, notes and errors."""


class NamedResource(Protocol):
    """A resource."""

    @property
    def name(self) -> str:
        """Return the full resource name."""
        ...


_M = TypeVar("_M")
_N = TypeVar("_N", bound=NamedResource)


# no slots: Python 3.11 cannot make a parametrised generic frozen with slots
@dataclass(frozen=True)
class Column(Generic[_M]):
    """A column of a table. If ``wide``, it is shown only with ``-o wide``."""

    title: str
    value: Callable[[_M], str]
    wide: bool = False
    right: bool = False


Lines: TypeAlias = tuple[Sequence[_M], Sequence[Column[_M]]]
"""The items of a table, one for each line, and its columns."""


def show_list(
    response: Message, items: Sequence[_N], columns: Sequence[Column[_N]], output: Output
) -> None:
    """Print ``response`` as JSON or YAML, or its ``items`` as a table or as names."""
    show_items(response, items, columns, output, lambda item: item.name)


def show_items(
    response: Message,
    items: Sequence[_M],
    columns: Sequence[Column[_M]],
    output: Output,
    name_of: Callable[[_M], str] | None = None,
) -> None:
    """Print ``response`` as JSON or YAML, or its ``items`` as a table or as names.

    Without ``name_of``, the first column has the names.
    """
    if show_message(response, output):
        return
    if output is Output.NAME:
        for item in items:
            print_line((name_of or columns[0].value)(item))
    elif items:
        table = make_table(items, columns, wide=output is Output.WIDE)
        print_long([(console_for(fold=False), table)])


def show_message(message: Message, output: Output) -> bool:
    """Print ``message`` if ``output`` is JSON or YAML, and return whether it was printed."""
    if output is Output.JSON:
        print_line(as_json(message))
    elif output is Output.YAML:
        fields = MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
        if _RAW_CONTROLS.search(text):  # YAML calls some of them printable
            text = yaml.safe_dump(fields, sort_keys=False)
        print_line(text.rstrip("\n"))
    return output in (Output.JSON, Output.YAML)


def as_json(message: Message, indent: int | None = 2) -> str:
    """Return proto JSON with the protos' field names, on one line if ``indent`` is None."""
    text = MessageToJson(
        message,
        indent=indent,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        ensure_ascii=False,
    )
    return _RAW_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def make_table(
    items: Iterable[_M], columns: Sequence[Column[_M]], *, wide: bool, header: bool = True
) -> Table:
    """Return ``items`` as rows."""
    shown = [c for c in columns if wide or not c.wide]
    grid = Table(
        box=None, pad_edge=False, show_header=header, header_style="bold", padding=(0, GAP, 0, 0)
    )
    for column in shown:
        grid.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for item in items:
        cells = [column.value(item) for column in shown]
        grid.add_row(*map(_styled, cells))
    return grid


def fit_rows(
    items: Sequence[_M], columns: Sequence[Column[_M]], width: int, *, wide: bool
) -> Table:
    """Return ``items`` as rows that fit in ``width``. The longest texts are cut; numbers never are."""
    shown = [c for c in columns if wide or not c.wide]
    texts = [[c.title, *(make_cell(c.value(item)) for item in items)] for c in shown]
    widths = [max(map(cell_len, column)) for column in texts]
    free = width - GAP * (len(shown) - 1)
    cuttable = [k for k, column in enumerate(shown) if not column.right]
    # Shorten the widest text column by one character at a time until the row fits.
    while sum(widths) > free:
        longest = max(cuttable, key=lambda k: widths[k], default=-1)
        if longest < 0 or widths[longest] <= MIN_COLUMN_WIDTH:
            break
        widths[longest] -= 1
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for column, most in zip(shown, widths, strict=True):
        grid.add_column(
            column.title,
            justify="right" if column.right else "left",
            width=most,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in zip(*(column[1:] for column in texts), strict=True):
        grid.add_row(*map(_styled, row))
    return grid


def _styled(text: str) -> Text:
    """Return the text of a cell of a table."""
    return Text(make_cell(text), _STYLES.get(text, ""))


def facts_grid(facts: Iterable[tuple[str, str]]) -> Table:
    """Return (name, value) pairs below each other, without pairs that have no value."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, value in facts:
        if value:
            grid.add_row(name, Text(make_visible(value), _STYLES.get(value, "")))
    return grid


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print (name, value) pairs below each other, without pairs that have no value."""
    console_for(fold=True).print(facts_grid(facts))


def show_parts(parts: Iterable[RenderableType]) -> None:
    """Print the parts of a view below each other. On a terminal, texts are folded; tables are not."""

    def is_text(part: RenderableType) -> bool:
        return not isinstance(part, Table) or not part.show_header

    print_long([(console_for(fold=is_text(part)), part) for part in parts])


def show_table(
    items: Sequence[_M], columns: Sequence[Column[_M]], *, header: bool = True, wide: bool = True
) -> None:
    """Print a table that is part of something larger."""
    console_for(fold=False).print(make_table(items, columns, wide=wide, header=header))


def print_line(text: str) -> None:
    """Print a line of data unchanged."""
    console_for(fold=False).out(text, highlight=False)


def print_note(text: str) -> None:
    """Print a message for the user on stderr."""
    err.print(make_visible(hide_secrets(text)))


def print_error(text: str) -> None:
    """Print the error of a failed command on stderr."""
    err.print(f"error: {make_visible(hide_secrets(text))}", style="red")


def console_for(*, fold: bool) -> Console:
    """Return a console on stdout. If ``fold``, it folds at the width of a terminal."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not (fold and console.is_terminal):
        console.width = _UNBOUNDED
    return console


def format_span(seconds: float) -> str:
    """Return a length of time in at most two units, e.g. ``45s``, ``3m20s``, ``2h``, ``5d``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    for unit, name, next_unit, next_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= unit:
            count, rest = divmod(whole, unit)
            rest //= next_unit
            return f"{count}{name}{rest}{next_name}" if rest and count < 10 else f"{count}{name}"
    raise AssertionError("unreachable")


def format_age(then: Timestamp, now: Timestamp) -> str:
    """Return how long ago ``then`` was, or "" if it is not set."""
    if then.ToNanoseconds() == 0:
        return ""
    return format_span((now.ToNanoseconds() - then.ToNanoseconds()) / 1e9)


def format_time(then: Timestamp) -> str:
    """Return a time to the second in UTC, or "" if it is not set."""
    if then.ToNanoseconds() == 0:
        return ""
    return Timestamp(seconds=then.seconds).ToJsonString()


def format_number(value: float) -> str:
    """Return a number to four significant digits, or "?" if it is not finite.

    An exponent is avoided where possible.
    """
    if not isfinite(value):
        return "?"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def count_noun(count: int, what: str) -> str:
    """Return a count with its noun, e.g. ``1 job``, ``1,200 jobs``."""
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def format_percent(part: float, whole: float) -> str:
    """Return a share in percent with one decimal, rounded down so that 100.0 means done."""
    if whole <= 0:
        return ""
    return f"{int(min(max(part / whole, 0.0), 1.0) * 1000) / 10:.1f}"


def format_indices(values: Sequence[int]) -> str:
    """Return ascending indices as ranges, e.g. ``0-3,6``."""
    return ",".join(_ranges(values))


def _ranges(values: Sequence[int]) -> Iterator[str]:
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            first, last = values[start], values[i - 1]
            yield str(first) if first == last else f"{first}-{last}"
            start = i
