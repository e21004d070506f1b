"""A benchmark that chooses the default objective on synthetic training workloads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import OverheadsOption, parse_number_list, with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import LEXICOGRAPHIC
from tessera.formulation.policy import DEFAULT_OBJECTIVE
from tessera.simulator.comparison.comparisons import jct_ratio, throughput_ratio
from tessera.simulator.comparison.policies import ILP, OUR_DEFAULT_POLICIES, is_ilp, split_list
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, run_on_workloads
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.workloads.synthetic import Durations

BASELINE: Final = "arena"
OBJECTIVES: Final = tuple(
    name
    for policy in OUR_DEFAULT_POLICIES
    if is_ilp(policy) and (name := policy.removeprefix(ILP)) not in LEXICOGRAPHIC
)
"""The objectives to choose from: all but those that serve the worst-off job first."""
ARRIVALS: Final = ("poisson", "philly-like")
DURATIONS: Final[tuple[Durations, ...]] = ("large-models", "gavel")

Standing = tuple[float, float]
"""An objective's mean JCT and normalised throughput over those of the baseline."""


@register_case(
    "default-objective",
    smoke={
        "objectives": "throughput,jct",
        "loads": "1",
        "jobs": 20,
        "gpus_share": 0.05,
        "seeds": 1,
        "workers": 0,
    },
    default_is_chosen=("==", 1),
)
@with_sweep
def choose_default_objective(
    *,
    objectives: Annotated[
        str, typer.Option(help="Comma-separated objectives to choose from.")
    ] = ",".join(OBJECTIVES),
    loads: Annotated[str, typer.Option(help="Comma-separated loads of the jobs.")] = "0.5,1,2",
    jobs: Annotated[int, typer.Option(help="Number of jobs of a workload.")] = 120,
    gpus_share: Annotated[float, typer.Option(help="Share of Arena's 1,280 GPUs.")] = 0.125,
    overheads: OverheadsOption = "default",
    seed: int = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of draws of each workload.")] = 3,
    sweep: Sweep,
) -> Report:
    """Choose the default objective among the named ones, on synthetic workloads alone.

    The training workloads are all combinations of durations (log-normal with a median of 8 h, and
    Gavel's), arrivals (Poisson, and bursts by day and night like Philly's), loads and seeds. Jobs,
    their models and the profiles are synthetic: no data set and no trace that results are reported
    on is read. Each objective, and Arena's policy, runs each workload to completion, with the same
    information and overheads.

    The rule takes the objective with the least mean JCT relative to Arena's policy, as the
    geometric mean over the workloads. Users who want throughput above all ask for it by name.

    ``default_is_chosen`` is 1 if the rule chooses the default of Tessera
    (``tessera.formulation.policy.DEFAULT_OBJECTIVE``), which is its bound. It is judged only on the
    default training workloads and objectives. ``jct_gain`` and ``throughput_gain`` are the chosen
    objective's gains over Arena's policy on them. The table has all objectives. ``jct_wins`` and
    ``throughput_wins`` are the shares of workloads in which an objective is ahead of Arena's policy.
    """
    names = split_list(objectives)
    sizes = parse_number_list("loads", loads, lambda one: one > 0, "numbers above 0")
    workloads = [
        WorkloadSpec(
            trace=SYNTHETIC,
            gpus_share=gpus_share,
            jobs=jobs,
            load=load,
            arrivals_as=arrivals,
            durations_as=durations,
            seed=k,
        )
        for durations in DURATIONS
        for arrivals in ARRIVALS
        for load in sizes
        for k in range(seed, seed + seeds)
    ]
    asked = RunRequest(work=workloads[0], policy="", overheads=overheads)
    policies = [*(f"{ILP}{name}" for name in names), BASELINE]
    runs = run_on_workloads(policies, workloads, asked, sweep)
    standings = {
        name: [_standing(runs[f"{ILP}{name}", work], runs[BASELINE, work]) for work in workloads]
        for name in names
    }
    chosen = choose_objective(standings)
    jct, throughput = geometric_means(standings[chosen])
    figures: dict[str, Figure] = {
        "workloads": len(workloads),
        "default_is_chosen": int(chosen == DEFAULT_OBJECTIVE),
        "jct_gain": 1 - jct,
        "throughput_gain": throughput - 1,
    }
    usual = tuple(names) == OBJECTIVES and (sizes, jobs, seeds) == ((0.5, 1.0, 2.0), 120, 3)
    return Report(
        seed=seed,
        figures=figures,
        table=[_row(name, of, name == chosen) for name, of in standings.items()],
        waived=frozenset() if usual else frozenset({"default_is_chosen"}),
    )


def _standing(ours: FinishedRun, theirs: FinishedRun) -> Standing:
    return jct_ratio([ours], [theirs]).value, throughput_ratio([ours], [theirs]).value


def geometric_means(standings: Sequence[Standing]) -> Standing:
    """Return the geometric means of an objective's ratios over the workloads."""
    jct, throughput = np.exp(np.log(np.array(standings)).mean(axis=0)).tolist()
    return jct, throughput


def choose_objective(standings: Mapping[str, Sequence[Standing]]) -> str:
    """Return the objective that the rule chooses.

    Raises:
        InvalidInput: no job ended under some policies, so that nothing can be compared.
    """
    means = {name: geometric_means(of) for name, of in standings.items()}
    if any(math.isnan(value) for pair in means.values() for value in pair):
        raise InvalidInput("jobs", "must be enough that some end under every policy; use more jobs")
    return min(means, key=lambda name: means[name][0])


def _row(name: str, standings: Sequence[Standing], chosen: bool) -> dict[str, Figure | str]:
    jct, throughput = geometric_means(standings)
    ratios = np.array(standings)
    return {
        "objective": name,
        "chosen": chosen,
        "jct_over_arena": jct,
        "throughput_over_arena": throughput,
        "jct_worst": float(ratios[:, 0].max()),
        "throughput_worst": float(ratios[:, 1].min()),
        "jct_wins": float((ratios[:, 0] < 1).mean()),
        "throughput_wins": float((ratios[:, 1] > 1).mean()),
    }
