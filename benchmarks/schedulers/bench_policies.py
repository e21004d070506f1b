"""A benchmark of all policies on the same workloads, information and overheads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import (
    JobsOption,
    JobsShareOption,
    LoadOption,
    OverheadsOption,
    PoliciesOption,
    SeedsOption,
    parse_number_list,
    with_sweep,
    with_work,
)
from tessera.benchmarks.harness.registry import register_case
from tessera.simulator.comparison.comparisons import (
    ByPolicy,
    comparison_rows,
    headline_figures,
    mean_figure,
)
from tessera.simulator.comparison.plots import ARENA
from tessera.simulator.comparison.policies import (
    DEFAULT_POLICY,
    INFORMATION,
    SECOND_POLICY,
    compared_policies,
    split_list,
)
from tessera.simulator.comparison.runs import (
    FinishedRun,
    RunRequest,
    WorkloadBounds,
    bound_task,
    check_requests,
)
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep

POLICY_LIST: Final = ",".join(compared_policies())

BoundsOf = Mapping["ComparisonGroup", Sequence[WorkloadBounds]]
"""The bounds of each group, one for each seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonGroup:
    """The settings that all policies of a comparison share."""

    trace: str
    information: str
    gpus_share: float

    @property
    def name(self) -> str:
        """Return the name of the group, with the workload without its folder."""
        trace = Path(self.trace).name
        return f"{trace}, {self.information}, {self.gpus_share:g} of the GPUs"


@register_case(
    "policies",
    smoke={
        "trace": SYNTHETIC,
        "gpus_share": "0.05",
        "jobs": 20,
        "workers": 0,
        "policies": "fcfs,arena,greedy:throughput,ilp:jct",
    },
    longest_round_s=("<=", 0.5),
)
@with_work
@with_sweep
def compare_policies(
    *,
    work: WorkloadSpec,
    gpus_share: Annotated[
        str, typer.Option(help="Comma-separated shares of the cluster's GPUs, which vary the load.")
    ] = "1",
    jobs_share: JobsShareOption = 1.0,
    jobs: JobsOption = 400,
    load: LoadOption = 1.0,
    policies: PoliciesOption = POLICY_LIST,
    information: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated information that all policies see: {', '.join(INFORMATION)}."
        ),
    ] = "estimates",
    overheads: OverheadsOption = "default",
    seeds: SeedsOption = 1,
    sweep: Sweep,
) -> Report:
    """Run every policy on the same jobs and cluster, until all jobs have ended, with the same overheads.

    A round runs when a job has arrived or ended, but at most one in 300 s. All policies see the
    same information, by default the estimates, which are the true speeds here. Deadlines are
    removed; ``tessera bench deadline`` is about them. Jobs that the profiles cannot price as
    requested are dropped and counted, because policies of fixed requests could never run them.
    Without the data sets the workload is synthetic, and the table says so.

    Our figures are those of the default objective (``tessera.formulation.round.policy``), which always
    runs. It was chosen on synthetic workloads. ``throughput_gain_second``
    is of the objective ``throughput``, for clusters that are judged by throughput alone. No figure
    picks a policy by its result here.

    ``longest_round_s`` is the wall time of the default objective's longest round.

    ``jct_gain_vs_arena`` is 1 less our mean JCT over Arena's, over the jobs that both finished, to
    completion. ``jct_gain_within_horizon`` is the same over the jobs that both finished within the
    horizon, where papers cut off. ``throughput_gain_vs_arena`` is of normalised throughput over the
    horizon (the rounds, or the arrivals if these end earlier). The ranks are among all policies
    that are not ours.

    ``jct_bound_share`` is a mean JCT that no schedule can beat over ours, and ``jct_over_bound`` is
    ours over that bound, less 1. The bound is Lagrangian (``tessera.simulator.completion_bound``):
    each job alone chooses which GPUs to buy when, at prices for each GPU type and time, and may use
    every shape. ``throughput_bound_share`` is our throughput over what no policy can beat
    (``tessera.simulator.bounds``). ``jct_gain_limit`` and ``throughput_gain_limit`` are the gains
    over Arena's that a policy at those bounds would have. Figures are of the first trace,
    information and share; the table has all of them. Several seeds give intervals: each seed draws
    ``--jobs-share`` of the trace, or other synthetic jobs.

    The aims are a mean JCT at most 3.5 % above the bound, and gains over Arena's of 12 % in JCT and
    1 % in throughput, or 3.5 % in throughput by the second objective. On half of the cluster, the
    aims are gains of 36 % and 12 %. They are aims and not bounds, because they are of one trace.
    Gavel is the slowest of the policies, with six and a half minutes of processor time. Most
    policies take half a minute, and the bounds take a quarter of a minute.
    """
    base, seed = replace(work, jobs_share=jobs_share, jobs=jobs, load=load), work.seed
    told, drawn = split_list(information, INFORMATION), range(seed, seed + seeds)
    names = list(dict.fromkeys([*split_list(policies), DEFAULT_POLICY]))
    groups = [
        ComparisonGroup(trace=one, information=what, gpus_share=share)
        for one in split_list(work.trace)
        for what in told
        for share in parse_shares(gpus_share)
    ]
    costs = RunRequest(work=base, policy="", overheads=overheads)
    check_requests(
        (policy_run(costs, group, name, seed) for group in groups for name in names),
        seeds,
    )
    by_group, bounds = _ran(costs, groups, names, drawn, sweep)
    first = groups[0]
    figures = headline_figures(by_group[first], DEFAULT_POLICY, bounds[first], SECOND_POLICY)
    return Report(seed=seed, figures=figures, table=_table(by_group, bounds))


def _ran(
    costs: RunRequest,
    groups: Sequence[ComparisonGroup],
    names: Sequence[str],
    drawn: range,
    sweep: Sweep,
) -> tuple[Mapping[ComparisonGroup, ByPolicy], BoundsOf]:
    """Return the groups' runs and bounds, in the order of the seeds ``drawn``."""
    tasks = {
        (group, name, k): policy_run(costs, group, name, k).task(
            f"{name} on {group.name}, seed {k}"
        )
        for group in groups
        for name in names
        for k in drawn
    }
    limits = {
        (group.trace, group.gpus_share, k): bound_task(
            f"bounds of {Path(group.trace).name}, {group.gpus_share:g} of the GPUs, seed {k}",
            work_of(costs.work, group, k),
            costs.overheads,
        )
        for group in groups
        for k in drawn
    }
    result = sweep.run([*tasks.values(), *limits.values()])
    by_group: dict[ComparisonGroup, ByPolicy] = {
        group: {
            name: [FinishedRun.read(result[tasks[group, name, k].name]) for k in drawn]
            for name in names
        }
        for group in groups
    }
    bounds = {
        group: [
            WorkloadBounds.read(result[limits[group.trace, group.gpus_share, k].name])
            for k in drawn
        ]
        for group in groups
    }
    return by_group, bounds


def policy_run(costs: RunRequest, group: ComparisonGroup, policy: str, seed: int) -> RunRequest:
    """Return the run of a policy in a group."""
    return replace(
        costs,
        work=work_of(costs.work, group, seed),
        policy=policy,
        information=group.information,
    )


def work_of(base: WorkloadSpec, group: ComparisonGroup, seed: int) -> WorkloadSpec:
    """Return the workload of a group's run."""
    return replace(base, trace=group.trace, gpus_share=group.gpus_share, seed=seed)


def parse_shares(text: str) -> list[float]:
    """Return the shares of a comma-separated list, in the given order. Raises InvalidInput."""
    parse_number_list("gpus_share", text, lambda share: share > 0, "numbers above 0")
    return [float(part) for part in split_list(text)]


def _table(
    by_group: Mapping[ComparisonGroup, ByPolicy], bounds: BoundsOf
) -> list[dict[str, Figure | str]]:
    table: list[dict[str, Figure | str]] = []
    for group, by_policy in by_group.items():
        first = next(iter(by_policy.values()))
        shared: dict[str, Figure | str] = {
            "workload": Path(group.trace).name,
            "information": group.information,
            "gpus_share": group.gpus_share,
            "load": mean_figure(first, "load"),
            "jobs": mean_figure(first, "jobs"),
            "dropped": mean_figure(first, "dropped"),
            "throughput_bound": float(np.mean([bound.throughput for bound in bounds[group]])),
            "jct_bound_s": float(np.mean([bound.completion.mean_s for bound in bounds[group]])),
        }
        table += [
            {"policy": row["policy"], "default": row["policy"] == DEFAULT_POLICY, **shared, **row}
            for row in comparison_rows(by_policy, ARENA, [b.completion for b in bounds[group]])
        ]
    return table
