"""The report page of ``tessera simulate``: tables and pictures of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.service.cli.render import format_span
from tessera.service.cli.simulation.runs import PolicyRun
from tessera.service.cli.simulation.view import PolicyRow
from tessera.service.cli.simulation.world import ChosenScenario
from tessera.simulator.comparison.plots import MAX_DRAWN_POLICIES, comparison_plots
from tessera.simulator.figures import Figure, Report
from tessera.simulator.report.model import RunReport, report_of
from tessera.simulator.report.write import write_report


def make_report(
    runs: Sequence[PolicyRun],
    table: Sequence[PolicyRow],
    chosen: ChosenScenario,
    facts: Mapping[str, Any],
    warned: Sequence[str],
) -> RunReport:
    """Return the report page: table, time series, JCT, queue, gaps and GPU assignments."""
    by_policy = {run.policy: [run.ran] for run in runs}
    best = str(min(table, key=lambda entry: float(entry["jct_mean_s"]))["policy"])
    shown = [run.policy for run in runs][:MAX_DRAWN_POLICIES]
    first = runs[0].ran.figures
    figures: dict[str, Figure] = {
        "jobs": len(chosen.scenario.arrivals),
        "gpus": chosen.scenario.gpus,
        "load": chosen.load,
        "dropped": len(chosen.dropped),
        "window_s": first["horizon_s"],
    }
    return report_of(
        Report(seed=int(facts["seed"]), figures=figures, table=list(table)),
        title="Simulation",
        options=facts,
        notes=warned,
        plots=comparison_plots(by_policy, best, shown),
        summary=f"{len(runs)} policies on the same jobs, cluster and costs. Throughput, utilisation and"
        f" the time series cover the first {format_span(first['horizon_s'])}.",
    )


def write_page(
    runs: Sequence[PolicyRun],
    table: Sequence[PolicyRow],
    chosen: ChosenScenario,
    facts: Mapping[str, Any],
    warned: Sequence[str],
    folder: Path,
) -> Path:
    """Write the report page with its pictures into ``folder``, and return its path."""
    return write_report(make_report(runs, table, chosen, facts, warned), folder)
