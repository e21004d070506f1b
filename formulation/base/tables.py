"""Frozen tables: dataclasses whose fields are read-only NumPy columns or tuples of equal length.

A round reads 100,000 jobs and their estimates. With one Python object for each row, that would take
longer than solving.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import CellKey

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


_DTYPES: dict[str, type[np.generic]] = {"Ints": np.int64, "Floats": np.float64, "Bools": np.bool_}


def usual(value: float | str) -> Any:
    """Declare a column that may be absent; every row then has ``value``."""
    return field(default=(), metadata={"usual": value})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Base of columnar types: checks lengths, converts to the declared dtype, forbids writes."""

    INDEX: ClassVar[str] = ""
    """The axis of every column, for messages."""

    def __post_init__(self) -> None:
        """Convert, freeze and check every column."""
        length: int | None = None
        for name, dtype, missing in _columns(type(self)):
            value = getattr(self, name)
            if isinstance(value, Table):
                continue  # a nested table, with its own axis
            if length and missing is not None and _is_absent(value):
                value = (missing,) * length if dtype is None else np.full(length, missing, dtype)
            if dtype is not None:
                value = freeze_array(value, dtype)
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
        """Build a table from one dictionary for each row.

        All dictionaries have the same columns. Columns with a default may be left out of all.
        """
        needed = {f.name for f in fields(cls) if "usual" not in f.metadata}
        columns = needed | rows[0].keys() if rows else needed
        return cls(**{name: [row[name] for row in rows] for name in columns})

    def row(self, index: int) -> dict[str, Any]:
        """Return one row as plain Python values."""
        plain: dict[str, Any] = {}
        for f in fields(self):
            column = getattr(self, f.name)
            if not isinstance(column, Table):
                value = column[index]
                plain[f.name] = value.item() if isinstance(value, np.generic) else value
        return plain

    def usual_columns(self) -> frozenset[str]:
        """Return the columns that may be absent, because every row has their usual value."""
        return frozenset(
            f.name
            for f in fields(self)
            if "usual" in f.metadata and _all_are(getattr(self, f.name), f.metadata["usual"])
        )

    def at(self, rows: Ints | Bools) -> Self:
        """Return these rows (int64[any] or bool[rows]), in that order.

        An index may occur several times. No column may be a table.
        """
        return type(self)(**{f.name: _take(getattr(self, f.name), rows) for f in fields(self)})

    def followed_by(self, other: Self) -> Self:
        """Return the rows of this table, then those of ``other``. No column may be a table."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return type(self)(
            **{
                name: first + then if isinstance(first, tuple) else np.concatenate((first, then))
                for name, (first, then) in pairs.items()
            }
        )

    def equals(self, other: Self) -> bool:
        """Return whether every column is equal. NaN equals NaN."""
        for f in fields(self):
            ours, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(ours, Table):
                if not ours.equals(theirs):
                    return False
            elif isinstance(ours, np.ndarray):
                if not np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"):
                    return False
            elif ours != theirs:
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

    def have_same_cell(self, rows: Ints, others: Ints) -> Bools:
        """Return whether each pair of ``rows`` and ``others`` has the same Cell, bool[pairs]."""
        same = np.ones(len(rows), dtype=np.bool_)
        for name in self.CELL:
            column = getattr(self, name)
            same &= column[rows] == column[others]
        return same

    def keys(self, rows: Ints | None = None) -> list[CellKey]:
        """Return the Cell of each of ``rows`` (int64[any]), or of every row if it is None."""
        columns = (getattr(self, name) for name in self.CELL)
        some = (column if rows is None else column[rows] for column in columns)
        return list(map(CellKey._make, zip(*(column.tolist() for column in some), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapeTable(CellTable):
    """Base of the tables that have a workload, a Cell and a number of nodes in each row."""

    ORDER: ClassVar[tuple[str, ...]] = ("workload", *CellKey._fields, "nodes")
    """The columns by which snapshots sort the rows, the most significant first."""

    def in_order(self) -> Self:
        """Return the rows in the order that snapshots require."""
        keys = [getattr(self, name) for name in self.ORDER]
        rises = np.zeros(max(len(self) - 1, 0), dtype=np.bool_)  # whether the key so far rises
        same = ~rises
        for key in keys:
            rises |= same & (key[1:] > key[:-1])
            same &= key[1:] == key[:-1]
        return self if (rises | same).all() else self.at(np.lexsort(keys[::-1]))


class _Column(NamedTuple):
    """A field of a table.

    ``dtype`` is None if it is not an array. ``usual`` is its usual value, or None if it must be
    given.
    """

    name: str
    dtype: type[np.generic] | None
    usual: float | str | None


def _take(column: NDArray[Any] | tuple[Any, ...], rows: Ints | Bools) -> Any:
    """Return these rows of a column."""
    if isinstance(column, tuple):
        return tuple(column[row] for row in np.arange(len(column))[rows].tolist())
    return column[rows]


_COLUMNS: Final[dict[type[Any], tuple[_Column, ...]]] = {}
"""The result of ``_columns`` for each table."""


def _columns(table: type[Any]) -> tuple[_Column, ...]:
    """Return the fields of ``table``. Those that must be given are first."""
    if table not in _COLUMNS:
        columns = (
            _Column(f.name, _DTYPES.get(str(f.type)), f.metadata.get("usual"))
            for f in fields(table)
        )
        _COLUMNS[table] = tuple(sorted(columns, key=lambda column: column.usual is not None))
    return _COLUMNS[table]


def array_columns(table: type[Table]) -> dict[str, np.dtype[Any]]:
    """Return the columns of ``table`` that are arrays, with their dtypes."""
    return {c.name: np.dtype(c.dtype) for c in _columns(table) if c.dtype is not None}


def _is_absent(column: Any) -> bool:
    """Return whether a column was not given."""
    size = column.size if isinstance(column, np.ndarray) else len(column)
    return bool(size == 0)


def _all_are(column: NDArray[Any], value: float) -> bool:
    """Return whether every row has ``value``, which may be NaN."""
    return bool(np.array_equal(column, np.full(len(column), value), equal_nan=value != value))


def freeze_array(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """Return ``values`` as a read-only array with at least one axis.

    An array that is read-only already is returned without a copy.
    """
    if isinstance(values, np.ndarray) and values.dtype == dtype and not values.flags.writeable:
        return values if values.ndim else values[None]
    array = np.array(values, dtype=dtype, copy=None, ndmin=1).view()
    array.flags.writeable = False
    return array


def begins_group(*keys: Ints) -> Bools:
    """Return whether each row begins a group of adjacent rows with equal ``keys``, bool[rows]."""
    new = np.zeros(len(keys[0]), dtype=np.bool_)
    new[:1] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    return new


def concatenate_ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenate ``arange(start, start + count)`` for each pair, without a Python loop."""
    total = int(counts.sum())
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(total, dtype=np.int64)


def run_starts(counts: Ints) -> Ints:
    """Return the starts of consecutive runs of ``counts``, and the last end, (counts + 1,)."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def sum_by_group(group: Ints, values: Floats, groups: int) -> Floats:
    """Return the sum of the values of each group, (groups,)."""
    return np.bincount(group, values, minlength=groups).astype(np.float64, copy=False)
