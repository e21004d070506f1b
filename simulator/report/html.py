"""A report as one HTML page that needs nothing else: styles and pictures are in it, and no scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Final

from tessera.simulator.report.model import Plot, RunReport, Table, Value, as_given, written
from tessera.simulator.report.pictures import svg
from tessera.simulator.report.style import DARK, LIGHT

LONG: Final = 20
"""A table of more rows may be broken across printed pages."""


def page(report: RunReport) -> str:
    """Return the whole page."""
    parts = [("figures", "Figures", _table(_figures(report)))] if report.figures else []
    parts += [
        (f"plot-{k}", plot.title, _plot(plot, f"p{k}")) for k, plot in enumerate(report.plots, 1)
    ]
    parts += [
        (f"table-{k}", table.title, _table(table)) for k, table in enumerate(report.tables, 1)
    ]
    if report.notes:
        notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
        parts.insert(bool(report.figures), ("notes", "Notes", notes))
    parts.append(("origin", "How to repeat it", _origin(report)))
    contents = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in parts)
    sections = "\n".join(
        f'<section id="{key}" aria-labelledby="{key}-title"{_long(report, key)}>'
        f'<h2 id="{key}-title">{escape(title)}</h2>{content}</section>'
        for key, title, content in parts
    )
    summary = f"<p>{escape(report.summary)}</p>" if report.summary else ""
    seeds = f"seed{'s' * (len(report.seeds) > 1)} {', '.join(map(str, report.seeds))}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.title)}</title>
<style>{_theme()}{files(__package__).joinpath("page.css").read_text("utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(report.title)}</h1>
{summary}
<p class="muted">commit <code>{escape(report.commit)}</code>, {seeds}</p>
</header>
<nav aria-label="Contents"><ol>{contents}</ol></nav>
<main>
{sections}
</main>
</body>
</html>
"""


def _theme() -> str:
    """Return the colours: light ones, and dark ones on screens that prefer them."""

    def variables(colours: Mapping[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{colour};" for name, colour in colours.items()) + "}"

    dark = f"@media screen and (prefers-color-scheme: dark){{{variables(DARK)}}}"
    return variables(LIGHT) + dark


def _long(report: RunReport, key: str) -> str:
    kind, _, number = key.partition("-")
    rows = len(report.tables[int(number) - 1].rows) if kind == "table" else 0
    return ' class="long"' if rows > LONG else ""


def _figures(report: RunReport) -> Table:
    return Table(title="Figures", columns=("figure", "value"), rows=tuple(report.figures.items()))


def _plot(plot: Plot, prefix: str) -> str:
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
    return f"<figure>{_wide(plot.title, svg(plot, prefix))}{caption}</figure>"


def _table(table: Table) -> str:
    numeric = [
        all(_is_number(row[k]) for row in table.rows) and k > 0 for k in range(len(table.columns))
    ]
    kinds = [' class="number"' if number else "" for number in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>'
        for name, kind in zip(table.columns, kinds, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(written(row[0]))}</th>'
        + "".join(
            f"<td{kind}>{escape(written(value))}</td>"
            for value, kind in zip(row[1:], kinds[1:], strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return _wide(
        table.title,
        f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
    )


def _origin(report: RunReport) -> str:
    facts: list[tuple[str, Value]] = [
        ("commit", report.commit), ("seeds", ", ".join(map(str, report.seeds))),
        *((f"option {name}", as_given(value)) for name, value in report.options.items()),
        *report.versions.items(),
    ]  # fmt: skip
    table = Table(title="What ran", columns=("what", "value"), rows=tuple(facts))
    command = f'<pre tabindex="0"><code>{escape(report.command)}</code></pre>'
    return f"{command}<p></p>{_table(table)}"


def _wide(title: str, content: str) -> str:
    """Return ``content`` in a box of its own that scrolls sideways where the page is narrow."""
    return (
        f'<div class="wide" role="group" tabindex="0" aria-label="{escape(title)}">{content}</div>'
    )


def _is_number(value: Value) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
