"""Frozen tables: dataclasses whose fields are equally long, read-only NumPy columns or tuples.

A round reads 100,000 jobs and their estimates; one Python object a row would cost more than solving.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from formulation.errors import InvalidInput

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


_DTYPES = {"Ints": np.int64, "Floats": np.float64, "Bools": np.bool_}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Base of the columnar types: checks lengths, converts to the declared dtype, forbids writes."""

    INDEX: ClassVar[str] = ""
    """The axis that every column runs along, for messages."""

    def __post_init__(self) -> None:
        """Convert, freeze and check every column."""
        length: int | None = None
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Table):
                continue  # a table beside this one, with an axis of its own
            dtype = _DTYPES.get(str(field.type))
            if dtype is not None:
                value = np.array(value, dtype=dtype, copy=None, ndmin=1)
                if value.ndim != 1:
                    raise InvalidInput(field.name, f"has shape {value.shape}, expected one axis")
                value = value.view()
                value.flags.writeable = False
            elif not isinstance(value, tuple):
                value = tuple(value)
            object.__setattr__(self, field.name, value)
            if length is not None and len(value) != length:
                raise InvalidInput(
                    field.name, f"has {len(value)} {self.INDEX or 'rows'}, expected {length}"
                )
            length = len(value)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]]) -> Self:
        """Build from one dictionary a row; all must have every column."""
        return cls(**{f.name: [row[f.name] for row in rows] for f in fields(cls)})

    def row(self, index: int) -> dict[str, Any]:
        """Return one row as plain Python values."""
        found: dict[str, Any] = {}
        for f in fields(self):
            column = getattr(self, f.name)
            if not isinstance(column, Table):
                value = column[index]
                found[f.name] = value.item() if isinstance(value, np.generic) else value
        return found

    def equals(self, other: Self) -> bool:
        """Return whether every column is equal, NaN to NaN included."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Table):
                if not mine.equals(theirs):
                    return False
            elif isinstance(mine, np.ndarray):
                if not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"):
                    return False
            elif mine != theirs:
                return False
        return True


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenate ``arange(start, start + count)`` for each pair, without a Python loop."""
    total = int(counts.sum())
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(total, dtype=np.int64)
