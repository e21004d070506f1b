"""Figures and tables of runs on Morphling's traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from tessera.benchmarks.papers.morphling_known import KNOWN_RESULTS, paper_result
from tessera.formulation.base.tables import Bools
from tessera.simulator.comparison.policies import is_ours
from tessera.simulator.comparison.runs import FinishedRun
from tessera.simulator.figures import Figure

SHORT_S: Final = 300.0
"""The run time alone below which a job counts as short."""
HOUR_S: Final = 3600.0
GUARANTORS: Final = ("antman", "morphling", "morphling-r", "morphling-e", "morphling-n")
"""The published schedulers that serve guaranteed jobs first and do not suspend them."""
_ADDED: Final = ("refused", "guaranteed", "guarantees_broken")
"""The figures of a run that are added over draws. Of all others, it is the mean."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRuns:
    """The runs of all policies on a trace, each with the jobs of all draws.

    ``guaranteed`` is bool[jobs]. ``bound_s`` is a mean JCT that no schedule can beat.
    """

    runs: Mapping[str, FinishedRun]
    guaranteed: Bools
    bound_s: float

    def best_other(
        self, measure: Callable[[FinishedRun], float], among: Iterable[str] | None = None
    ) -> float:
        """Return the least measure of the policies that are not ours, or NaN without any."""
        names = self.runs if among is None else among
        return min((measure(self.runs[p]) for p in names if not is_ours(p)), default=np.nan)


def pool_runs(runs: Sequence[FinishedRun]) -> FinishedRun:
    """Return the runs of a policy on several draws as one run with the jobs of all."""
    first = runs[0]
    figures = {
        name: float((np.sum if name in _ADDED else np.mean)([run.figures[name] for run in runs]))
        for name in first.figures
    }
    return replace(
        first,
        figures=figures,
        arrival_s=np.concatenate([run.arrival_s for run in runs]),
        end_s=np.concatenate([run.end_s for run in runs]),
        alone_s=np.concatenate([run.alone_s for run in runs]),
    )


def mean_jct_h(ran: FinishedRun, which: Bools | None = None) -> float:
    """Return the mean JCT in hours of the jobs that ended, or NaN without any.

    If ``which`` is given, only the jobs in it count.
    """
    jct_s = ran.jct_s[np.isfinite(ran.end_s) & (True if which is None else which)]
    return float(jct_s.mean()) / HOUR_S if len(jct_s) else float("nan")


def p99_h(ran: FinishedRun) -> float:
    """Return the 99th percentile of JCT in hours of the jobs that ended."""
    return float(np.percentile(ran.jct_s[np.isfinite(ran.end_s)], 99)) / HOUR_S


def short_part(mine: FinishedRun, baseline: FinishedRun) -> float:
    """Return the share of short jobs in the JCT that ``mine`` gains on ``baseline``."""
    both = np.isfinite(mine.end_s) & np.isfinite(baseline.end_s)
    gain_s = np.where(both, baseline.end_s, 0.0) - np.where(both, mine.end_s, 0.0)
    whole_s = float(gain_s.sum())
    return float(gain_s[mine.alone_s < SHORT_S].sum()) / whole_s if whole_s else float("nan")


def trace_figures(of: TraceRuns, ours: str) -> dict[str, Figure]:
    """Return the figures of our policy on a trace without guaranteed jobs."""
    mine = of.runs[ours]
    figures: dict[str, Figure] = {
        "jct_h": mean_jct_h(mine),
        "jct_p99_h": p99_h(mine),
        "makespan_h": mine.figures["makespan_s"] / HOUR_S,
        "bound_h": of.bound_s / HOUR_S,
        "jct_over_bound": mean_jct_h(mine) * HOUR_S / of.bound_s - 1.0,
        "jct_gain_vs_best_other": 1.0 - mean_jct_h(mine) / of.best_other(mean_jct_h),
    }
    for baseline in ("morphling", "synergy", "sia", "srt"):
        if baseline in of.runs:
            figures[f"jct_gain_vs_{baseline}"] = 1.0 - mean_jct_h(mine) / mean_jct_h(
                of.runs[baseline]
            )
    if "morphling" in of.runs:
        figures["short_part_of_gain"] = short_part(mine, of.runs["morphling"])
    figures["short_share"] = float((mine.alone_s < SHORT_S).mean())
    return figures


def promised_figures(of: TraceRuns, ours: str) -> dict[str, Figure]:
    """Return the figures of our policy on a trace with guaranteed jobs.

    ``*_gain_vs_best_guarantor`` compares it with ``GUARANTORS`` alone, and
    ``jct_gain_vs_best_other`` with all policies, most of which suspend guaranteed jobs.
    """
    mine = of.runs[ours]
    guarantors = [policy for policy in of.runs if policy in GUARANTORS]
    every = np.ones(len(of.guaranteed), dtype=np.bool_)
    classes = {"": every, "guaranteed_": of.guaranteed, "best_effort_": ~of.guaranteed}
    figures: dict[str, Figure] = {}
    for name, which in classes.items():
        jct_h = figures[f"{name}jct_h"] = mean_jct_h(mine, which)
        other_h = of.best_other(partial(mean_jct_h, which=which), guarantors)
        figures[f"{name}jct_gain_vs_best_guarantor"] = 1.0 - jct_h / other_h
    owed = mine.figures["guaranteed"]
    return figures | {
        "jct_p99_h": p99_h(mine),
        "makespan_h": mine.figures["makespan_s"] / HOUR_S,
        "jct_gain_vs_best_other": 1.0 - mean_jct_h(mine) / of.best_other(mean_jct_h),
        "bound_h": of.bound_s / HOUR_S,
        "guarantees_kept": 1.0 - mine.figures["guarantees_broken"] / owed if owed else np.nan,
    }


def table_of(runs: Mapping[str, TraceRuns]) -> list[dict[str, Figure | str]]:
    """Return a row for each run by mean JCT, followed by the known results for each trace."""
    table: list[dict[str, Figure | str]] = []
    for trace, of in runs.items():
        for policy, one in sorted(of.runs.items(), key=lambda pair: mean_jct_h(pair[1])):
            table.append(_row(trace, policy, one, of.guaranteed))
        none: dict[str, Figure | str] = dict.fromkeys(table[-1], np.nan)
        for known in (k for k in KNOWN_RESULTS if k.trace == trace):
            table.append(
                none
                | {
                    "trace": trace,
                    "policy": known.policy,
                    "source": known.source,
                    "jct_h": known.jct_h,
                    "p99_h": known.p99_h,
                    "makespan_h": known.makespan_h,
                    "guaranteed_h": known.guaranteed_h,
                    "best_effort_h": known.best_effort_h,
                }
            )
    return table


def _row(trace: str, policy: str, ran: FinishedRun, promised: Bools) -> dict[str, Figure | str]:
    short = ran.alone_s < SHORT_S
    row: dict[str, Figure | str] = {
        "trace": trace,
        "policy": policy,
        "source": "here",
        "jct_h": mean_jct_h(ran),
        "p99_h": p99_h(ran),
        "makespan_h": ran.figures["makespan_s"] / HOUR_S,
        "guaranteed_h": mean_jct_h(ran, promised),
        "best_effort_h": mean_jct_h(ran, ~promised),
        "guarantees_broken": ran.figures["guarantees_broken"] if promised.any() else np.nan,
        "short_h": mean_jct_h(ran, short),
        "long_h": mean_jct_h(ran, ~short),
        "restarts": ran.figures["restarts"],
        "restart_share": ran.figures["restart_share"],
        "decide_s": ran.figures["decide_s"],
    }
    known = paper_result(trace, policy)
    for name in ("jct_h", "p99_h", "makespan_h", "guaranteed_h", "best_effort_h"):
        here, there = float(row[name]), np.nan if known is None else getattr(known, name)
        row[f"{name.removesuffix('_h')}_vs_paper"] = here / there - 1.0
    return row
