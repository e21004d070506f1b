"""Plots of curves with intervals over a parameter, and of bars in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tessera.simulator.report.model import Plot, format_value
from tessera.simulator.report.style import (
    LIGHT,
    Style,
    add_legend,
    new_drawing,
    styles_for,
    tick_percentage,
)
from tessera.simulator.statistics import Interval, mean_intervals

MAX_BANDS: Final = 5
"""Largest number of curves that are drawn with bands. More curves have bars, which hide less."""
MAX_MARKED_VALUES: Final = 9
"""Largest number of values of the parameter that are marked on the axis."""
_BAR_IN: Final = 0.19


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCurve:
    """Values at ``x`` with their intervals. Missing values and intervals are NaN."""

    x: np.ndarray
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, x: Sequence[float] | np.ndarray, runs: np.ndarray) -> IntervalCurve:
        """Return means of ``runs``, of shape (seeds, points), with their t intervals."""
        value, low, high = mean_intervals(np.asarray(runs, float))
        return cls(x=np.asarray(x, float), value=value, low=low, high=high)


def curves_plot(
    title: str,
    series: Mapping[str, IntervalCurve],
    *,
    x_label: str,
    y_label: str,
    percent: bool = False,
    from_zero: bool = True,
    caption: str = "",
    styles: Mapping[str, Style] | None = None,
) -> Plot:
    """Plot values over a parameter, e.g. deadlines met over tightness.

    With ``percent``, values are fractions.
    """
    looks = styles_for(series, styles)
    descriptions = []
    with new_drawing(3.8) as (figure, axes):
        for name, curve in series.items():
            look = looks[name]
            axes.plot(curve.x, curve.value, label=name, marker=look.mark, markersize=4, **look.line)
            if len(series) <= MAX_BANDS:
                axes.fill_between(
                    curve.x, curve.low, curve.high, color=look.colour, alpha=0.18, linewidth=0
                )
            else:
                axes.vlines(curve.x, curve.low, curve.high, color=look.colour, linewidth=0.9)
            first, last = (format_value(float(curve.value[k])) for k in (0, -1))
            descriptions.append(f"{name} {first} to {last}")
        axes.set(xlabel=x_label, ylabel=y_label)
        given = np.unique(np.concatenate([curve.x for curve in series.values()]))
        if len(given) <= MAX_MARKED_VALUES:
            axes.set_xticks(given)
        if from_zero:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        if percent:
            axes.yaxis.set_major_formatter(lambda value, _: tick_percentage(value))
        add_legend(figure, axes)
    x = next(iter(series.values())).x if series else np.zeros(1)
    return Plot(
        title=title,
        drawing=figure,
        caption=caption,
        alt=f"Curves of {y_label} for {x_label} from {format_value(float(x[0]))} to "
        f"{format_value(float(x[-1]))}: {', '.join(descriptions)}.",
    )


def bars_plot(
    title: str,
    series: Mapping[str, Mapping[str, Interval]],
    *,
    label: str,
    percent: bool = False,
    caption: str = "",
    styles: Mapping[str, Style] | None = None,
) -> Plot:
    """Plot bars from left to right, with groups as rows: series -> group -> value.

    Groups suit many items with long names, such as policies. Series differ in colour and suit few
    items, such as kinds of information. A group that a series lacks has no bar.
    """
    looks = styles_for(series, styles)
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
            _values(axes, at, intervals, percent)
            descriptions += [
                f"{name}, {g}: {_value(one.value, percent)}" for g, one in values.items()
            ]
        axes.set_yticks(range(len(groups)), groups)
        axes.set(xlabel=label, ylim=(len(groups) - 0.45, -0.55))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.1)
        if percent:
            axes.xaxis.set_major_formatter(lambda value, _: tick_percentage(value))
        add_legend(figure, axes)
    return Plot(
        title=title,
        drawing=figure,
        caption=caption,
        alt=f"Bars of {label}. {'; '.join(descriptions)}.",
    )


def _values(axes: Any, at: np.ndarray, intervals: Sequence[Interval], percent: bool) -> None:
    """Write each value to the right of its bar."""
    for y, interval in zip(at, intervals, strict=True):
        if np.isfinite(interval.value):
            end = (
                max(interval.value, interval.high)
                if np.isfinite(interval.high)
                else max(0.0, interval.value)
            )
            axes.annotate(
                _value(interval.value, percent),
                (end, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=LIGHT["muted"],
            )


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else format_value(value)
