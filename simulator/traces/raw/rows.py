"""Rows of raw files, read one by one, with the line of each mistake."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.traces.csvfile import CsvRow, Mistakes
from tessera.simulator.traces.screening import NAMES_SHOWN

MAX_LINE: Final = 2**20
"""Characters of one line. No row of a known raw trace has more than some thousands."""

NO_GPUS: Final = "no GPUs"
NO_START: Final = "no recorded start of its run"
NO_END: Final = "no recorded end: still running, or the log was cut"
NO_DURATION: Final = "a duration of 0 or less"
OF_ITS_JOB: Final = "; the rest of its job is kept"
"""The end of the reason why a part of a job is dropped."""


@dataclass(slots=True)
class DroppedRows:
    """The rows that are not among the jobs: their number by reason, with the first names of each."""

    counts: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """Count a row that is dropped."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        names = self.names.setdefault(reason, [])
        if len(names) < NAMES_SHOWN:
            names.append(name)

    @property
    def total(self) -> int:
        """Return the number of dropped rows."""
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """Return a line for each reason, most frequent first."""
        ranked = sorted(self.counts.items(), key=lambda item: -item[1])
        return [
            f"dropped {count:,} {'row' if count == 1 else 'rows'} ({reason}):"
            f" {', '.join(self.names[reason])}" + (", ..." if count > NAMES_SHOWN else "")
            for reason, count in ranked
        ]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, from 1.

    Raises:
        InvalidInput: a line is not UTF-8 text, has a NUL, or is too long.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            if len(raw) > MAX_LINE:
                raise InvalidInput(
                    "", f"{path.name} line {number}: is longer than {MAX_LINE:,} bytes"
                )
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise InvalidInput("", f"{path.name} line {number}: must be UTF-8 text") from None
            if "\0" in text:
                raise InvalidInput("", f"{path.name} line {number}: must be text without NULs")
            yield number, text


def csv_rows(
    path: Path, mistakes: Mistakes, needed: Sequence[str], absent_header: Sequence[str] = ()
) -> Iterator[CsvRow]:
    """Yield the rows of a CSV file, whose header has the ``needed`` columns and may have others.

    If ``absent_header`` is given, a first line that does not begin with its first column is a row,
    and ``absent_header`` names the columns.

    Raises:
        InvalidInput: the header lacks columns, the quoting is broken, or 20 rows are wrong.
        OSError: the file cannot be read.
    """
    reader = csv.reader((text for _, text in numbered_lines(path)), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                first = [cell.strip() for cell in cells]
                is_row = absent_header and first[0] != absent_header[0]
                header = list(absent_header) if is_row else first
                require_columns(header, reader.line_num, mistakes, needed)
                if not is_row:
                    continue
            if row := _row(header, cells, reader.line_num, mistakes):
                yield row
    except csv.Error as error:
        mistakes.add(reader.line_num, "", f"must be valid CSV ({error})")
        mistakes.check()
    if header is None:
        mistakes.add(1, "", f"must name the columns: {', '.join(needed)}")
    mistakes.check()


def separated_rows(
    path: Path,
    mistakes: Mistakes,
    needed: Sequence[str],
    separator: str,
    absent_header: Callable[[Sequence[str]], Sequence[str] | None],
) -> Iterator[CsvRow]:
    """Yield the rows of a file without quoting, whose fields ``separator`` divides.

    ``absent_header`` returns the columns if the first line is a row, and None if it is the header.
    Otherwise this works like ``csv_rows``.
    """
    header: list[str] | None = None
    for number, text in numbered_lines(path):
        line = text.rstrip("\r\n")
        if not line:
            continue
        cells = line.split(separator)
        if header is None:
            columns = absent_header(cells)
            header = [cell.strip() for cell in columns or cells]
            require_columns(header, number, mistakes, needed)
            if columns is None:
                continue
        if row := _row(header, cells, number, mistakes):
            yield row
    if header is None:
        mistakes.add(1, "", f"must name the columns: {', '.join(needed)}")
    mistakes.check()


def require_columns(
    header: Sequence[str], line: int, mistakes: Mistakes, needed: Sequence[str]
) -> None:
    """Refuse a header that lacks a column that is needed, or repeats one. Raises InvalidInput."""
    for column in needed:
        if header.count(column) != 1:
            problem = "is missing from the header" if column not in header else "occurs twice"
            mistakes.add(line, column, problem)
    mistakes.check()


def _row(
    header: Sequence[str], cells: Sequence[str], line: int, mistakes: Mistakes
) -> CsvRow | None:
    if len(cells) != len(header):
        mistakes.add(line, "", f"must have {len(header)} fields, like the header, not {len(cells)}")
        return None
    return CsvRow(line, dict(zip(header, cells, strict=True)), mistakes)
