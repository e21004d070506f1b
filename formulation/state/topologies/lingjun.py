"""The Lingjun 2023 file: a row for each host with its groups of switches.

The columns are ``host_id,dsw,psw,asw``.
"""

from __future__ import annotations

import csv
from typing import Final

from tessera.formulation.base.errors import InvalidInput

HEADER: Final = ["host_id", "dsw", "psw", "asw"]


def rows_of(content: str, source: str) -> list[tuple[str, str, str, str]]:
    """Return (host, dsw, psw, asw) of each row, in the form that ``builders.build_lingjun`` takes.

    Raises:
        InvalidInput: a line is wrong. The error names ``source`` and the line.
    """
    lines = list(csv.reader(content.splitlines()))
    if not lines or lines[0] != HEADER:
        raise InvalidInput(source, f"must begin with the line {','.join(HEADER)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(HEADER) or not all(line):
            raise InvalidInput(
                f"{source}: line {number}", f"must have {len(HEADER)} values that are not empty"
            )
        rows.append((line[0], line[1], line[2], line[3]))
    return rows
