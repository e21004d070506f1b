"""A benchmark of foresight: small cases next to the optimum over all rounds, and Philly's trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import OverheadsOption, with_sweep, with_work
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.foresight_cases import draw_case, simulate_case
from tessera.benchmarks.schedulers.foresight_optimum import ProvenOptimum, solve_case
from tessera.formulation.policy import MAX_FORESIGHT
from tessera.simulator.comparison.comparisons import bound_share
from tessera.simulator.comparison.policies import DEFAULT_POLICY
from tessera.simulator.comparison.runs import (
    FinishedRun,
    RunRequest,
    WorkloadBounds,
    bound_task,
    check_requests,
)
from tessera.simulator.comparison.workload import PHILLY, SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.sweeps.tasks import Task

FIRST_SEED: Final = 1000
"""The seed of the first case that figures are reported of. Foresight was chosen on those from 0."""
OBJECTIVES: Final = (DEFAULT_POLICY, "ilp:balanced", "ilp:jct", "ilp:throughput", "ilp:max-min")
"""The objectives without foresight, the default first."""
OPTIMA: Final = Path(__file__).parent / "foresight_optima.json"
"""The proven optima of the cases by seed, with the command that computed them."""
CASE_TASK: Final = "tessera.benchmarks.schedulers.bench_foresight:run_case_of_seed"
OPTIMUM_TASK: Final = "tessera.benchmarks.schedulers.bench_foresight:solve_case_of_seed"


@register_case(
    "foresight",
    smoke={"cases": 2, "trace": SYNTHETIC, "jobs": 15, "gpus_share": 0.05, "workers": 0},
    jct_over_optimum=("<=", 0.08),
    jct_over_bound_share=("<=", 1.0),
)
@with_work
@with_sweep
def compare_foresight(
    *,
    work: WorkloadSpec,
    cases: Annotated[int, typer.Option(min=1, help="Number of small cases.")] = 30,
    rollouts: Annotated[
        int, typer.Option(min=1, max=MAX_FORESIGHT, help="Foresight in the small cases.")
    ] = 128,
    trace_rollouts: Annotated[
        int, typer.Option(min=1, max=MAX_FORESIGHT, help="Foresight on the trace.")
    ] = 14,
    prove: Annotated[
        bool, typer.Option(help="Solve the small cases again instead of reading their optima.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Number of synthetic jobs.")] = 400,
    gpus_share: Annotated[float, typer.Option(help="Share of the cluster's GPUs.")] = 1.0,
    overheads: OverheadsOption = "default",
    sweep: Sweep,
) -> Report:
    """Measure mean completion times with foresight against an optimum, a bound and the default.

    A small case has five jobs on two nodes of four GPUs, fast and slow ones, with a round every half
    an hour (``foresight_cases``). In every other case the jobs arrive over time, unknown to rounds. The
    optimum over all rounds knows them (``foresight_optimum``). ``jct_over_optimum`` is the mean over the
    cases with a proven optimum of the mean completion time with foresight over the optimum, less 1.
    Its aim is 0.08. ``default_over_optimum`` is that of the default objective, and ``best_over_optimum``
    that of the best of five objectives in each case, in hindsight.

    On the trace, ``jct_over_bound`` is the mean completion time with foresight over the Lagrangian
    bound (``tessera.simulator.completion_bound``), less 1, and ``default_over_bound`` is that of the
    default objective. ``jct_over_bound_share`` is the first over the second. It is at most 1, and is
    judged on Philly alone.

    Foresight was chosen on other cases than those that are reported. A proof of 30 cases takes
    several minutes of processor time, so their optima are stored.
    """
    seeds = range(FIRST_SEED, FIRST_SEED + cases)
    small = replace(work, jobs=jobs, gpus_share=gpus_share)
    on_trace = _trace_tasks(small, trace_rollouts, overheads)
    on_cases = {
        seed: Task(
            name=f"case {seed}",
            function=CASE_TASK,
            options={"seed": seed, "rollouts": rollouts},
        )
        for seed in seeds
    }
    stored = {} if prove else read_optima()
    proofs = {
        seed: Task(name=f"optimum of case {seed}", function=OPTIMUM_TASK, options={"seed": seed})
        for seed in seeds
        if seed not in stored
    }
    results = sweep.run([*on_trace, *on_cases.values(), *proofs.values()])
    optima = {
        seed: stored[seed] if seed in stored else ProvenOptimum(**results[proofs[seed].name])
        for seed in seeds
    }
    table = [{"case": seed, **_over(results[on_cases[seed].name], optima[seed])} for seed in seeds]
    figures = {**case_figures(table), **_trace_figures(results, on_trace)}
    waived = frozenset() if work.trace == PHILLY else frozenset({"jct_over_bound_share"})
    return Report(seed=FIRST_SEED, figures=figures, table=table, waived=waived)


def run_case_of_seed(seed: int, rollouts: int) -> dict[str, float]:
    """Return the mean completion time of a small case by policy, with foresight as "foresight"."""
    case = draw_case(seed)
    return {
        "foresight": simulate_case(case, f"{DEFAULT_POLICY}@foresight={rollouts}"),
        **{policy: simulate_case(case, policy) for policy in OBJECTIVES},
    }


def solve_case_of_seed(seed: int) -> dict[str, Any]:
    """Return the fields of the optimum of a small case."""
    return asdict(solve_case(draw_case(seed)))


def read_optima() -> dict[int, ProvenOptimum]:
    """Return the stored optima by seed."""
    stored = json.loads(OPTIMA.read_text())
    return {int(seed): ProvenOptimum(**fields) for seed, fields in stored["optima"].items()}


def _over(means: Mapping[str, float], optimum: ProvenOptimum) -> dict[str, Figure | str]:
    return {
        "optimum_s": optimum.mean_s,
        "proven": int(optimum.proven),
        **{name: mean_s / optimum.mean_s - 1 for name, mean_s in means.items()},
    }


def case_figures(table: Sequence[Mapping[str, Figure | str]]) -> dict[str, Figure]:
    """Return the figures of the small cases, over those with a proven optimum."""
    proven = [row for row in table if row["proven"]]

    def mean(names: Sequence[str]) -> float:
        least = [min(float(row[name]) for name in names) for row in proven]
        return float(np.mean(least)) if least else float("nan")

    return {
        "cases": len(table),
        "proven": len(proven),
        "jct_over_optimum": mean(["foresight"]),
        "default_over_optimum": mean([DEFAULT_POLICY]),
        "best_over_optimum": mean(OBJECTIVES),
    }


def _trace_tasks(work: WorkloadSpec, rollouts: int, overheads: str) -> list[Task]:
    """Return the tasks of the trace: with foresight, without it, and the bounds."""
    policies = (f"{DEFAULT_POLICY}@foresight={rollouts}", DEFAULT_POLICY)
    asked = [RunRequest(work=work, policy=policy, overheads=overheads) for policy in policies]
    check_requests(asked, seeds=1)
    tasks = [one.task(f"{one.policy} on {Path(work.trace).name}") for one in asked]
    return [*tasks, bound_task(f"bounds of {Path(work.trace).name}", work, overheads)]


def _trace_figures(results: Mapping[str, Any], tasks: Sequence[Task]) -> dict[str, Figure]:
    foresight, default, bounds = (results[task.name] for task in tasks)
    bound = WorkloadBounds.read(bounds).completion
    ours, without = (
        1 / bound_share([FinishedRun.read(run)], [bound]) - 1 for run in (foresight, default)
    )
    return {
        "jct_over_bound": ours,
        "default_over_bound": without,
        "jct_over_bound_share": ours / without,
    }
