"""A benchmark of policies over the load, the jobs' lifespan and the share of large models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import typer

from tessera.benchmarks.harness.options import (
    GpusShareOption,
    InformationOption,
    JobsOption,
    JobsShareOption,
    OverheadsOption,
    PoliciesOption,
    SeedsOption,
    parse_number_list,
    with_sweep,
    with_work,
)
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.variants import (
    Variant,
    WorkloadChanges,
    check_variants,
    seed_run,
)
from tessera.simulator.comparison.comparisons import (
    ByPolicy,
    finished_by,
    jct_ratio,
    mean_figure,
    throughput_ratio,
)
from tessera.simulator.comparison.policies import DEFAULT_POLICY, is_ours, split_list
from tessera.simulator.comparison.runs import RunRequest, runs_of
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec, resize_workload
from tessera.simulator.figures import Figure, Report
from tessera.simulator.statistics import mean_interval
from tessera.simulator.sweeps.runner import Sweep

Varied = Literal["load", "life", "large"]
POLICIES: Final = ("fcfs", "gavel", "sia", "arena", "ilp:throughput", "ilp:jct")
POLICY_LIST: Final = ",".join(POLICIES)
MEAN_FIGURES: Final = (
    "throughput",
    "samples_per_s",
    "makespan_s",
    "completed",
    "queue_mean_s",
    "restarts",
    "restart_share",
    "utilisation",
    "stuck",
    "decide_p50_s",
)

RunsByPoint = Mapping[Varied, Mapping[float, ByPolicy]]


@register_case(
    "load",
    smoke={
        "trace": SYNTHETIC,
        "gpus_share": 0.05,
        "jobs": 10,
        "seeds": 1,
        "workers": 0,
        "loads": "0.5,2",
        "lives": "0.5",
        "larges": "0.5",
        "policies": "fcfs,arena,greedy:throughput",
    },
)
@with_work
@with_sweep
def vary_load(
    *,
    work: WorkloadSpec,
    gpus_share: GpusShareOption = 0.1,
    jobs_share: JobsShareOption = 0.1,
    jobs: JobsOption = 100,
    policies: PoliciesOption = POLICY_LIST,
    loads: Annotated[str, typer.Option(help="Factors on the arrival rate.")] = "0.25,0.5,1,2",
    lives: Annotated[str, typer.Option(help="Factors on iterations.")] = "0.25,0.5,1,2",
    larges: Annotated[str, typer.Option(help="Shares of large models.")] = "0,0.25,0.5,0.75",
    information: InformationOption = "estimates",
    overheads: OverheadsOption = "default",
    seeds: SeedsOption = 3,
    sweep: Sweep,
) -> Report:
    """Run policies while jobs arrive faster, last longer or train larger models.

    All else stays the same. ``vary_load``: arrivals 0.25 to 2 times as fast as in the trace (Morphling
    section 7.4, Figure 10, varies down-sampling). ``life``: 0.25 to 2 times the iterations (Arena
    section 5.7, Figure 19, where all policies see data-parallel information: ``--information
    data-parallel --overheads full-search``). ``large``: the share of jobs whose models have 6
    billion parameters or more, from 0 to 0.75, with models redrawn at equal GPU-hours (Morphling
    section 7.4, Figure 11: LLaMA-2-7B and LLaMA-30B). The papers' texts do not give the ranges of
    those figures. The ranges here are ours, around the unchanged trace. ``--policies`` selects both
    papers' baselines, including Synergy.

    All runs go on until all jobs have ended, with the same information and overheads. For each
    policy and point, the table has the mean JCT over the jobs that all policies finished there and
    the normalised throughput while jobs arrive, with 95 % intervals over seeds, and both relative
    to Arena's. Figures are of the default objective, which always runs and was not chosen on these
    runs. They are taken at the last point of each sweep. ``SWEEP_jct_gain_vs_arena`` is 1 less the
    ratio of mean JCT over the jobs that both finished. ``SWEEP_throughput_gain_vs_arena`` is the
    ratio of throughput less 1. ``SWEEP_worst_jct_margin`` is the least, over points, of the best
    other policy's mean JCT over ours, less 1, each pair over the jobs that both finished.
    ``SWEEP_worst_throughput_margin`` is the least of our throughput over the best other's, less 1.
    None of the figures has a bound.
    """
    points: dict[Varied, tuple[float, ...]] = {
        "load": points_of("loads", loads),
        "life": points_of("lives", lives),
        "large": points_of("larges", larges),
    }
    names = list(dict.fromkeys([*split_list(policies), DEFAULT_POLICY]))
    work, seed = resize_workload(work, gpus_share, jobs_share, jobs), work.seed
    base = RunRequest(
        work=work,
        policy="",
        information=information,
        overheads=overheads,
    )
    drawn = range(seed, seed + seeds)
    result = run_points(base, points, names, drawn, sweep)
    return Report(seed=seed, figures=sweep_figures(result), table=list(_table(result, work)))


def run_points(
    base: RunRequest,
    points: Mapping[Varied, Sequence[float]],
    names: Sequence[str],
    drawn: range,
    sweep: Sweep,
) -> RunsByPoint:
    """Return the runs of each policy at each point, in the order of the seeds ``drawn``."""
    runs = {
        (varied, x, name): Variant(asked=replace(base, policy=name), shape=shape_at(varied, x))
        for varied, along in points.items()
        for x in along
        for name in names
    }
    check_variants(list(runs.values()), len(drawn))
    tasks = {
        (*key, k): seed_run(run, k).task(f"{key[0]} {key[1]:g}, {key[2]}, seed {k}")
        for key, run in runs.items()
        for k in drawn
    }
    one = runs_of(tasks, sweep)
    return {
        varied: {
            x: {name: [one[varied, x, name, k] for k in drawn] for name in names} for x in along
        }
        for varied, along in points.items()
    }


def shape_at(sweep: Varied, x: float) -> WorkloadChanges:
    """Return the shape of the workload at a point of a sweep."""
    if sweep == "load":
        return WorkloadChanges(arrival_factor=x)
    return WorkloadChanges(life_factor=x) if sweep == "life" else WorkloadChanges(large_share=x)


def points_of(where: str, text: str) -> tuple[float, ...]:
    """Return the points of a sweep in ascending order: shares of large models, else factors.

    Raises InvalidInput.
    """
    if where == "larges":
        return parse_number_list(where, text, lambda x: 0 <= x <= 1, "shares from 0 to 1")
    return parse_number_list(where, text, lambda x: 0 < x < math.inf, "factors above 0")


def sweep_figures(found: RunsByPoint, baseline: str = "arena") -> dict[str, Figure]:
    """Return the main figures of each sweep.

    A sweep without the default policy or another one has none.
    """
    shown: dict[str, Figure] = {}
    for sweep, by_x in found.items():
        last = by_x[max(by_x)]
        others = [name for name in last if not is_ours(name)]
        if DEFAULT_POLICY not in last or not others:
            continue
        if baseline in last:
            own, theirs = last[DEFAULT_POLICY], last[baseline]
            shown |= {
                f"{sweep}_jct_gain_vs_{baseline}": 1 - jct_ratio(own, theirs).value,
                f"{sweep}_throughput_gain_vs_{baseline}": throughput_ratio(own, theirs).value - 1,
            }
        shown |= {
            f"{sweep}_worst_jct_margin": min(
                jct_ratio(by[theirs], by[DEFAULT_POLICY]).value - 1
                for by in by_x.values()
                for theirs in others
            ),
            f"{sweep}_worst_throughput_margin": min(
                throughput_ratio(by[DEFAULT_POLICY], by[theirs]).value - 1
                for by in by_x.values()
                for theirs in others
            ),
        }
    return shown


def _table(found: RunsByPoint, work: WorkloadSpec) -> Iterator[dict[str, Figure | str]]:
    for sweep, by_x in found.items():
        for x, by_policy in by_x.items():
            for name, runs in by_policy.items():
                jct = mean_interval(common_jct_s(by_policy, name))
                done = mean_interval([one.figures["throughput"] for one in runs])
                row: dict[str, Figure | str] = {
                    "sweep": sweep,
                    "x": x,
                    "policy": name,
                    "workload": Path(work.trace).name,
                    "load": mean_figure(runs, "load"),
                    "jobs": mean_figure(runs, "jobs"),
                    "seeds": len(runs),
                    "jct_mean_s": jct.value,
                    "jct_mean_low_s": jct.low,
                    "jct_mean_high_s": jct.high,
                    **{key: mean_figure(runs, key) for key in MEAN_FIGURES},
                    "throughput_low": done.low,
                    "throughput_high": done.high,
                }
                if "arena" in by_policy:
                    row["jct_over_arena"] = jct_ratio(runs, by_policy["arena"]).value
                    row["throughput_over_arena"] = throughput_ratio(runs, by_policy["arena"]).value
                yield row


def common_jct_s(by_policy: ByPolicy, name: str) -> list[float]:
    """Return a policy's mean JCT for each seed, over the jobs that all policies finished.

    If there are no such jobs, it is NaN.
    """
    means = []
    for k, one in enumerate(by_policy[name]):
        common = finished_by([runs[k] for runs in by_policy.values()])
        means.append(float(one.jct_s[common].mean()) if common.any() else np.nan)
    return means
