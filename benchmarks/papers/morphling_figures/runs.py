"""Whole traces: Morphling's Figures 10 and 11."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tessera.benchmarks.papers.morphling_runs import mean_jct_h
from tessera.benchmarks.schedulers.bench_load import RunsByPoint, Varied
from tessera.simulator.comparison.comparisons import ByPolicy, jct_ratio
from tessera.simulator.figures import Figure

Row = dict[str, Figure | str]

BASELINE, PEER = "synergy", "morphling"
SWEEP_POLICIES: Final = (BASELINE, PEER)
SWEEP_NAMES: Final[Mapping[Varied, str]] = {"load": "Figure 10", "large": "Figure 11"}


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
