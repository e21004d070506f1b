"""COPY: rows out in binary form, into NumPy arrays without a Python object each, and in as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from psycopg2.errors import QueryCanceled

from tessera.formulation.tables import Table, array_columns

_HEADER_BYTES = 19  # signature, flags and the length of the extension, which is empty
_TRAILER_BYTES = 2

NULL = "\\N"
"""The text of a NULL in a row that is written."""

ROWS_PER_CHUNK = 200
"""Number of rows that are formatted together when rows are written."""

_WIRE = {"int8": ">i8", "float8": ">f8", "bool": "?"}
_TYPES = {"i": "int8", "f": "float8", "b": "bool"}


def wire_types(table: type[Table]) -> dict[str, str]:
    """Return the array columns of ``table`` with the types that ``read_columns`` takes."""
    return {name: _TYPES[dtype.kind] for name, dtype in array_columns(table).items()}


def read_columns(
    connection: sa.Connection, query: str, columns: Mapping[str, str]
) -> dict[str, NDArray[Any]]:
    """Return the columns of ``query`` in order, each [rows]. None of them may hold NULL.

    ``columns`` maps names to types: int8, float8 or bool. The query takes no parameters.
    """
    buffer = io.BytesIO()
    with closing(connection.connection.cursor()) as cursor:
        cursor.copy_expert(f"COPY ({query}) TO STDOUT (FORMAT binary)", buffer)
    wire: list[tuple[str, str]] = [("fields", ">i2")]
    for name, kind in columns.items():
        wire += [(f"{name} bytes", ">i4"), (name, _WIRE[kind])]
    record = np.dtype(wire)
    body = buffer.getbuffer()[_HEADER_BYTES:-_TRAILER_BYTES]
    if len(body) % record.itemsize:
        raise AssertionError("a column is NULL or not of the type that was asked for")
    table = np.frombuffer(body, dtype=record)
    for name in columns:
        if np.any(table[f"{name} bytes"] != record[name].itemsize):
            raise AssertionError(f"column {name} is NULL or not {columns[name]}")
    return {
        name: np.ascontiguousarray(table[name], dtype=record[name].newbyteorder("="))
        for name in columns
    }


def escape_text(text: str) -> str:
    """Return a text as a field of a row to write, without the NUL that PostgreSQL cannot hold."""
    text = text.replace("\\", "\\\\").replace("\0", "")
    return text.replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def write_rows(
    connection: sa.Connection, table: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Insert rows, each with one field for each of ``columns``, in PostgreSQL's notation.

    Texts must be ``escape_text``. Rows are produced while the database stores the rows before them.
    """
    lines = _Lines(rows)
    with closing(connection.connection.cursor()) as cursor:
        try:
            cursor.copy_expert(f"COPY {table} ({', '.join(columns)}) FROM STDIN", lines)
        except QueryCanceled as error:
            if lines.broken:  # the driver reports a failed row like a statement that took too long
                raise AssertionError(f"a row of {table} cannot be made") from error
            raise


class _Lines:
    """The file that COPY reads, which formats rows on demand."""

    def __init__(self, rows: Iterable[Sequence[str]]) -> None:
        self._rows = iter(rows)
        self.broken = False

    def read(self, _size: int) -> str:
        """Return the next lines, or "" at the end."""
        self.broken = True
        lines = "".join(["\t".join(row) + "\n" for row in islice(self._rows, ROWS_PER_CHUNK)])
        self.broken = False
        return lines
