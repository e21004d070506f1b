"""Writing of reports into a folder."""

from __future__ import annotations

from pathlib import Path

from tessera.simulator.report.html import render_page
from tessera.simulator.report.model import RunReport


def write_report(report: RunReport, folder: Path) -> Path:
    """Write ``report.html`` into ``folder``, and return its path.

    The same report gives the same bytes. An earlier report is overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.html"
    file.write_text(render_page(report), encoding="utf-8")
    return file
