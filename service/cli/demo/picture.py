"""The demo's picture: throughput round by round, and the job on each GPU."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tessera.formulation.base.tables import Floats
from tessera.v1 import scheduler_pb2

GPUS_PER_COLUMN: Final = 32
"""The number of GPUs in a column of the picture."""
FREE_BRIGHTNESS: Final = 0.88
"""The brightness of a free GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPair:
    """A committed round and greedy's answer to the same snapshot."""

    ilp: scheduler_pb2.Round
    greedy: scheduler_pb2.Round
    call_s: float


def draw_picture(
    file: Path,
    pairs: Sequence[RoundPair],
    decisions: Sequence[scheduler_pb2.Decision],
    nodes: Sequence[tuple[str, str, int]],
) -> None:
    """Write a PNG: ILP and greedy by round, running and waiting jobs, and GPUs coloured by job.

    ``decisions`` are those of the last round, because on a fast clock many of its jobs have ended
    when the picture is drawn. ``nodes`` are (name, GPU type, GPUs).
    """
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.6))
    _throughput(figure.add_subplot(grid[0, 0]), pairs)
    _counts(figure.add_subplot(grid[0, 1]), pairs)
    _gpus(figure.add_subplot(grid[1, :]), decisions, nodes)
    figure.savefig(file, dpi=110)


def _throughput(axes: Any, pairs: Sequence[RoundPair]) -> None:
    at = np.arange(len(pairs)) + 1.0
    axes.bar(at - 0.2, [p.ilp.placed_score for p in pairs], 0.4, label="ILP", color="#1f6f8b")
    axes.bar(at + 0.2, [p.greedy.placed_score for p in pairs], 0.4, label="greedy", color="#d9a441")
    top = max([1.0, *(p.ilp.placed_score for p in pairs)])
    axes.set(title="throughput on the same snapshots, in effective GPUs", xlabel="round", xticks=at)
    axes.set_ylim(0, 1.3 * top)  # room for the legend
    axes.legend(loc="upper right")


def _counts(axes: Any, pairs: Sequence[RoundPair]) -> None:
    at = np.arange(len(pairs)) + 1
    axes.stackplot(
        at,
        [p.ilp.running for p in pairs],
        [p.ilp.waiting for p in pairs],
        labels=["running", "waiting"],
        colors=["#3c8d5a", "#c9c9c9"],
    )
    axes.set(title="jobs", xlabel="round", xticks=at, xlim=(1, max(2, len(pairs))))
    axes.set_ylim(0, 1.3 * max(1, *(p.ilp.running + p.ilp.waiting for p in pairs)))
    axes.legend(loc="upper right")


def _gpus(
    axes: Any, decisions: Sequence[scheduler_pb2.Decision], nodes: Sequence[tuple[str, str, int]]
) -> None:
    image, strips = gpu_image(decisions, nodes)
    for text, middle in strips:
        axes.text(middle, -1.2, text, ha="center")
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_title(
        "GPUs as the last round assigned them (one colour for each job; free GPUs are grey)", pad=22
    )
    axes.set_axis_off()


def gpu_image(
    decisions: Sequence[scheduler_pb2.Decision], nodes: Sequence[tuple[str, str, int]]
) -> tuple[Floats, list[tuple[str, float]]]:
    """Return the GPUs as colours, float64[rows, columns, 3], and each type's label with its middle.

    There is one cell for each GPU: nodes of a type from left to right, ``GPUS_PER_COLUMN`` GPUs in a column.
    """
    rows = GPUS_PER_COLUMN
    kinds = list(dict.fromkeys(kind for _, kind, _ in nodes))
    place: dict[str, tuple[int, int]] = {}  # node -> (strip, first GPU in it)
    total = dict.fromkeys(kinds, 0)
    for name, kind, gpus in nodes:
        place[name] = (kinds.index(kind), total[kind])
        total[kind] += gpus
    widths = [-(-total[kind] // rows) for kind in kinds]
    starts = np.cumsum([0, *(w + 1 for w in widths)])
    # White gaps separate the strips, and free GPUs are grey until a job colours them.
    image, strips = np.ones((rows, int(starts[-1]) - 1, 3)), []
    for kind, start, width in zip(kinds, starts, widths, strict=False):
        image[:, start : start + width] = FREE_BRIGHTNESS
        strips.append((f"{kind}: {total[kind]} GPUs", float(start + width / 2 - 0.5)))
    for decision in decisions:
        colour = _colour(decision.job)
        for share in decision.allocation.shares:
            strip, first = place[share.node.rpartition("/")[2]]
            for index in share.gpu_indices:
                gpu = first + index
                image[gpu % rows, starts[strip] + gpu // rows] = colour
    return image, strips


def _colour(name: str) -> tuple[float, float, float]:
    """Return a colour that depends only on the name."""
    digest = zlib.crc32(name.encode())
    colour = mpl.colors.hsv_to_rgb(
        ((digest % 997) / 997, 0.45 + (digest >> 10) % 7 / 14, 0.65 + (digest >> 20) % 6 / 20)
    )
    return float(colour[0]), float(colour[1]), float(colour[2])
