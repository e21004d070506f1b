"""A report as Markdown, with pictures in separate files."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.simulator.report.model import RunReport, Value, format_value, option_text
from tessera.simulator.report.templates import TEMPLATES


def render_markdown(report: RunReport, pictures: Sequence[str]) -> str:
    """Return the Markdown. ``pictures`` are the names of the files, one for each plot."""
    facts = [(f"option {name}", option_text(value)) for name, value in report.options.items()]
    return TEMPLATES.get_template("text.md.jinja").render(
        report=report,
        pictures=list(zip(report.plots, pictures, strict=True)),
        facts=[*facts, *report.versions.items()],
        table=lambda columns, rows: "\n".join(table_lines(columns, list(rows))),
    )


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> list[str]:
    """Return the lines of a table, with numbers right-aligned."""
    right = [
        k > 0 and all(v is None or type(v) in (int, float) for v in (row[k] for row in rows))
        for k in range(len(columns))
    ]
    marks = ["---:" if number else "---" for number in right]
    body = [[_cell(format_value(value)) for value in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([_cell(c) for c in columns], marks, *body)]


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
