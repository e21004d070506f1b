"""Whole traces: Morphling's Figures 10 and 11 and its Table 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tessera.benchmarks.papers.bench_morphling import draw_traces, run_traces
from tessera.benchmarks.papers.morphling_known import paper_result
from tessera.benchmarks.papers.morphling_runs import mean_jct_h, table_of
from tessera.benchmarks.schedulers.bench_load import RunsByPoint, Varied
from tessera.simulator.comparison.comparisons import ByPolicy, jct_ratio
from tessera.simulator.comparison.runs import RunRequest
from tessera.simulator.figures import Figure
from tessera.simulator.sweeps.runner import Sweep

Row = dict[str, Figure | str]

BASELINE, PEER = "synergy", "morphling"
SWEEP_POLICIES: Final = (BASELINE, PEER)
SWEEP_NAMES: Final[Mapping[Varied, str]] = {"load": "Figure 10", "large": "Figure 11"}
TABLE_POLICIES: Final[Mapping[str, tuple[str, ...]]] = {
    "morphling-base": ("morphling", "sia", "synergy", "morphling-e", "morphling-r", "morphling-n"),
    "morphling-bp": ("morphling", "sia", "synergy"),
    "morphling-mt": ("morphling", "antman"),
}
"""The policies of the paper's Table 4 on each trace."""
_MEASURES: Final = ("jct_h", "p99_h", "makespan_h", "guaranteed_h", "best_effort_h")


def sweep_rows(found: RunsByPoint, ours: str) -> list[Row]:
    """Return a row for each point and policy, with ratios to ours over the jobs that both finished."""
    return [
        {
            "figure": SWEEP_NAMES[sweep].removeprefix("Figure "),
            "what": f"{sweep} {x:g}",
            "choice": policy,
            "jct_h": float(np.mean([mean_jct_h(run) for run in runs])),
            "makespan_h": _makespan_s(by_policy, policy) / 3600,
            "jct_over_ours": 1 / jct_ratio(by_policy[ours], runs).value,
        }
        for sweep, by_x in found.items()
        for x, by_policy in by_x.items()
        for policy, runs in by_policy.items()
    ]


def sweep_figures(found: RunsByPoint, ours: str) -> dict[str, Figure]:
    """Return the least and the largest ratio of the baseline's mean JCT, and of makespan, to ours.

    ``*_peer_*`` has the ratio of the baseline to Morphling's own algorithm, which the paper reports.
    """
    figures: dict[str, Figure] = {}
    for sweep, by_x in found.items():
        name = SWEEP_NAMES[sweep].lower().replace(" ", "")
        for prefix, policy in (("", ours), ("peer_", PEER)):
            ratios = [1 / jct_ratio(by[policy], by[BASELINE]).value for by in by_x.values()]
            figures[f"{name}_{prefix}least_jct_ratio"] = min(ratios)
            figures[f"{name}_{prefix}most_jct_ratio"] = max(ratios)
        figures[f"{name}_most_makespan_ratio"] = max(
            _makespan_s(by, BASELINE) / _makespan_s(by, ours) for by in by_x.values()
        )
        every = [run for by in by_x.values() for runs in by.values() for run in runs]
        figures[f"{name}_unfinished"] = sum(int((~np.isfinite(r.end_s)).sum()) for r in every)
    return figures


def _makespan_s(by_policy: ByPolicy, policy: str) -> float:
    return float(np.mean([run.figures["makespan_s"] for run in by_policy[policy]]))


def run_table_4(
    asked: RunRequest, ours: str, draws: int, sweep: Sweep
) -> tuple[list[Row], dict[str, Figure]]:
    """Return the rows and the figures of Table 4: the paper's policies and ours on its traces."""
    rows: list[Row] = []
    for trace, policies in TABLE_POLICIES.items():
        works = draw_traces([trace], asked.work.rounds, asked.work.seed, draws)
        runs = run_traces(works, [*policies, ours], asked, sweep)
        rows += [_table_row(row) for row in table_of(runs) if row["source"] == "here"]
    return rows, table_4_figures(rows, ours)


def _table_row(row: Row) -> Row:
    """Return a run's row with the paper's results next to it."""
    known = paper_result(str(row["trace"]), str(row["policy"]))
    shown: Row = {"figure": "Table 4", "what": row["trace"], "choice": row["policy"]}
    for name in _MEASURES:
        shown[name] = row[name]
        shown[f"paper_{name}"] = np.nan if known is None else getattr(known, name)
        shown[f"{name.removesuffix('_h')}_vs_paper"] = row[f"{name.removesuffix('_h')}_vs_paper"]
    return shown


def table_4_figures(rows: Sequence[Row], ours: str) -> dict[str, Figure]:
    """Return our mean JCT over the paper's Morphling, and how far its policies deviate from it."""
    figures: dict[str, Figure] = {}
    for trace in TABLE_POLICIES:
        own = [row for row in rows if row["what"] == trace]
        (mine,) = [row for row in own if row["choice"] == ours]
        (peer,) = [row for row in own if row["choice"] == PEER]
        name = f"table4_{trace.removeprefix('morphling-')}"
        figures[f"{name}_jct_vs_peer"] = float(mine["jct_h"]) / float(peer["jct_h"]) - 1
        figures[f"{name}_jct_vs_paper"] = float(mine["jct_h"]) / float(peer["paper_jct_h"]) - 1
        figures[f"{name}_peer_jct_vs_paper"] = float(peer["jct_vs_paper"])
    deviations = [
        abs(float(row[f"{name}_vs_paper"]))
        for row in rows
        if row["choice"] != ours
        for name in ("jct", "p99", "makespan")
    ]
    return figures | {
        "table4_mean_deviation": float(np.mean(deviations)),
        "table4_largest_deviation": max(deviations),
    }
