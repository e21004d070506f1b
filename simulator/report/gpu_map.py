"""A map of the GPUs that each job held over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.report.lines import time_unit
from tessera.simulator.report.model import Plot, format_value
from tessera.simulator.report.style import LIGHT, new_drawing

IMAGE_COLUMNS: Final = 1000
MIN_IMAGE_ROWS: Final = 400
"""Smallest number of rows of the picture, so that a small cluster is not blurred."""
MAX_IMAGE_ROWS: Final = 1600
"""Largest number of rows of the picture. Of larger clusters, only each second, third ... GPU is
drawn."""
FREE_COLOUR: Final = (128, 128, 128, 40)
HUE_STEP: Final = 0.61803398875
"""Step of hue between consecutive jobs, as a share of a full turn. With this one, jobs that follow
each other in time differ most."""
TIME_TOLERANCE_S: Final = 1e-6

Segment = tuple[str, float, float, Sequence[tuple[int, int]]]
"""Job, start and end in seconds, and (node index, GPUs there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGpus:
    """The GPUs that a job holds for some time. GPUs are numbered from 0 in order of nodes."""

    job: str
    start_s: float
    end_s: float
    gpus: np.ndarray


def gpu_map(
    title: str,
    segments: Sequence[Segment],
    node_gpus: Sequence[int],
    *,
    end_s: float,
    node_types: Sequence[str] | None = None,
    caption: str = "",
) -> Plot:
    """Plot the GPUs of all nodes over time, with a colour for each job.

    GPUs are ordered by node from top to bottom, and time runs from left to right. ``node_types``
    names the GPU type of each node. Nodes of a type must be adjacent. Only the number of GPUs on
    each node is known, so that the map shows a job on the first free ones.
    """
    held = place_segments(segments, node_gpus)
    scale, unit = time_unit(end_s)
    total = int(sum(node_gpus))
    image = _image(held, total, end_s)
    busy_gpu_s = sum(len(h.gpus) * max(0.0, min(h.end_s, end_s) - h.start_s) for h in held)
    share = 100 * busy_gpu_s / (total * end_s)
    jobs = len({h.job for h in held})
    with new_drawing(4.6) as (figure, axes):
        axes.imshow(image, aspect="auto", interpolation="none", extent=(0, end_s / scale, total, 0))
        axes.set(xlabel=f"time ({unit})", ylabel="GPUs, in order of nodes")
        axes.grid(visible=False)
        _types(axes, node_gpus, node_types)
    return Plot(
        title=title,
        drawing=figure,
        caption=f"Each job has one colour. Free GPUs are pale. {caption}".strip(),
        alt=f"Map of {total:,} GPUs on {len(node_gpus):,} nodes over {format_value(end_s / scale)} {unit}: "
        f"{jobs:,} jobs hold {share:.1f} % of the GPU time.",
    )


def place_segments(segments: Sequence[Segment], node_gpus: Sequence[int]) -> list[HeldGpus]:
    """Return the GPUs that each segment holds. A job keeps those of its previous segment if free.

    Raises:
        InvalidInput: segments hold more GPUs than a node has.
    """
    first = np.cumsum([0, *node_gpus])
    until_s = np.full(int(first[-1]), -np.inf)
    holder = np.full(int(first[-1]), "", dtype=object)
    held = []
    for job, start_s, end_s, shares in sorted(segments, key=lambda s: (s[1], s[0])):
        gpus = []
        for node, count in shares:
            here = np.arange(first[node], first[node + 1])
            free = here[until_s[here] <= start_s + TIME_TOLERANCE_S]
            if len(free) < count:
                raise InvalidInput(
                    "segments",
                    f"with {job}, hold more than the {node_gpus[node]} GPUs of node {node}"
                    f" at {start_s:g} s",
                )
            chosen = free[np.argsort(holder[free] != job, kind="stable")][:count]
            until_s[chosen], holder[chosen] = end_s, job
            gpus.append(np.sort(chosen))
        members = np.concatenate(gpus) if gpus else np.zeros(0, np.int64)
        held.append(HeldGpus(job=job, start_s=start_s, end_s=end_s, gpus=members))
    return held


def job_colours(jobs: Sequence[str]) -> dict[str, np.ndarray]:
    """Return a colour for each job, as four bytes. Neighbours differ in hue and in lightness."""
    colour = {}
    for k, job in enumerate(dict.fromkeys(jobs)):
        hsv = (k * HUE_STEP % 1.0, 0.55 + 0.3 * (k % 2), (0.62, 0.86, 0.74)[k % 3])
        colour[job] = np.append(np.rint(255 * mpl.colors.hsv_to_rgb(hsv)), 255).astype(np.uint8)
    return colour


def _image(held: Sequence[HeldGpus], total: int, end_s: float) -> np.ndarray:
    image = np.full((total, IMAGE_COLUMNS, 4), FREE_COLOUR, np.uint8)
    colour = job_colours([h.job for h in held])
    for h in held:
        if h.start_s < end_s:
            begin = int(h.start_s / end_s * IMAGE_COLUMNS)
            image[h.gpus, begin : max(begin + 1, round(h.end_s / end_s * IMAGE_COLUMNS))] = colour[
                h.job
            ]
    return image[:: -(-total // MAX_IMAGE_ROWS)].repeat(-(-MIN_IMAGE_ROWS // total), axis=0)


def _types(axes: Any, node_gpus: Sequence[int], node_types: Sequence[str] | None) -> None:
    """Write the GPU types at the right, with lines between the types."""
    if node_types is None:
        return
    first = np.cumsum([0, *node_gpus])
    starts = [n for n, kind in enumerate(node_types) if n == 0 or node_types[n - 1] != kind]
    for begin, end in zip(starts, [*starts[1:], len(node_types)], strict=True):
        if begin:
            axes.axhline(first[begin], color=LIGHT["ink"], linewidth=1)
        middle = (first[begin] + first[end]) / 2
        axes.annotate(
            node_types[begin],
            (1, middle),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            rotation=90,
        )
