"""The style of report pictures: colours that everyone can distinguish, on light and on dark pages.

Each colour of a drawing has a name. On the page the name is a CSS variable, so that one picture
serves both themes. The seven colours have a distance of at least 20 (CIE 1976) from each other,
with normal sight and with each of the three dichromacies (Machado, Oliveira and Fernandes 2009).
Their contrast with the page is at least 3:1. More than seven series differ by their dashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

LIGHT: Final = {
    "page": "#ffffff",
    "ink": "#1c2127",
    "muted": "#59636e",
    "rule": "#d3d9df",
    "s0": "#3270ae",
    "s1": "#e65e19",
    "s2": "#7e2543",
    "s3": "#925cff",
    "s4": "#d3698c",
    "s5": "#5c410a",
    "s6": "#4713ae",
}
"""The colours of the light page. A drawing that follows the theme may use no other colours."""
DARK: Final = {
    "page": "#15181d",
    "ink": "#e8ebee",
    "muted": "#9da7b1",
    "rule": "#3a424b",
    "s0": "#559ee7",
    "s1": "#e3733b",
    "s2": "#df2060",
    "s3": "#8655e7",
    "s4": "#e3b5b5",
    "s5": "#bfdf20",
    "s6": "#55e786",
}
HUES: Final = 7
DASHES: Final = ("-", (0, (4, 1.6)), (0, (1, 1.2)))
MARKS: Final = ("o", "s", "^")
WIDTH_IN: Final = 7.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The look of a series in a plot."""

    colour: str
    dash: Any
    mark: str
    bold: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """Return the options of a line."""
        return {
            "color": self.colour,
            "linestyle": self.dash,
            "linewidth": 2.6 if self.bold else 1.3,
            "zorder": 3 if self.bold else 2,
        }


def series_styles(names: Iterable[str], bold: Sequence[str] = ()) -> dict[str, Style]:
    """Return a style for each name, by its position. The lines of names in ``bold`` are thicker.

    Pass the result to every plot of a report, so that a policy looks the same in all of them.
    """
    return {
        name: Style(
            colour=LIGHT[f"s{k % HUES}"],
            dash=DASHES[k // HUES % len(DASHES)],
            mark=MARKS[k // HUES % len(MARKS)],
            bold=name in bold,
        )
        for k, name in enumerate(dict.fromkeys(names))
    }


def styles_for(names: Iterable[str], given: Mapping[str, Style] | None) -> Mapping[str, Style]:
    """Return ``given``. If it is None, return styles by position."""
    return series_styles(names) if given is None else given


@contextmanager
def new_drawing(height_in: float = 3.4) -> Iterator[tuple[Drawing, Any]]:
    """Yield an empty drawing and its axes, in our style."""
    look: dict[Any, Any] = {
        "font.size": 10,
        "text.color": LIGHT["ink"],
        "axes.labelcolor": LIGHT["ink"],
        "axes.edgecolor": LIGHT["muted"],
        "xtick.color": LIGHT["muted"],
        "xtick.labelcolor": LIGHT["ink"],
        "ytick.color": LIGHT["muted"],
        "ytick.labelcolor": LIGHT["ink"],
        "grid.color": LIGHT["rule"],
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.axisbelow": True,
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
    with mpl.rc_context(look):
        figure = Drawing(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="none")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.grid(visible=True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: tick_number(value))
        yield figure, axes


def tick_number(value: float) -> str:
    """Return the label of a tick, with thousands separated and without needless digits."""
    return f"{round(value, 10):,.12g}".replace("-", "\N{MINUS SIGN}")


def add_legend(figure: Drawing, axes: Any, marks: float = 1.0) -> None:
    """Put the legend below the axes, in as many columns as fit, and make room for it.

    Its marks are ``marks`` times as large as those of the plot.
    """
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    columns = max(1, min(len(labels), int(88 / (max(map(len, labels)) + 7))))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        handlelength=2.6,
        markerscale=marks,
    )
