"""The plots of a comparison of policies: throughput, JCT, queues, gaps and GPU maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tessera.simulator.comparison.comparisons import (
    ByPolicy,
    comparison_rows,
    jct_ratio,
    throughput_ratio,
)
from tessera.simulator.comparison.policies import is_ilp, is_ours
from tessera.simulator.report.comparisons import bars_plot
from tessera.simulator.report.gpu_map import gpu_map
from tessera.simulator.report.lines import distribution_plot, gap_plot, time_plot
from tessera.simulator.report.model import Plot
from tessera.simulator.report.style import series_styles
from tessera.simulator.statistics import Interval

ARENA: Final = "arena"
MAX_DRAWN_POLICIES: Final = 7
"""Largest number of lines in a plot."""


def comparison_plots(by_policy: ByPolicy, best: str, shown: Sequence[str]) -> list[Plot]:
    """Return the plots of a comparison. Plots over time, gaps and maps are of the first seed.

    ``shown`` are the policies whose lines and GPU maps are drawn.
    """
    return list(_pictures(by_policy, best, shown))


def _pictures(by_policy: ByPolicy, best: str, shown: Sequence[str]) -> Iterator[Plot]:
    looks = series_styles(shown, bold=[best])
    first = {name: by_policy[name][0] for name in shown}
    end_s = max(ran.figures["horizon_s"] for ran in first.values())
    yield _ratios(by_policy)
    yield distribution_plot(
        "Job completion time",
        {name: ran.jct_s[np.isfinite(ran.jct_s)] for name, ran in first.items()},
        label="time from arrival to end",
        totals={n: len(r.jct_s) for n, r in first.items()},
        seconds=True,
        styles=looks,
        caption="All jobs, after all of them have run to completion.",
    )
    for title, key, label in (
        ("Throughput", "normalised", "normalised throughput"),
        ("Raw throughput", "samples_per_s", "samples/s"),
        ("Queue", "waiting", "waiting jobs"),
        ("Allocated GPUs", "gpus", "GPUs"),
    ):
        series = {name: (ran.course["at_s"], ran.course[key]) for name, ran in first.items()}
        yield time_plot(title, series, label=label, end_s=end_s, styles=looks)
    own = [name for name in by_policy if is_ilp(name)][:MAX_DRAWN_POLICIES]
    gaps = {name: by_policy[name][0].gaps for name in own}
    if own:
        yield gap_plot(
            "Gap to the proven bound",
            {name: (np.arange(len(gap)), gap[:, 1]) for name, gap in gaps.items()},
            styles=series_styles(own, bold=[best]),
        )
    for name, ran in first.items():
        if ran.segments:
            yield gpu_map(
                f"GPUs over time under {name}",
                ran.segments,
                ran.node_gpus,
                end_s=end_s,
                node_types=ran.node_types,
            )


def _ratios(by_policy: ByPolicy) -> Plot:
    """Plot each policy's JCT and throughput divided by those of Arena's policy.

    If Arena's policy did not run, plot the mean JCT in hours.
    """
    if ARENA not in by_policy:
        mean_s = {
            str(result["policy"]): float(result["jct_mean_s"])
            for result in comparison_rows(by_policy)
        }
        hours = {
            name: Interval(value=seconds / 3600, low=np.nan, high=np.nan)
            for name, seconds in mean_s.items()
        }
        return bars_plot("Mean JCT", {"mean JCT": hours}, label="hours")
    arena = by_policy[ARENA]
    order = [str(result["policy"]) for result in comparison_rows(by_policy)]
    return bars_plot(
        "JCT and throughput relative to Arena",
        {
            "mean JCT (lower is better)": {n: jct_ratio(by_policy[n], arena) for n in order},
            "throughput (higher is better)": {
                n: throughput_ratio(by_policy[n], arena) for n in order
            },
        },
        label="ratio to Arena's policy",
        caption="The JCT is the mean over the jobs that both policies finished. The throughput is"
        " normalised and taken over the horizon."
        f" Our own policies: {', '.join(n for n in order if is_ours(n))}.",
    )
