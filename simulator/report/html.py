"""A report as one self-contained HTML page, with styles and pictures inside and without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tessera.simulator.report.model import RunReport, Table, Value, format_value, option_text
from tessera.simulator.report.pictures import render_svg
from tessera.simulator.report.style import DARK, LIGHT
from tessera.simulator.report.templates import TEMPLATES, read_resource

LONG_TABLE_ROWS: Final = 20
"""Largest number of rows of a table that is not broken across printed pages."""


def render_page(report: RunReport) -> str:
    """Return the HTML of the whole page."""
    return TEMPLATES.get_template("page.html.jinja").render(
        report=report,
        style=_theme() + read_resource("page.css"),
        figures=_pairs("Figures", "figure", report.figures),
        pictures=[render_svg(plot, f"p{k}") for k, plot in enumerate(report.plots, 1)],
        long=LONG_TABLE_ROWS,
        numeric=_numeric,
        written=format_value,
        origin=_pairs("Run", "item", _origin(report)),
    )


def _theme() -> str:
    """Return the CSS of the colours: light ones, and dark ones on screens that prefer them."""

    def variables(colours: Mapping[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{colour};" for name, colour in colours.items()) + "}"

    dark = f"@media screen and (prefers-color-scheme: dark){{{variables(DARK)}}}"
    return variables(LIGHT) + dark


def _pairs(title: str, name: str, values: Mapping[str, Value]) -> Table:
    return Table(title=title, columns=(name, "value"), rows=tuple(values.items()))


def _origin(report: RunReport) -> dict[str, Value]:
    return {
        "commit": report.commit,
        "seeds": ", ".join(map(str, report.seeds)),
        **{f"option {name}": option_text(value) for name, value in report.options.items()},
        **report.versions,
    }


def _numeric(table: Table) -> list[bool]:
    """Return whether each column holds numbers, which are right-aligned.

    The first column names the rows.
    """
    return [
        k > 0 and all(_is_number(row[k]) for row in table.rows) for k in range(len(table.columns))
    ]


def _is_number(value: Value) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
