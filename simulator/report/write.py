"""Writing of reports into a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tessera.simulator.report.html import render_page
from tessera.simulator.report.markdown import render_markdown
from tessera.simulator.report.model import Plot, RunReport
from tessera.simulator.report.pictures import render_png


def write_report(report: RunReport, folder: Path) -> Path:
    """Write ``report.html``, ``report.md`` and a PNG for each plot, and return the page.

    The same report gives the same bytes. Files of an earlier report are overwritten.
    """
    names = write_pictures(report.plots, folder)
    (folder / "report.md").write_text(render_markdown(report, names), encoding="utf-8")
    file = folder / "report.html"
    file.write_text(render_page(report), encoding="utf-8")
    return file


def write_pictures(plots: Sequence[Plot], folder: Path) -> list[str]:
    """Write a PNG for each plot, named by its number and title, and return the names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{k:02d}-{_slug(plot.title)}.png" for k, plot in enumerate(plots, 1)]
    for plot, name in zip(plots, names, strict=True):
        (folder / name).write_bytes(render_png(plot.drawing))
    return names


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "plot"
