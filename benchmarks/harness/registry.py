"""The registry of benchmarks: a case is a function of typed options that returns figures."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tessera.simulator.data import MissingData
from tessera.simulator.figures import Figure, Report
from tessera.simulator.provenance import json_number, measured_commit

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A condition on a figure, e.g. ``<= 0.2``.

    The benchmark's docstring gives the reason for the limit.
    """

    comparison: str
    limit: Figure

    def holds(self, figure: Figure) -> bool:
        """Return whether ``figure`` satisfies the bound; NaN never does."""
        return _COMPARE[self.comparison](figure, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkCase:
    """A registered benchmark."""

    name: str
    run: Callable[..., Report]
    bounds: dict[str, Bound]
    smoke: dict[str, Any]
    """Options with which the benchmark ends within seconds, for ``make verify``."""


CASES: dict[str, BenchmarkCase] = {}


def register_case(
    name: str, *, smoke: dict[str, Any], **bounds: tuple[str, Figure]
) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Register the decorated function as benchmark ``name``."""

    def register(run: Callable[..., Report]) -> Callable[..., Report]:
        CASES[name] = BenchmarkCase(
            name=name,
            run=run,
            smoke=smoke,
            bounds={k: Bound(comparison=c, limit=v) for k, (c, v) in bounds.items()},
        )
        return run

    return register


def run_case(found: BenchmarkCase, options: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Run a case, and return the object that ``--json`` prints."""
    shown = {
        "bench": found.name,
        "command": shlex.join(["tessera", *arguments]),
        "commit": measured_commit(),
    }
    try:
        report = found.run(**options)
    except MissingData as reason:
        return {**shown, "skipped": str(reason), "figures": {}, "bounds": {}, "ok": True}
    bounds = {
        k: b for k, b in found.bounds.items() if k in report.figures and k not in report.waived
    }
    result: dict[str, Any] = {
        **shown,
        "seed": report.seed,
        "figures": {k: json_number(v) for k, v in report.figures.items()},
        "bounds": {k: {"comparison": b.comparison, "limit": b.limit} for k, b in bounds.items()},
        "ok": all(b.holds(report.figures[k]) for k, b in bounds.items()),
    }
    if report.table:
        result["table"] = [{k: json_number(v) for k, v in row.items()} for row in report.table]
    return result
