"""The picture of the demonstration of training: losses by step, and the jobs on each GPU by time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tessera.formulation.records.clusters import NodeSpec
from tessera.service.cli.demo.train.proof import Execution, last_executions
from tessera.service.cli.demo.train.recorder import Event, Start

LEAD_COLOUR: Final = "#1f6f8b"
COLOURS: Final = ("#6a994e", "#8e6bbf", "#b08968", "#c06c98", "#4f86c6", "#8c8c3f")
"""Colours of the jobs that come later, in order."""

SIZE_COLOURS: Final = {1: "#d1495b", 2: "#edae49", 4: LEAD_COLOUR}
"""Colours of numbers of GPUs."""

GREY: Final = "#8a8a8a"
LABEL_SHARE: Final = 0.2
"""The room above the losses for labels, compared with that of the losses."""

NEAR_SHARE: Final = 0.03
"""The share of the width below which the labels of two lines need different sides."""

EVENT_SHARE: Final = 0.1
"""The share of the time below which two events share a label."""

PLAN_SHARE: Final = 0.07
"""The share of the width that steps need so that the name of their plan fits above them."""

PLAN_TEXT: Final = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 9}


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps from ``first`` up to ``end``, counted from 1, whose last execution was of one start."""

    first: int
    end: int
    start: Start


def find_segments(last: Mapping[int, Execution], starts: Sequence[Start]) -> list[Segment]:
    """Return the steps of each start whose work was not lost, in order.

    ``last`` has each iteration, counted from 0, as it was executed last.
    """
    by_generation = {start.generation: start for start in starts}
    segments: list[Segment] = []
    for number in sorted(last):
        start = by_generation.get(last[number].generation)
        if start is None:
            continue
        if segments and segments[-1].start is start and segments[-1].end == number:
            segments[-1] = Segment(segments[-1].first, number + 1, start)
        else:
            segments.append(Segment(number, number + 1, start))
    return [Segment(s.first + 1, s.end + 1, s.start) for s in segments]


def describe_change(before: Start, after: Start) -> str:
    """Return the change from a start to the next, e.g. "4 → 1 GPUs", "1 GPU, moved", "dp4 → tp4"."""
    old, new = len(before.gpus), len(after.gpus)
    if before.plan != after.plan and before.plan and after.plan:
        return f"{before.plan} → {after.plan}"
    if old != new:
        return f"{old} → {new} GPU{'s' * (new > 1)}"
    change = "moved" if before.gpus != after.gpus else "resumed"
    return f"{new} GPU{'s' * (new > 1)}, {change}"


def draw_training(
    file: Path,
    jobs: Mapping[str, Sequence[Start]],
    executions: Sequence[Execution],
    undisturbed: Sequence[Execution],
    events: Sequence[Event],
    nodes: Sequence[NodeSpec],
) -> None:
    """Write a PNG. ``executions`` and ``undisturbed`` are those of the first of ``jobs``."""
    figure = Figure(figsize=(12, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 1, height_ratios=(2.6, 0.65, 1.75))
    name = next(iter(jobs))
    last = last_executions(executions)
    segments = find_segments(last, jobs[name])
    losses = figure.add_subplot(grid[0])
    _draw_losses(losses, name, last, undisturbed, segments)
    _draw_sizes(figure.add_subplot(grid[1], sharex=losses), segments)
    _draw_gpus(figure.add_subplot(grid[2]), jobs, events, nodes)
    figure.savefig(file, dpi=110)


def _draw_losses(
    axes: Any,
    name: str,
    last: Mapping[int, Execution],
    undisturbed: Sequence[Execution],
    segments: Sequence[Segment],
) -> None:
    line = sorted(undisturbed, key=lambda execution: execution.iteration)
    steps = [execution.iteration + 1 for execution in line]
    axes.plot(
        steps,
        [execution.loss for execution in line],
        color="#303030",
        linewidth=1.2,
        zorder=3,
        label="undisturbed, one process",
    )
    for segment in segments:
        count = len(segment.start.gpus)
        numbers = range(segment.first, segment.end)
        axes.scatter(
            numbers,
            [last[number - 1].loss for number in numbers],
            s=22,
            color=size_colour(count),
            alpha=0.55,
            linewidths=0,
            zorder=2,
        )
    for count in sorted({len(segment.start.gpus) for segment in segments}):
        label = f"under Tessera, {count} GPU{'s' * (count > 1)}"
        axes.scatter([], [], s=22, color=size_colour(count), alpha=0.55, linewidths=0, label=label)
    _mark_changes(axes, segments, width=len(steps))
    axes.set_title(
        f"loss of {name}: each step under Tessera, and a run that nothing disturbed", pad=12
    )
    axes.set_ylabel("loss")
    axes.tick_params(labelbottom=False)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axes.set_xlim(0, len(steps) + 1)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + LABEL_SHARE * (high - low))
    axes.legend(loc="upper right", framealpha=0.95)


def _mark_changes(axes: Any, segments: Sequence[Segment], width: int) -> None:
    """Draw a line where another start of the job goes on."""
    is_right, last_step = False, -width
    for before, after in pairwise(segments):
        step = after.first
        is_right = step - last_step < NEAR_SHARE * width and not is_right
        last_step = step
        axes.axvline(step - 0.5, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            describe_change(before.start, after.start),
            (step - 0.5, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4 if is_right else -4, 0),
            textcoords="offset points",
            rotation=90,
            va="top",
            ha="left" if is_right else "right",
            fontsize=10,
            color="#404040",
        )


def _draw_sizes(axes: Any, segments: Sequence[Segment]) -> None:
    """Draw the number of GPUs of each step, with the plan's name where there is room for it."""
    width = segments[-1].end if segments else 1
    for segment in segments:
        count = len(segment.start.gpus)
        axes.bar(
            segment.first - 0.5,
            count,
            segment.end - segment.first,
            align="edge",
            color=size_colour(count),
            alpha=0.85,
        )
        if segment.end - segment.first >= PLAN_SHARE * width:
            middle = (segment.first + segment.end) / 2 - 0.5
            axes.annotate(segment.start.plan, (middle, count), (0, 2), **PLAN_TEXT)
    for segment in segments[1:]:
        axes.axvline(segment.first - 0.5, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlabel="step", ylabel="GPUs", yticks=(1, 2, 4), ylim=(0, 5.5))


def _draw_gpus(
    axes: Any,
    jobs: Mapping[str, Sequence[Start]],
    events: Sequence[Event],
    nodes: Sequence[NodeSpec],
) -> None:
    """Draw the job on each GPU by time. Starts are pale until they train."""
    rows = [(node.name, index) for node in nodes for index in range(node.gpus)]
    legend = []
    for place, (name, starts) in enumerate(jobs.items()):
        colour = LEAD_COLOUR if place == 0 else COLOURS[(place - 1) % len(COLOURS)]
        legend.append(Patch(color=colour, label=name))
        for start in starts:
            training_s = min(start.running_s, start.ended_s)
            for gpu in start.gpus:
                row, whole_s = rows.index(gpu), start.ended_s - start.begun_s
                axes.barh(row, whole_s, 0.8, start.begun_s, color=colour, alpha=0.3)
                axes.barh(row, start.ended_s - training_s, 0.8, training_s, color=colour)
    for begun_s, ended_s, node in find_drains(events):
        for index, (row_node, _) in enumerate(rows):
            if row_node == node:
                hatched = {"facecolor": "none", "edgecolor": "#c4c4c4", "hatch": "////"}
                axes.barh(index, ended_s - begun_s, 0.8, begun_s, linewidth=0, zorder=0, **hatched)
    legend.append(Patch(color=GREY, alpha=0.4, label="pale: starting"))
    legend.append(Patch(facecolor="none", edgecolor="#c4c4c4", hatch="////", label="drained"))
    end_s = max([1.0, *(start.ended_s for starts in jobs.values() for start in starts)])
    for event in events:
        axes.axvline(event.time_s, color="#303030", linewidth=1, linestyle=":")
    for time_s, text in label_events(events, near_s=EVENT_SHARE * end_s):
        axes.annotate(
            text,
            (time_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, 4),
            textcoords="offset points",
            fontsize=9,
            color="#303030",
        )
    axes.set_yticks(range(len(rows)), [f"{node}, GPU {index}" for node, index in rows])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, end_s))
    axes.set_title("the job on each GPU", pad=22)
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False)


def label_events(events: Sequence[Event], near_s: float) -> list[tuple[float, str]]:
    """Return the labels of events with their times. Events closer than ``near_s`` share a label."""
    labels: list[tuple[float, str]] = []
    last_s = -math.inf
    for event in sorted(events, key=lambda event: event.time_s):
        if event.time_s - last_s < near_s:
            time_s, text = labels.pop()
            labels.append((time_s, f"{text}, {event.text}"))
        else:
            labels.append((event.time_s, event.text))
        last_s = event.time_s
    return labels


def find_drains(events: Sequence[Event]) -> list[tuple[float, float, str]]:
    """Return the time from which each node was drained, the time when it came back, and its name."""
    about = [event for event in events if event.node]
    return [
        (drained.time_s, back.time_s, drained.node)
        for drained, back in zip(about[::2], about[1::2], strict=False)
    ]


def size_colour(gpus: int) -> str:
    """Return the colour of a number of GPUs."""
    return SIZE_COLOURS.get(gpus, GREY)
