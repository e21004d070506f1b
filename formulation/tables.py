"""Frozen tables: dataclasses whose fields are equally long, read-only NumPy columns or tuples.

A round reads 100,000 jobs and their estimates; one Python object a row would cost more than solving.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tessera.formulation.errors import InvalidInput
from tessera.formulation.values import CellKey

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


_DTYPES: dict[str, type[np.generic]] = {"Ints": np.int64, "Floats": np.float64, "Bools": np.bool_}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Base of the columnar types: checks lengths, converts to the declared dtype, forbids writes."""

    INDEX: ClassVar[str] = ""
    """The axis that every column runs along, for messages."""

    def __post_init__(self) -> None:
        """Convert, freeze and check every column."""
        length: int | None = None
        for name, dtype in _columns(type(self)):
            value = getattr(self, name)
            if isinstance(value, Table):
                continue  # a table beside this one, with an axis of its own
            if dtype is not None:
                value = frozen(value, dtype)
                if value.ndim != 1:
                    raise InvalidInput(name, f"has shape {value.shape}, expected one axis")
            elif not isinstance(value, tuple):
                value = tuple(value)
            object.__setattr__(self, name, value)
            if length is not None and len(value) != length:
                raise InvalidInput(
                    name, f"has {len(value)} {self.INDEX or 'rows'}, expected {length}"
                )
            length = len(value)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(getattr(self, _columns(type(self))[0][0]))

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]]) -> Self:
        """Build from one dictionary a row; all must have every column, or none one with a default."""
        needed = {f.name for f in fields(cls) if f.default_factory is MISSING}
        columns = needed | rows[0].keys() if rows else needed
        return cls(**{name: [row[name] for row in rows] for name in columns})

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellTable(Table):
    """Base of the tables that have a Cell in each row."""

    CELL: ClassVar[tuple[str, ...]] = CellKey._fields
    """The columns that make up a Cell, in the order of ``CellKey``."""

    def key_at(self, row: int) -> CellKey:
        """Return the Cell of one row."""
        return CellKey._make([getattr(self, name).item(row) for name in self.CELL])

    def keys(self, rows: Ints | None = None) -> list[CellKey]:
        """Return the Cell of each of ``rows`` (int64[some]); None: of every row."""
        columns = (getattr(self, name) for name in self.CELL)
        some = (column if rows is None else column[rows] for column in columns)
        return list(map(CellKey._make, zip(*(column.tolist() for column in some), strict=True)))


_COLUMNS: Final[dict[type[Any], tuple[tuple[str, type[np.generic] | None], ...]]] = {}
"""What ``_columns`` has found of each table."""


def _columns(table: type[Any]) -> tuple[tuple[str, type[np.generic] | None], ...]:
    """Return the name of each field of ``table`` and its dtype; None: it is no array."""
    if table not in _COLUMNS:
        _COLUMNS[table] = tuple((f.name, _DTYPES.get(str(f.type))) for f in fields(table))
    return _COLUMNS[table]


def frozen(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """Return ``values`` as a read-only array with at least one axis; one that is such already as it is."""
    if isinstance(values, np.ndarray) and values.dtype == dtype and not values.flags.writeable:
        return values if values.ndim else values[None]
    array = np.array(values, dtype=dtype, copy=None, ndmin=1).view()
    array.flags.writeable = False
    return array


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenate ``arange(start, start + count)`` for each pair, without a Python loop."""
    total = int(counts.sum())
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(total, dtype=np.int64)


def starts(counts: Ints) -> Ints:
    """Return where runs of so many begin, and where the last one ends, (counts + 1,)."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def sums(group: Ints, values: Floats, groups: int) -> Floats:
    """Return the sum of the values of each group, (groups,)."""
    return np.bincount(group, values, minlength=groups).astype(np.float64, copy=False)
