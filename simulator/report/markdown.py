"""A report as Markdown, with pictures in files beside it."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.simulator.report.model import RunReport, Table, Value, as_given, written


def text(report: RunReport, pictures: Sequence[str]) -> str:
    """Return the Markdown; ``pictures`` are the files' names, one for each plot."""
    lines = [f"# {report.title}", ""]
    if report.summary:
        lines += [report.summary, ""]
    lines += [
        f"Commit `{report.commit}`, seeds {', '.join(map(str, report.seeds))}.", "",
        "```", report.command, "```", "",
    ]  # fmt: skip
    if report.figures:
        figures = [(name, value) for name, value in report.figures.items()]
        lines += ["## Figures", "", *table(("figure", "value"), figures), ""]
    if report.notes:
        lines += ["## Notes", "", *(line for note in report.notes for line in (note, ""))]
    for plot, picture in zip(report.plots, pictures, strict=True):
        alt = plot.alt.replace("[", "(").replace("]", ")")
        lines += [f"## {plot.title}", "", f"![{alt}]({picture})", ""]
        lines += [plot.caption, ""] if plot.caption else []
    for found in report.tables:
        lines += _titled(found)
    facts = [(f"option {k}", as_given(v)) for k, v in report.options.items()]
    facts += list(report.versions.items())
    return "\n".join([*lines, "## What ran", "", *table(("what", "value"), facts), ""])


def table(columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> list[str]:
    """Return the lines of a table, numbers to the right."""
    right = [
        k > 0 and all(v is None or type(v) in (int, float) for v in (row[k] for row in rows))
        for k in range(len(columns))
    ]
    marks = ["---:" if number else "---" for number in right]
    body = [[_cell(written(value)) for value in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([_cell(c) for c in columns], marks, *body)]


def _titled(found: Table) -> list[str]:
    caption = [found.caption, ""] if found.caption else []
    return [f"## {found.title}", "", *table(found.columns, found.rows), "", *caption]


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
