"""A CSV reader that reports where each mistake is and what is allowed there."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tessera.formulation.base.errors import InvalidInput

MAX_ERRORS = 20
"""Number of mistakes after which reading stops. All mistakes are reported together."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
NAME_RULE = "must be 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
GPU_TYPE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
GPU_TYPE_RULE = NAME_RULE.replace("100 letters", "63 lower-case letters")


@dataclass(slots=True)
class Mistakes:
    """The mistakes in a file, each with its line and column."""

    file: str
    messages: list[str] = field(default_factory=list)

    def add(self, line: int, column: str, allowed: str) -> None:
        """Record a mistake. After ``MAX_ERRORS`` mistakes, raise InvalidInput with all of them."""
        place = f"{self.file} line {line}" + (f", column {column}" if column else "")
        self.messages.append(f"{place}: {allowed}")
        if len(self.messages) >= MAX_ERRORS:
            self.messages.append(f"{self.file}: reading stopped after {MAX_ERRORS} mistakes")
            self.check()

    def check(self) -> None:
        """Raise InvalidInput with every mistake, one on each line, if there are any."""
        if self.messages:
            raise InvalidInput("", "\n".join(self.messages))


@dataclass(slots=True)
class CsvRow:
    """A row of the file.

    If a field is wrong, its methods record the mistake and return a substitute. ``ok`` is then
    false.
    """

    line: int
    fields: dict[str, str]
    mistakes: Mistakes
    ok: bool = True

    def wrong(self, column: str, allowed: str) -> None:
        """Record a mistake in this row."""
        self.ok = False
        self.mistakes.add(self.line, column, allowed)

    def get(self, column: str) -> str:
        """Return a field without blanks at its ends. If the column is absent, return ""."""
        return self.fields.get(column, "").strip()

    def name(self, column: str, *, optional: bool = False) -> str:
        """Return a name."""
        return self._matching(column, NAME, NAME_RULE, optional)

    def gpu_type(self, column: str, *, optional: bool = False) -> str:
        """Return the name of a GPU type."""
        return self._matching(column, GPU_TYPE, GPU_TYPE_RULE, optional)

    def _matching(self, column: str, form: re.Pattern[str], rule: str, optional: bool) -> str:
        value = self.get(column)
        if not (form.fullmatch(value) or (optional and not value)):
            self.wrong(column, rule + (", or empty" if optional else ""))
        return value

    def text(self, column: str, longest: int) -> str:
        """Return printable text."""
        value = self.get(column)
        if len(value) > longest or not value.isprintable():
            self.wrong(column, f"must be at most {longest} printable characters")
        return value

    def whole(self, column: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number in [low, high], or ``default`` if the field is empty."""
        value = self.get(column)
        if not value and default is not None:
            return default
        number = int(value) if _WHOLE.fullmatch(value) else None
        if number is None or not low <= number <= high:
            self.wrong(column, f"must be a whole number from {low} to {high}")
            return low
        return number

    def decimal(self, column: str, low: float, high: float, *, above: bool = False) -> float:
        """Return a number in [low, high], or in (low, high] with ``above``."""
        value = self.get(column)
        number = float(value) if _DECIMAL.fullmatch(value) else None
        if number is None or not low <= number <= high or (above and number == low):
            start = f"above {low:g}, at most" if above else f"from {low:g} to"
            self.wrong(column, f"must be a number {start} {high:g}")
            return high
        return number

    def choice(self, column: str, allowed: Sequence[str], default: str = "") -> str:
        """Return one of ``allowed``, or ``default`` if the field is empty."""
        value = self.get(column) or default
        if value not in allowed:
            self.wrong(column, f"must be one of {', '.join(allowed)}")
            return allowed[0]
        return value


def header_of(text: str) -> tuple[str, ...]:
    """Return the column names of the first line that is not empty, or none without such a line."""
    first = next((line for line in text.splitlines() if line), "")
    return tuple(cell.strip() for cell in next(csv.reader([first]), []))


def parse_rows(
    text: str, mistakes: Mistakes, required: Sequence[str], optional: Sequence[str]
) -> Iterator[CsvRow]:
    """Yield the rows below a header line with all ``required`` and any ``optional`` columns.

    Empty lines are skipped. A row whose number of fields differs from the header's is recorded as a
    mistake and skipped.

    Raises:
        InvalidInput: the header is wrong, or the quoting is broken.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            start, line = line, reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = _header(cells, start, mistakes, required, optional)
            elif len(cells) != len(header):
                allowed = f"must have {len(header)} fields, like the header, not {len(cells)}"
                mistakes.add(start, "", allowed)
            else:
                yield CsvRow(start, dict(zip(header, cells, strict=True)), mistakes)
    except csv.Error as error:
        mistakes.add(line, "", f"must be valid CSV ({error})")
        mistakes.check()
    if header is None:
        mistakes.add(1, "", f"must name the columns: {', '.join(required)}")
        mistakes.check()


def _header(
    cells: list[str],
    line: int,
    mistakes: Mistakes,
    required: Sequence[str],
    optional: Sequence[str],
) -> list[str]:
    header = [cell.strip() for cell in cells]
    for column in required:
        if column not in header:
            mistakes.add(line, column, "is missing from the header")
    for i, column in enumerate(header):
        if column in header[:i]:
            mistakes.add(line, column[:100], "must occur only once in the header")
        elif column not in required and column not in optional:
            mistakes.add(line, repr(column[:100]), "is not a known column")
    if mistakes.messages:
        mistakes.messages.append(
            f"{mistakes.file}: the header must name {','.join(required)}"
            + (f" and may name {','.join(optional)}" if optional else "")
        )
    mistakes.check()
    return header
