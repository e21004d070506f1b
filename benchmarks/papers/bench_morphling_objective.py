"""A benchmark that chooses our policy for Morphling's traces on synthetic jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import OverheadsOption, parse_number_list, with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.errors import InvalidInput
from tessera.simulator.comparison.policies import split_list
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, run_on_workloads
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep

TICK_S: Final = 60.0
"""The least seconds between decisions, as in Morphling's simulator."""
CLUSTER: Final = "a800-64"
BASELINE: Final = "srt"
OBJECTIVES: Final = ("throughput", "jct", "balanced", "balanced:0.25", "balanced:0.75")
CANDIDATES: Final = tuple(f"ilp:{objective}@round_s={TICK_S:g}" for objective in OBJECTIVES)
OURS: Final = "ilp:jct@round_s=60"
"""The policy of ours whose figures are reported on Morphling's traces. `tessera bench
morphling-objective` chooses it."""
ARRIVALS: Final = ("poisson", "philly-like")
LOADS: Final = (0.5, 1.0)
JOBS: Final = 150
SEEDS: Final = 3


@register_case(
    "morphling-objective",
    smoke={
        "candidates": "ilp:jct@round_s=60,ilp:balanced@round_s=60",
        "loads": "1",
        "jobs": 15,
        "seeds": 1,
        "workers": 0,
    },
    ours_is_chosen=("==", 1),
)
@with_sweep
def choose_morphling_objective(
    *,
    candidates: Annotated[
        str, typer.Option(help="Comma-separated policies of ours to choose from.")
    ] = ",".join(CANDIDATES),
    loads: Annotated[str, typer.Option(help="Comma-separated loads of the jobs.")] = ",".join(
        f"{load:g}" for load in LOADS
    ),
    jobs: Annotated[int, typer.Option(help="Number of jobs of a workload.")] = JOBS,
    overheads: OverheadsOption = "morphling",
    seed: int = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of draws of each workload.")] = SEEDS,
    sweep: Sweep,
) -> Report:
    """Choose our policy for Morphling's traces, on synthetic workloads alone.

    The training workloads are on Morphling's cluster of 64 A800, with its restarts and at most one
    round in a minute. Durations are log-normal with a median of 30 min, and arrivals are Poisson or
    in bursts like Philly's. Models and profiles are synthetic: no data set is read. Each candidate
    is an objective. It, and shortest remaining time first, runs each workload to completion.

    The rule takes the candidate with the least mean JCT relative to the baseline, as the geometric
    mean over the workloads. ``ours_is_chosen`` is 1 if that is the policy whose figures `tessera
    bench morphling` reports as ours. It is judged only on the default workloads and candidates.
    ``jct_gain`` is the chosen policy's gain over the baseline, and ``default_jct_gain`` that of
    Tessera's default objective.
    """
    names = split_list(candidates)
    sizes = parse_number_list("loads", loads, lambda load: load > 0, "numbers above 0")
    workloads = [
        WorkloadSpec(
            trace=SYNTHETIC,
            cluster=CLUSTER,
            jobs=jobs,
            load=load,
            arrivals_as=arrivals,
            seed=k,
        )
        for arrivals in ARRIVALS
        for load in sizes
        for k in range(seed, seed + seeds)
    ]
    asked = RunRequest(work=workloads[0], policy="", overheads=overheads, round_s=TICK_S)
    policies = [*names, BASELINE]
    runs = run_on_workloads(policies, workloads, asked, sweep)
    ratios = {
        name: [mean_ratio(runs[name, work], runs[BASELINE, work]) for work in workloads]
        for name in names
    }
    chosen = choose_policy(ratios)
    figures: dict[str, Figure] = {
        "workloads": len(workloads),
        "ours_is_chosen": int(chosen == OURS),
        "jct_gain": 1 - geometric_mean(ratios[chosen]),
    }
    default = f"ilp:balanced:0.25@round_s={TICK_S:g}"
    if default in ratios:
        figures["default_jct_gain"] = 1 - geometric_mean(ratios[default])
    usual = tuple(names) == CANDIDATES and (sizes, jobs, seeds) == (LOADS, JOBS, SEEDS)
    return Report(
        seed=seed,
        figures=figures,
        table=[_row(name, of, name == chosen) for name, of in ratios.items()],
        waived=frozenset() if usual else frozenset({"ours_is_chosen"}),
    )


def mean_ratio(ours: FinishedRun, baseline: FinishedRun) -> float:
    """Return our mean JCT over that of the baseline.

    Raises:
        InvalidInput: a job did not end.
    """
    if not (np.isfinite(ours.end_s).all() and np.isfinite(baseline.end_s).all()):
        raise InvalidInput("candidates", "must let all jobs end, so that mean JCTs compare")
    return float(ours.jct_s.mean() / baseline.jct_s.mean())


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ratios above 0."""
    return float(np.exp(np.log(np.array(ratios)).mean()))


def choose_policy(ratios: Mapping[str, Sequence[float]]) -> str:
    """Return the policy with the least geometric mean of its ratios, the first of equal ones."""
    return min(ratios, key=lambda name: geometric_mean(ratios[name]))


def _row(name: str, ratios: Sequence[float], chosen: bool) -> dict[str, Figure | str]:
    return {
        "policy": name,
        "chosen": chosen,
        "jct_over_srt": geometric_mean(ratios),
        "jct_best": min(ratios),
        "jct_worst": max(ratios),
    }
