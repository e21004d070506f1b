"""The contents of a report."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from matplotlib.figure import Figure as Drawing

from tessera.formulation.base.release import installed_version
from tessera.simulator.figures import Figure, Report
from tessera.simulator.provenance import measured_commit

Value = Figure | str | None

MINUS: Final = "\N{MINUS SIGN}"
MISSING_VALUE: Final = "\N{EN DASH}"
LIBRARIES: Final = ("numpy", "scipy", "ortools", "cvxpy", "pulp", "numba", "matplotlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture.

    ``alt`` describes it to readers who cannot see it; ``caption`` adds facts that it does not show.
    """

    title: str
    drawing: Drawing
    alt: str
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of values. The first value of each row names it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""

    @classmethod
    def from_rows(cls, title: str, rows: Sequence[Mapping[str, Value]], caption: str = "") -> Table:
        """Return the table of ``rows``, with a column for every key, in order of appearance."""
        columns = tuple(dict.fromkeys(key for row in rows for key in row))
        cells = tuple(tuple(row.get(key, "") for key in columns) for row in rows)
        return cls(title=title, columns=columns, rows=cells, caption=caption)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run, with everything that is needed to repeat it."""

    title: str
    command: str
    commit: str
    seeds: tuple[int, ...]
    versions: dict[str, str]
    options: dict[str, Any]
    figures: dict[str, Figure]
    summary: str = ""
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Paragraphs that explain the figures, e.g. deviations and their reasons."""


def report_of(
    outcome: Report,
    *,
    title: str,
    options: Mapping[str, Any],
    plots: Sequence[Plot] = (),
    summary: str = "",
    notes: Sequence[str] = (),
) -> RunReport:
    """Return the report of results that the command line of this process produced."""
    return RunReport(
        title=title,
        summary=summary,
        command=shlex.join(["tessera", *sys.argv[1:]]),
        commit=measured_commit(),
        seeds=(outcome.seed,),
        versions=run_versions(),
        options=dict(options),
        figures=dict(outcome.figures),
        plots=tuple(plots),
        tables=(Table.from_rows("Results", outcome.table),) if outcome.table else (),
        notes=tuple(notes),
    )


def run_versions() -> dict[str, str]:
    """Return the machine, and the versions of everything on which results or times depend."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    facts = {
        "machine": machine,
        "python": platform.python_version(),
        "tessera": installed_version(),
    }
    for library in LIBRARIES:
        try:
            facts[library] = version(library)
        except PackageNotFoundError:
            facts[library] = "not installed"
    return facts


def format_value(value: object) -> str:
    """Return a value for readers: four digits, with thousands separated. A missing value is a dash."""
    match value:
        case None:
            return MISSING_VALUE
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if value != value:  # NaN
            return MISSING_VALUE
        case float() if abs(value) == float("inf"):
            return "∞" if value > 0 else f"{MINUS}∞"
        case float() if abs(value) >= 1000:
            return f"{value:,.0f}".replace("-", MINUS)
        case float():
            return f"{value:.4g}".replace("-", MINUS)
    return str(value)


def option_text(option: object) -> str:
    """Return an option's value in the form in which users give it."""
    if isinstance(option, list | tuple):
        return ", ".join(map(str, option))
    return "none" if option is None else str(option)
