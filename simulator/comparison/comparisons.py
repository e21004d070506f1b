"""Comparisons of policies that ran on the same workloads: gains, ranks, and rows of a table.

The runs of a policy are a sequence with one run for each seed, in the same order for all policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tessera.formulation.base.tables import Bools
from tessera.simulator.comparison.policies import is_ours
from tessera.simulator.comparison.runs import FinishedRun, WorkloadBounds
from tessera.simulator.completion_bound import CompletionBound
from tessera.simulator.figures import Figure
from tessera.simulator.statistics import Interval, mean_interval, ratio_interval

SeedRuns = Sequence[FinishedRun]
ByPolicy = Mapping[str, SeedRuns]

SEED_MEAN_FIGURES = (
    "completed",
    "finished",
    "queue_mean_s",
    "queue_p95_s",
    "makespan_s",
    "throughput_peak",
    "samples_per_s",
    "samples_per_s_peak",
    "utilisation",
    "restarts",
    "restart_share",
    "profiling_share",
    "fairness",
    "fairness_worst",
    "satisfaction",
    "rounds",
    "refused",
    "decide_s",
    "decide_p50_s",
    "decide_max_s",
)
"""The figures of a run (``simulator.metrics.run_figures``) that appear in a row as the mean over seeds,
if all runs have them."""


def finished_by(runs: Sequence[FinishedRun], until_s: float = math.inf) -> Bools:
    """Return which jobs all of these runs of one workload finished by ``until_s``, bool[jobs]."""
    ended: Bools = np.logical_and.reduce(
        [np.isfinite(run.end_s) & (run.end_s <= until_s) for run in runs]
    )
    return ended


def jct_ratio(ours: SeedRuns, theirs: SeedRuns, within_horizon: bool = False) -> Interval:
    """Return our mean JCT divided by theirs, over the jobs that both runs of a seed finished."""
    means = []
    for a, b in zip(ours, theirs, strict=True):
        until_s = (
            min(a.figures["horizon_s"], b.figures["horizon_s"]) if within_horizon else math.inf
        )
        both = finished_by((a, b), until_s)
        if not both.any():
            return Interval(value=math.nan, low=math.nan, high=math.nan)
        means.append((float(a.jct_s[both].mean()), float(b.jct_s[both].mean())))
    return ratio_interval([a for a, _ in means], [b for _, b in means])


def throughput_ratio(ours: SeedRuns, theirs: SeedRuns) -> Interval:
    """Return our normalised throughput divided by theirs, each over the horizon."""
    return ratio_interval(
        [a.figures["throughput"] for a in ours], [b.figures["throughput"] for b in theirs]
    )


def policy_ranks(name: str, by_policy: ByPolicy) -> tuple[int, int]:
    """Return the ranks of ``name`` by JCT and throughput among the policies that are not ours.

    Another policy ranks higher if it has the lower mean JCT over the jobs that both finished, or
    the higher normalised throughput.
    """
    others = [runs for other, runs in by_policy.items() if not is_ours(other)]
    ours = by_policy[name]
    by_jct = sum(jct_ratio(ours, theirs).value > 1 for theirs in others)
    by_throughput = sum(throughput_ratio(ours, theirs).value < 1 for theirs in others)
    return 1 + by_jct, 1 + by_throughput


def bound_share(runs: SeedRuns, bounds: Sequence[CompletionBound]) -> float:
    """Return the lower bound of mean JCT divided by the policy's, for the jobs that it finished."""
    least = own = 0.0
    for run, bound in zip(runs, bounds, strict=True):
        over = finished_by([run])
        least += bound.total_s(over)
        own += float(run.jct_s[over].sum())
    return least / own if own > 0 else math.nan


def headline_figures(
    by_policy: ByPolicy,
    ours: str,
    bounds: Sequence[WorkloadBounds] = (),
    second: str = "",
    baseline: str = "arena",
) -> dict[str, Figure]:
    """Return the figures of the comparison of ``ours`` with the other policies.

    If ``baseline`` ran, its comparison is included, and the gain in throughput of ``second``, if
    that ran, too. ``bounds`` has an entry for each seed, or none. With several seeds, the figures
    include the ends of the 95 % intervals of the gains.
    """
    own = by_policy[ours]
    jct_rank, throughput_rank = policy_ranks(ours, by_policy)
    result: dict[str, Figure] = {
        "jct_rank": jct_rank,
        "throughput_rank": throughput_rank,
        "others": sum(not is_ours(name) for name in by_policy),
        "longest_round_s": max(float(run.figures["decide_max_s"]) for run in own),
    }
    if bounds:
        share = bound_share(own, _completion(bounds))
        result |= {
            "jct_bound_share": share,
            "jct_over_bound": 1 / share - 1,
            "throughput_bound_share": mean_figure(own, "throughput") / _most(bounds),
        }
    if baseline in by_policy:
        theirs = by_policy[baseline]
        result |= _gain(f"jct_gain_vs_{baseline}", jct_ratio(own, theirs), -1)
        result |= _gain(f"throughput_gain_vs_{baseline}", throughput_ratio(own, theirs), 1)
        result |= _gain("jct_gain_within_horizon", jct_ratio(own, theirs, within_horizon=True), -1)
        if second in by_policy:
            ratio = throughput_ratio(by_policy[second], theirs)
            result |= _gain("throughput_gain_second", ratio, 1)
        if bounds:
            result["jct_gain_limit"] = 1 - bound_share(theirs, _completion(bounds))
            result["throughput_gain_limit"] = _most(bounds) / mean_figure(theirs, "throughput") - 1
    return result


def _completion(bounds: Sequence[WorkloadBounds]) -> list[CompletionBound]:
    return [bound.completion for bound in bounds]


def _most(bounds: Sequence[WorkloadBounds]) -> float:
    """Return the mean over seeds of the throughput that no policy can beat."""
    return float(np.mean([bound.throughput for bound in bounds]))


def _gain(name: str, ratio: Interval, sign: int) -> dict[str, Figure]:
    """Return the gain of a ratio over 1. If ``sign`` is -1, lower ratios are better."""
    ends = sorted((sign * (ratio.low - 1), sign * (ratio.high - 1)))
    gain: dict[str, Figure] = {name: sign * (ratio.value - 1)}
    if not math.isnan(ends[0]):
        gain |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return gain


def comparison_rows(
    by_policy: ByPolicy, baseline: str = "arena", bounds: Sequence[CompletionBound] = ()
) -> list[dict[str, Figure | str]]:
    """Return a row for each policy, sorted by mean JCT over the jobs that all policies finished."""
    table = [comparison_row(name, by_policy, baseline, bounds) for name in by_policy]
    return sorted(table, key=lambda r: float(r["jct_mean_s"]))


def comparison_row(
    name: str, by_policy: ByPolicy, baseline: str, bounds: Sequence[CompletionBound] = ()
) -> dict[str, Figure | str]:
    """Return a policy's row of means over seeds.

    ``jct`` is over the jobs that all policies finished, and ``jct_completed_mean_s`` over all jobs
    that the policy itself finished. ``bounds`` has an entry for each seed, or none. With several
    seeds, ``low`` and ``high`` are the ends of the 95 % interval of the mean.
    """
    runs = by_policy[name]
    common = [finished_by([other[k] for other in by_policy.values()]) for k in range(len(runs))]
    times = [one.jct_s[c] for one, c in zip(runs, common, strict=True)]
    jct = mean_interval([float(t.mean()) if len(t) else math.nan for t in times])
    work = mean_interval([one.figures["throughput"] for one in runs])
    result: dict[str, Figure | str] = {
        "policy": name,
        "ours": is_ours(name),
        "jobs_of_all": float(np.mean([c.sum() for c in common])),
        "jct_mean_s": jct.value,
        **_ends("jct_mean", jct, "_s"),
    }
    for percent in (50, 95, 99):
        of_seeds = [float(np.percentile(t, percent)) if len(t) else math.nan for t in times]
        result[f"jct_p{percent}_s"] = float(np.mean(of_seeds))
    result["jct_completed_mean_s"] = mean_figure(runs, "jct_mean_s")
    if bounds:
        result["jct_bound_share"] = bound_share(runs, bounds)
    result |= {"throughput": work.value, **_ends("throughput", work, "")}
    if baseline in by_policy:
        result[f"jct_over_{baseline}"] = jct_ratio(runs, by_policy[baseline]).value
        result[f"throughput_over_{baseline}"] = throughput_ratio(runs, by_policy[baseline]).value
    result |= {
        key: mean_figure(runs, key)
        for key in SEED_MEAN_FIGURES
        if all(key in one.figures for one in runs)
    }
    return result | {"stuck_runs": sum(one.figures["stuck"] > 0 for one in runs)}


def mean_figure(runs: SeedRuns, key: str) -> float:
    """Return the mean of a figure over seeds."""
    return float(np.mean([run.figures[key] for run in runs]))


def _ends(name: str, interval: Interval, unit: str) -> dict[str, Figure]:
    if math.isnan(interval.low):
        return {}
    return {f"{name}_low{unit}": interval.low, f"{name}_high{unit}": interval.high}
