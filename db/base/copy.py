"""COPY of rows in binary form, into NumPy arrays without a Python object each."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from tessera.formulation.base.tables import Table, array_columns

_HEADER_BYTES = 19  # signature, flags and the length of the extension, which is empty
_TRAILER_BYTES = 2

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
