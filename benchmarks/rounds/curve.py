"""A plot of time against jobs for every solver, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The seconds that a solver took for a round.

    ``met`` is whether its answer is within the gap of its own bound.
    """

    solver: str
    jobs: int
    seconds: float
    met: bool


def draw_curve(file: Path, points: Sequence[CurvePoint], limit_s: float) -> None:
    """Write a PNG with a line for each solver.

    Marks are filled if the gap was met; the limit is dashed.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, name in enumerate(dict.fromkeys(p.solver for p in points)):
        mine = sorted((p for p in points if p.solver == name), key=lambda p: p.jobs)
        colour = f"C{number}"
        axes.plot(
            [p.jobs for p in mine],
            [p.seconds for p in mine],
            color=colour,
            label=name,
            linewidth=2.5 if number == 0 else 1.2,
        )
        for met in (True, False):
            some = [p for p in mine if p.met is met]
            axes.plot(
                [p.jobs for p in some],
                [p.seconds for p in some],
                "o",
                color=colour,
                markerfacecolor=colour if met else "white",
            )
    axes.axhline(limit_s, color="grey", linestyle="--", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="jobs",
        ylabel="seconds from snapshot to answer",
        title="Solving a round (hollow: the requested gap was not reached)",
    )
    sizes = sorted({p.jobs for p in points})
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.minorticks_off()
    axes.grid(visible=True, which="major", linewidth=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
