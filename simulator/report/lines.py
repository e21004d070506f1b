"""Plots of values over time and over rounds, and of the distribution of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tessera.simulator.report.model import Plot, format_value
from tessera.simulator.report.style import Style, add_legend, new_drawing, styles_for, tick_number

MAX_POINTS: Final = 400
"""The largest number of points drawn for a line. A longer line is drawn as means over this many
equal parts of the time."""
CROWDED_PLOT: Final = (8, 150)
"""The number of series from which each line has fewer points, and that number of points. Many lines
are easier to distinguish if their points are means over longer times."""
UNITS: Final = (
    (3 * 86_400.0, 86_400.0, "days"),
    (10_800.0, 3600.0, "hours"),
    (180.0, 60.0, "minutes"),
)
"""The seconds from which a unit of time is used, the seconds of the unit, and its name."""
TICKS: Final = {
    1: "1 s",
    10: "10 s",
    60: "1 min",
    600: "10 min",
    3600: "1 h",
    36_000: "10 h",
    86_400: "1 day",
    864_000: "10 days",
    8_640_000: "100 days",
}
"""The marks of a logarithmic axis of seconds."""

Steps = tuple[np.ndarray, np.ndarray]
"""Ascending times in seconds, and the value from each time on."""


def time_plot(
    title: str,
    series: Mapping[str, Steps],
    *,
    label: str,
    end_s: float,
    caption: str = "",
    styles: Mapping[str, Style] | None = None,
) -> Plot:
    """Plot values that hold until they change: throughput, queue length, running GPUs.

    ``label`` names the value and its unit. All lines end at ``end_s``.
    """
    scale, unit = time_unit(end_s)
    points = CROWDED_PLOT[1] if len(series) >= CROWDED_PLOT[0] else MAX_POINTS
    looks = styles_for(series, styles)
    descriptions, averaged = [], False
    with new_drawing() as (figure, axes):
        for name, (at_s, values) in series.items():
            edges_s, shown, coarse = thin_steps(
                np.asarray(at_s, float), np.asarray(values, float), end_s, points
            )
            averaged |= coarse
            axes.stairs(shown, edges_s / scale, baseline=None, label=name, **looks[name].line)
            mean = float(np.average(shown, weights=np.diff(edges_s))) if len(shown) else 0.0
            descriptions.append(f"{name} {format_value(mean)}")
        axes.set(xlabel=f"time ({unit})", ylabel=label, xlim=(0, end_s / scale))
        axes.set_ylim(bottom=0)
        add_legend(figure, axes)
    seconds = format_value(round(end_s / points))
    means = f"Each value is a mean over {seconds} s. " if averaged else ""
    return Plot(
        title=title,
        drawing=figure,
        caption=f"{means}{caption}".strip(),
        alt=f"Lines of {label} over {format_value(end_s / scale)} {unit}. Means: {', '.join(descriptions)}.",
    )


def thin_steps(
    at_s: np.ndarray, values: np.ndarray, end_s: float, points: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the edges and values of at most ``points`` steps, and whether they are means.

    The area below the steps stays the same.
    """
    inside = at_s < end_s
    at_s, values = at_s[inside], values[inside]
    edges_s = np.append(at_s, end_s)
    if len(values) <= points:
        return edges_s, values, False
    area = np.append(0.0, np.cumsum(values * np.diff(edges_s)))
    coarse_s = np.linspace(at_s[0], end_s, points + 1)
    return coarse_s, np.diff(np.interp(coarse_s, edges_s, area)) / np.diff(coarse_s), True


def distribution_plot(
    title: str,
    samples: Mapping[str, np.ndarray],
    *,
    label: str,
    totals: Mapping[str, int] | None = None,
    seconds: bool = False,
    caption: str = "",
    styles: Mapping[str, Style] | None = None,
) -> Plot:
    """Plot the cumulative distribution of a value of jobs, such as the JCT, on a logarithmic axis.

    ``totals`` has the number of all jobs of each series. If some jobs have no value, because they
    did not finish, the curve ends below 1. With ``seconds``, the axis has marks at minutes, hours
    and days.
    """
    looks = styles_for(samples, styles)
    medians = []
    with new_drawing() as (figure, axes):
        for name, values in samples.items():
            ordered = np.sort(np.asarray(values, float))
            total = len(ordered) if totals is None else totals[name]
            shares = np.arange(1, len(ordered) + 1) / max(1, total)
            kept = np.linspace(0, len(ordered) - 1, min(MAX_POINTS, len(ordered))).astype(int)
            axes.step(ordered[kept], shares[kept], where="post", label=name, **looks[name].line)
            half = format_value(float(np.median(ordered))) if len(ordered) else "none"
            medians.append(f"{name} {half} ({len(ordered):,} of {total:,} jobs)")
        axes.set(xlabel=label, ylabel="share of jobs", ylim=(0, 1.02))
        if any(np.any(np.asarray(values) > 0) for values in samples.values()):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: tick_number(value))
            if seconds:
                low, high = axes.get_xlim()
                shown = {at: text for at, text in TICKS.items() if low <= at <= high}
                axes.set_xticks(list(shown), list(shown.values()))
                axes.minorticks_off()
        add_legend(figure, axes)
    return Plot(
        title=title,
        drawing=figure,
        caption=caption,
        alt=f"Cumulative shares of jobs by {label}. Medians{' in seconds' if seconds else ''}: "
        f"{', '.join(medians)}.",
    )


def gap_plot(
    title: str,
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    caption: str = "",
    styles: Mapping[str, Style] | None = None,
) -> Plot:
    """Plot relative gaps to a proven bound as points, round by round.

    A series is (round numbers, gaps as fractions). Rounds without a bound have an infinite gap. They
    are not drawn, and their number is stated below the picture. If there are many rounds, each point
    is the largest gap of a few. Below 0.01 %, the axis is linear.
    """
    looks = styles_for(series, styles)
    largest_gaps, unbounded, few = [], [], 1
    with new_drawing() as (figure, axes):
        for name, (rounds, gaps) in series.items():
            gap = np.asarray(gaps, float)
            known = np.isfinite(gap)
            at, largest, of = worst_of_groups(np.asarray(rounds)[known], gap[known])
            few = max(few, of)
            axes.plot(
                at,
                100 * largest,
                label=name,
                linestyle="none",
                marker=looks[name].mark,
                markersize=3.5,
                color=looks[name].colour,
                markeredgewidth=0,
            )
            most = f"{format_value(100 * float(largest.max()))} %" if known.any() else "none"
            largest_gaps.append(f"{name} {most}")
            if not known.all():
                unbounded.append(f"{name} {int((~known).sum()):,} of {len(gap):,}")
        axes.set(xlabel="round", ylabel="gap (%)")
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: tick_number(value))
        add_legend(figure, axes, marks=1.8)
    grouped = f"Each point is the largest gap of up to {few} rounds. " if few > 1 else ""
    without = f"Rounds without a bound: {', '.join(unbounded)}. " if unbounded else ""
    return Plot(
        title=title,
        drawing=figure,
        caption=f"{grouped}{without}{caption}".strip(),
        alt=f"Gap to the bound by round. Largest: {', '.join(largest_gaps)}.",
    )


def worst_of_groups(
    rounds: np.ndarray, gaps: np.ndarray, points: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the round and the size of the largest gap in each group of rounds, and the group size."""
    few = -(-len(gaps) // points) or 1
    starts = range(0, len(gaps), few)
    at = np.array([s + int(np.argmax(gaps[s : s + few])) for s in starts], np.int64)
    return rounds[at], gaps[at], few


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit in which times up to ``longest_s`` are shown: its seconds and its name."""
    return next(((size, name) for least, size, name in UNITS if longest_s >= least), (1.0, "s"))
