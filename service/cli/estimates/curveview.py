"""Views of a job's sensitivity curves: facts, and a table with a bar chart for each resource."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from tessera.formulation.job.execution_plan import read_execution_plan
from tessera.service.cli.jobs.jobview import DIGEST_DIGITS, cell_text
from tessera.service.cli.render import (
    GIB,
    Column,
    count_noun,
    facts_grid,
    format_number,
    make_table,
)
from tessera.service.cli.terminal import visible_form
from tessera.v1 import jobs_pb2 as pb

BAR_WIDTH: Final = 32
"""Width in characters of a bar of the best rate."""

UNSTATED: Final = "The estimates do not state what CPU cores and host memory Cells need."


class CurveOf(StrEnum):
    """A resource that a curve is about."""

    GPUS = "gpus"
    CPUS = "cpus"
    HOST_MEMORY = "host-memory"
    BANDWIDTH = "bandwidth"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow:
    """A point of a curve as a row. ``amount`` is its amount with a unit, or a number."""

    amount: str
    cell: pb.CurveCell
    best_rate: float
    gain: float = 0.0
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _CurveTable:
    """The rows of a curve below a title."""

    title: str
    amount: str  # title of the first column
    rows: Sequence[CurveRow]
    unit: str = ""  # of gains, if there are any
    note: str = ""  # why there are no rows


def curve_parts(curves: pb.JobCurves, of: CurveOf | None) -> list[RenderableType]:
    """Return the facts of a job's curves, then the table of each, or only that ``of`` a resource."""
    parts: list[RenderableType] = [
        facts_grid((name, visible(text)) for name, text in _facts(curves))
    ]
    tables = [table for own in curves.types for table in _tables(curves, own, of)]
    most = max((row.best_rate for table in tables for row in table.rows), default=0.0)
    for table in tables:
        parts += [Text(""), Text(visible(table.title), "bold")]
        if table.rows:
            columns = _columns(curves, table, most)
            parts.append(make_table(table.rows, columns, wide=True))
        if table.note:
            parts.append(Text(visible(table.note)))
    if of is None and not any(own.cpus or own.host_bytes for own in curves.types):
        parts += [Text(""), Text(UNSTATED)]
    return parts


def visible(text: str) -> str:
    """Return a text in which control characters are visible, so that a terminal does not obey them."""
    return "".join(c if c.isprintable() else visible_form(c) for c in text)


def plan_text(curves: pb.JobCurves, cell: pb.CurveCell) -> str:
    """Return the execution plan of a Cell in short."""
    digest = cell.cell.plan
    if document := curves.execution_plans.get(digest):
        return str(read_execution_plan("execution_plans", document))
    if digest:
        return digest[:DIGEST_DIGITS]
    return (
        f"pp{cell.cell.pipeline_degree}, not recorded"
        if cell.cell.pipeline_degree
        else "not recorded"
    )


def request_text(curves: pb.JobCurves) -> str:
    """Return what a job requests, e.g. ``4 x a100``."""
    if curves.requested_gpu_type:
        return f"{curves.requested_gpus} x {curves.requested_gpu_type}"
    return f"{count_noun(curves.requested_gpus, 'GPU')} of any type"


def demand_text(cell: pb.CurveCell) -> str:
    """Return what a Cell needs, e.g. ``4 x a100, 16 CPU cores, 64 GiB of host memory``."""
    parts = [f"{cell.cell.gpus} x {cell.cell.gpu_type}"]
    if cell.cpus:
        parts.append(count_noun(cell.cpus, "CPU core"))
    if cell.host_bytes:
        parts.append(f"{format_number(cell.host_bytes / GIB)} GiB of host memory")
    return ", ".join(parts)


def _facts(curves: pb.JobCurves) -> Iterator[tuple[str, str]]:
    yield "job", curves.name
    yield "request", request_text(curves)
    if curves.HasField("current"):
        now = curves.current
        nodes = count_noun(now.nodes, "node")
        yield (
            "runs on",
            f"{cell_text(now.cell)}, on {nodes}: {_rate_text(now.rate)} by {plan_text(curves, now)}",
        )
    rate = curves.guaranteed_rate
    owed = _rate_text(rate) if rate else "not known, because no Cell matches the request"
    if not curves.guaranteed:
        owed += ", if the job were guaranteed"
    yield "guaranteed", owed
    for own in curves.types:
        if own.HasField("minimum_demand"):
            least = own.minimum_demand
            yield (
                "minimum demand",
                f"{demand_text(least)}: {_rate_text(least.rate)} by {plan_text(curves, least)}",
            )
        else:
            yield "minimum demand", f"none on {own.gpu_type}: no Cell within the request is as fast"


def _rate_text(rate: float) -> str:
    return f"{format_number(rate)} samples/s"


def _tables(curves: pb.JobCurves, own: pb.TypeCurves, of: CurveOf | None) -> Iterator[_CurveTable]:
    """Yield the tables of a GPU type."""
    where = f"with {own.at_gpus} x {own.gpu_type}"
    if of in (None, CurveOf.GPUS):
        yield _CurveTable(
            title=f"GPUs of type {own.gpu_type}",
            amount="GPUS",
            unit="GPU",
            rows=_rows(curves, own, own.gpus, CurveOf.GPUS, str),
        )
    if of is CurveOf.CPUS or (of is None and own.cpus):
        yield _CurveTable(
            title=f"CPU cores {where}",
            amount="CORES",
            unit="CORE",
            rows=_rows(curves, own, own.cpus, CurveOf.CPUS, str),
            note="" if own.cpus else UNSTATED,
        )
    if of is CurveOf.HOST_MEMORY or (of is None and own.host_bytes):
        yield _CurveTable(
            title=f"Host memory {where}",
            amount="HOST GIB",
            rows=_rows(
                curves, own, own.host_bytes, CurveOf.HOST_MEMORY, lambda n: format_number(n / GIB)
            ),
            note="" if own.host_bytes else UNSTATED,
        )
    if of in (None, CurveOf.BANDWIDTH):
        yield _CurveTable(title=f"Nodes {where}", amount="NODES", rows=_shape_rows(curves, own))
        yield _CurveTable(
            title=f"Network bandwidth of a node {where}, as predicted",
            amount="GB/S",
            rows=[
                CurveRow(
                    amount=format_number(point.bytes_per_second / 1e9),
                    cell=point.cell,
                    best_rate=point.cell.rate,
                )
                for point in own.bandwidth.points
            ],
            note=own.bandwidth.unknown_reason and f"Not known: {own.bandwidth.unknown_reason}.",
        )


def _rows(
    curves: pb.JobCurves,
    own: pb.TypeCurves,
    points: Sequence[pb.CurvePoint],
    of: CurveOf,
    text: Callable[[int], str],
) -> list[CurveRow]:
    return [
        CurveRow(
            amount=text(point.amount),
            cell=point.cell,
            best_rate=point.best_rate,
            gain=point.gain,
            marks=marks_of(curves, own, point, of),
        )
        for point in points
    ]


def marks_of(
    curves: pb.JobCurves, own: pb.TypeCurves, point: pb.CurvePoint, of: CurveOf
) -> tuple[str, ...]:
    """Return what a point is: where the job runs ``now``, its ``request`` or its ``minimum``."""

    def is_here(cell: pb.CurveCell) -> bool:
        if cell.cell.gpu_type != own.gpu_type:
            return False
        amount = {
            CurveOf.GPUS: cell.cell.gpus,
            CurveOf.CPUS: cell.cpus,
            CurveOf.HOST_MEMORY: cell.host_bytes,
        }[of]
        return amount == point.amount and (of is CurveOf.GPUS or cell.cell.gpus == own.at_gpus)

    requested = curves.requested_gpu_type in ("", own.gpu_type)
    found = {
        "now": curves.HasField("current") and is_here(curves.current),
        "request": of is CurveOf.GPUS and requested and point.amount == curves.requested_gpus,
        "minimum": own.HasField("minimum_demand") and is_here(own.minimum_demand),
    }
    return tuple(mark for mark, is_so in found.items() if is_so)


def _shape_rows(curves: pb.JobCurves, own: pb.TypeCurves) -> list[CurveRow]:
    now = curves.current
    here = now.cell.gpu_type == own.gpu_type and now.cell.gpus == own.at_gpus
    return [
        CurveRow(
            amount=str(shape.nodes),
            cell=shape,
            best_rate=shape.rate,
            marks=("now",) if here and now.nodes == shape.nodes else (),
        )
        for shape in own.shapes
    ]


def _columns(curves: pb.JobCurves, table: _CurveTable, most: float) -> Sequence[Column[CurveRow]]:
    owed = curves.guaranteed_rate
    columns = [
        Column[CurveRow](table.amount, lambda r: r.amount, right=True),
        Column("SAMPLES/S", lambda r: format_number(r.cell.rate), right=True),
    ]
    if table.unit:
        columns += [
            Column("BEST", lambda r: format_number(r.best_rate), right=True),
            Column(f"GAIN/{table.unit}", lambda r: format_number(r.gain), right=True),
        ]
    columns.append(Column("", lambda r: draw_bar(r.cell.rate, r.best_rate, owed, most)))
    if any(row.marks for row in table.rows):
        columns.append(Column("MARK", lambda r: ", ".join(r.marks)))
    needs: list[Column[CurveRow]] = [Column("NODES", lambda r: str(r.cell.nodes), right=True)]
    if any(row.cell.cpus or row.cell.host_bytes for row in table.rows):
        needs += [
            Column("CORES", lambda r: f"{r.cell.cpus:,}", right=True),
            Column("HOST GIB", lambda r: format_number(r.cell.host_bytes / GIB), right=True),
        ]
    columns += [column for column in needs if column.title != table.amount]
    columns.append(Column("EXECUTION PLAN", lambda r: visible(plan_text(curves, r.cell))))
    return columns


def draw_bar(rate: float, best_rate: float, owed: float, most: float) -> str:
    """Return a bar of a rate, with dots up to the best rate, and ``|`` at the guaranteed rate.

    ``most`` is the rate of a full bar.
    """
    full, dot = ("\u2588", "\u00b7") if _is_unicode() else ("#", ".")
    if most <= 0:
        return ""

    def width(value: float) -> int:
        return min(BAR_WIDTH, round(BAR_WIDTH * value / most))

    bar = list(full * width(rate) + dot * (width(best_rate) - width(rate)))
    at = width(owed) - 1
    if 0 < owed <= most and at >= 0:
        bar += " " * (at + 1 - len(bar))
        bar[at] = "|"
    return "".join(bar)


def _is_unicode() -> bool:
    """Return whether stdout can show other characters than ASCII's."""
    return (sys.stdout.encoding or "").lower().startswith("utf")
