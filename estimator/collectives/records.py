"""Files of measured collectives, with the columns of the Arena artifact's ``comm.csv``.

A row is one primitive on one group layout at one size. ``bytes`` is the full tensor: each GPU's
input for all-reduce, reduce-scatter and all-to-all, each GPU's output for all-gather, and the
message for send. Half-precision tables therefore only differ in their bytes. Rows marked
``degenerate`` sent nothing and are dropped. Our own files have further columns with the origin of a
row, which other readers skip.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from tessera.estimator.files.userfiles import read_text
from tessera.estimator.plans import Primitive, Shape
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class CommRecord:
    """One row of a file. The fields from ``device`` on are provenance."""

    primitive: str
    gpu_type: str
    network: str
    num_nodes: int
    gpus_per_node: int
    group_size: int
    group_nodes: int
    group_gpus_per_node: int
    num_groups: int
    bytes: int
    time_s: float
    degenerate: int = 0
    device: str = ""
    versions: str = ""
    date: str = ""
    spread: float | None = None  # standard deviation of the repeats over their mean


COLUMNS: Final = tuple(f.name for f in fields(CommRecord))
REQUIRED: Final = COLUMNS[:12]
_WHOLE: Final = (*REQUIRED[3:10], "degenerate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A collective with its place.

    The ``size`` GPUs of a group are spread evenly over ``nodes`` nodes of a machine. ``node_groups``
    is the number of groups on the same nodes, including the group itself.
    """

    primitive: Primitive
    gpu_type: str
    network: str
    machine: Shape
    size: int
    nodes: int
    node_groups: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The times of one layout by size.

    Both arrays have shape (S,), with bytes strictly ascending.
    """

    layout: Layout
    payload_bytes: Floats
    seconds: Floats


_PRIMITIVES: Final = frozenset(Primitive)
_Line: TypeAlias = tuple[str, dict[str, str]]


def write_records(path: Path, records: Iterable[CommRecord]) -> None:
    """Write rows as a file that :func:`read_curves` reads. An unknown value is an empty field."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for record in records:
            writer.writerow(["" if v is None else v for v in astuple(record)])


def read_curves(path: Path) -> tuple[Curve, ...]:
    """Return the tables of a file in order of appearance.

    Several rows with the same layout and size become one measurement, their geometric mean.

    Raises:
        InvalidInput: a column is missing, a field is empty or not a number, a time is not positive,
            a group does not fit on its machine, or nothing was measured; the message names the
            line.
    """
    return curves_of(read_records(path), path.name)


def read_records(path: Path) -> list[CommRecord]:
    """Return all rows of a file, including degenerate ones.

    Raises:
        InvalidInput: as in :func:`read_curves`.
    """
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        missing = [c for c in REQUIRED if c not in (reader.fieldnames or ())]
        if missing:
            raise InvalidInput(path.name, f"has no column {missing[0]}; add it")
        return [_record((f"{path.name}:{reader.line_num}", row)) for row in reader]
    except csv.Error as error:
        raise InvalidInput(path.name, f"is not CSV: {error}") from error


def curves_of(records: Sequence[CommRecord], source: str = "records") -> tuple[Curve, ...]:
    """Return the tables of the given rows."""
    times: dict[Layout, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if not record.degenerate:
            times[_layout(record)][record.bytes].append(record.time_s)
    if not times:
        raise InvalidInput(source, "has no measurement; give at least one that is not degenerate")
    return tuple(_curve(layout, table) for layout, table in times.items())


def _record(line: _Line) -> CommRecord:
    where, row = line
    for column in REQUIRED:
        if not row[column]:
            raise InvalidInput(where, f"{column} is empty; fill it in or remove the row")
    whole = {column: _whole(where, column, row[column]) for column in _WHOLE}
    record = CommRecord(
        primitive=row["primitive"],
        gpu_type=row["gpu_type"],
        network=row["network"],
        time_s=_time(where, row["time_s"]),
        device=row.get("device") or "",
        versions=row.get("versions") or "",
        date=row.get("date") or "",
        spread=_number(where, "spread", row["spread"]) if row.get("spread") else None,
        **whole,
    )
    _check_fits(where, record)
    return record


def _whole(where: str, column: str, text: str) -> int:
    minimum = 0 if column == "degenerate" else 1
    try:
        value = int(text)
    except ValueError as error:
        raise InvalidInput(where, f"{column} must be a whole number, not {text!r}") from error
    if value < minimum or (column == "degenerate" and value > 1):
        raise InvalidInput(where, f"{column} must be at least {minimum}, not {text}")
    return value


def _number(where: str, column: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInput(where, f"{column} must be a number, not {text!r}") from error


def _time(where: str, text: str) -> float:
    value = _number(where, "time_s", text)
    if not (math.isfinite(value) and value > 0):
        raise InvalidInput(where, f"time_s must be positive and finite, not {text}")
    return value


def _check_fits(where: str, r: CommRecord) -> None:
    if r.primitive not in _PRIMITIVES:
        allowed = ", ".join(Primitive)
        raise InvalidInput(where, f"unknown primitive {r.primitive!r}; use one of {allowed}")
    if r.group_size != r.group_nodes * r.group_gpus_per_node:
        raise InvalidInput(
            where,
            f"group_size {r.group_size} is not group_nodes {r.group_nodes} x group_gpus_per_node "
            f"{r.group_gpus_per_node}",
        )
    if r.group_nodes > r.num_nodes or r.group_gpus_per_node > r.gpus_per_node:
        raise InvalidInput(where, "the group is larger than the machine")
    if r.num_groups * r.group_size > r.num_nodes * r.gpus_per_node:
        raise InvalidInput(where, f"{r.num_groups} such groups do not fit on the machine")
    if r.group_size == 1:
        raise InvalidInput(where, "a group of one GPU sends nothing; remove the row")


def _layout(r: CommRecord) -> Layout:
    return Layout(
        primitive=Primitive(r.primitive),
        gpu_type=r.gpu_type,
        network=r.network,
        machine=Shape(nodes=r.num_nodes, gpus_per_node=r.gpus_per_node),
        size=r.group_size,
        nodes=r.group_nodes,
        node_groups=max(1, round(r.num_groups * r.group_nodes / r.num_nodes)),
    )


def _curve(layout: Layout, times: dict[int, list[float]]) -> Curve:
    sizes = sorted(times)
    seconds = [math.exp(sum(map(math.log, times[b])) / len(times[b])) for b in sizes]
    return Curve(
        layout=layout,
        payload_bytes=np.array(sizes, dtype=np.float64),
        seconds=np.array(seconds, dtype=np.float64),
    )
