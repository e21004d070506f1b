"""Plots of bars in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tessera.simulator.report.model import Plot, format_value
from tessera.simulator.report.style import (
    LIGHT,
    add_legend,
    new_drawing,
    series_styles,
)
from tessera.simulator.statistics import Interval

_BAR_IN: Final = 0.19


def bars_plot(
    title: str,
    series: Mapping[str, Mapping[str, Interval]],
    *,
    label: str,
    caption: str = "",
) -> Plot:
    """Plot bars from left to right, with groups as rows: series -> group -> value.

    Groups suit many items with long names, such as policies. Series differ in colour and suit few
    items, such as kinds of information. A group that a series lacks has no bar.
    """
    looks = series_styles(series)
    groups = list(dict.fromkeys(group for values in series.values() for group in values))
    thick = 0.84 / max(1, len(series))
    descriptions = []
    with new_drawing(0.9 + _BAR_IN * len(groups) * (len(series) + 0.35)) as (figure, axes):
        for k, (name, values) in enumerate(series.items()):
            at = np.array([groups.index(group) for group in values])
            at = at + (k - (len(series) - 1) / 2) * thick
            intervals = list(values.values())
            size = np.array([one.value for one in intervals], float)
            axes.barh(at, size, 0.92 * thick, label=name, color=looks[name].colour)
            low, high = [one.low for one in intervals], [one.high for one in intervals]
            axes.hlines(at, low, high, color=LIGHT["page"], linewidth=3.2)
            axes.hlines(at, low, high, color=LIGHT["ink"], linewidth=1.2)
            _values(axes, at, intervals)
            descriptions += [f"{name}, {g}: {format_value(one.value)}" for g, one in values.items()]
        axes.set_yticks(range(len(groups)), groups)
        axes.set(xlabel=label, ylim=(len(groups) - 0.45, -0.55))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.1)
        add_legend(figure, axes)
    return Plot(
        title=title,
        drawing=figure,
        caption=caption,
        alt=f"Bars of {label}. {'; '.join(descriptions)}.",
    )


def _values(axes: Any, at: np.ndarray, intervals: Sequence[Interval]) -> None:
    """Write each value to the right of its bar."""
    for y, interval in zip(at, intervals, strict=True):
        if np.isfinite(interval.value):
            end = (
                max(interval.value, interval.high)
                if np.isfinite(interval.high)
                else max(0.0, interval.value)
            )
            axes.annotate(
                format_value(interval.value),
                (end, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=LIGHT["muted"],
            )
