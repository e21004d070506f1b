"""A picture of a job's sensitivity curves: a plot for each resource, a line for each GPU type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

from tessera.formulation.errors import InvalidInput
from tessera.service.cli.curveview import GIB, CurveOf, marks_of, request_text
from tessera.service.cli.names import short_name
from tessera.simulator.report.style import (
    LIGHT,
    add_legend,
    new_drawing,
    series_styles,
    tick_number,
)
from tessera.v1 import jobs_pb2 as pb

PLOT_HEIGHT_IN: Final = 3.0
MARKERS: Final[dict[str, dict[str, Any]]] = {
    "now": {"marker": "D", "markersize": 6},
    "request": {"marker": "s", "markersize": 11, "markerfacecolor": "none"},
    "minimum": {"marker": "*", "markersize": 19, "markerfacecolor": "none"},
}
"""The markers of the points that have a mark."""

MARK_TEXTS: Final = {
    "now": "runs there now",
    "request": "requested",
    "minimum": "minimum demand",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A point of a line."""

    amount: float
    rate: float  # of the fastest with this amount
    best_rate: float
    marks: tuple[str, ...] = ()


_Line = tuple[str, Sequence[_Point]]
"""The label of a line and its points."""

_TITLES: Final = {
    CurveOf.GPUS: "GPUs",
    CurveOf.CPUS: "CPU cores",
    CurveOf.HOST_MEMORY: "host memory, GiB",
    CurveOf.BANDWIDTH: "network of a node, GB/s (predicted)",
}


def draw_curves(file: Path, curves: pb.JobCurves, of: CurveOf | None) -> None:
    """Draw a job's curves, or only that ``of`` a resource, into an SVG or PNG file.

    Raises:
        InvalidInput: there is no point to draw, or the file cannot be written.
    """
    wanted = CurveOf if of is None else (of,)
    plots = {of: lines for of in wanted if (lines := _lines(curves, of))}
    if not plots:
        raise InvalidInput("--of", f"the job's curve of {of} is not known, so it cannot be drawn")
    columns = min(2, len(plots))
    rows = -(-len(plots) // columns)
    styles = series_styles(label for lines in plots.values() for label, _ in lines)
    with (
        mpl.rc_context({"text.parse_math": False, "svg.hashsalt": "tessera"}),
        new_drawing(PLOT_HEIGHT_IN * rows) as (figure, first),
    ):
        figure.delaxes(first)
        figure.suptitle(
            f"job {short_name(curves.name)}, which requests {request_text(curves)}", fontsize=11
        )
        axes = None
        for number, (resource, lines) in enumerate(plots.items(), start=1):
            own = figure.add_subplot(rows, columns, number)
            _draw_plot(own, curves, resource, lines, styles)
            axes = axes or own
        _explain_marks(axes, curves, plots)
        add_legend(figure, axes, 0.7)
        _save(figure, file)


def _explain_marks(
    axes: Any, curves: pb.JobCurves, plots: Mapping[CurveOf, Sequence[_Line]]
) -> None:
    """Add the marks that the plots have, and the guaranteed rate, to the legend of ``axes``."""
    used = {
        mark
        for lines in plots.values()
        for _, points in lines
        for point in points
        for mark in point.marks
    }
    for mark in [mark for mark in MARKERS if mark in used]:
        look = {**MARKERS[mark], "label": MARK_TEXTS[mark]}
        axes.plot([], [], color=LIGHT["muted"], linestyle="", **look)
    if curves.guaranteed_rate:
        own = "guaranteed" if curves.guaranteed else "guaranteed, if the job were"
        axes.plot([], [], color=LIGHT["muted"], linestyle="--", linewidth=1, label=own)


def _save(figure: Any, file: Path) -> None:
    undated = {"Date": None} if file.suffix.lower() == ".svg" else None
    try:
        figure.savefig(file, facecolor=LIGHT["page"], dpi=160, metadata=undated)
    except OSError as error:
        raise InvalidInput(
            "--picture", f"cannot write {file}: {error.strerror or error}"
        ) from error


def _draw_plot(
    axes: Any, curves: pb.JobCurves, of: CurveOf, lines: Sequence[_Line], styles: Any
) -> None:
    axes.grid(visible=True)
    axes.set(xlabel=_TITLES[of], ylabel="samples/s")
    steps = of is not CurveOf.BANDWIDTH  # between two amounts, nothing is faster than the lower
    for label, points in lines:
        style = styles[label]
        at = [point.amount for point in points]
        axes.plot(
            at,
            [point.best_rate for point in points],
            drawstyle="steps-post" if steps else "default",
            label=label,
            **style.line,
        )
        axes.plot(at, [p.rate for p in points], ".", color=style.colour, markersize=6)
        for mark, look in MARKERS.items():
            marked = [point for point in points if mark in point.marks]
            axes.plot(
                [point.amount for point in marked],
                [point.rate for point in marked],
                color=style.colour,
                linestyle="",
                **look,
            )
    if curves.guaranteed_rate:
        axes.axhline(curves.guaranteed_rate, color=LIGHT["muted"], linestyle="--", linewidth=1)
    fastest = max(point.best_rate for _, points in lines for point in points)
    axes.set_ylim(0, 1.08 * max(fastest, curves.guaranteed_rate))
    if of is CurveOf.BANDWIDTH:
        axes.set_xscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: tick_number(value))


def _lines(curves: pb.JobCurves, of: CurveOf) -> list[_Line]:
    """Return the lines of a resource that have points."""
    lines = list[_Line]()
    for own in curves.types:
        label = own.gpu_type
        if of is CurveOf.BANDWIDTH:
            points = [
                _Point(amount=p.bytes_per_second / 1e9, rate=p.cell.rate, best_rate=p.cell.rate)
                for p in own.bandwidth.points
            ]
        else:
            field = {CurveOf.GPUS: own.gpus, CurveOf.CPUS: own.cpus}.get(of, own.host_bytes)
            unit = GIB if of is CurveOf.HOST_MEMORY else 1
            points = [
                _Point(
                    amount=p.amount / unit,
                    rate=p.cell.rate,
                    best_rate=p.best_rate,
                    marks=marks_of(curves, own, p, of),
                )
                for p in field
            ]
        if points:
            lines.append((label, points))
    return lines
