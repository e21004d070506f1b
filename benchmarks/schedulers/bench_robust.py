"""A benchmark of our policy next to the best published scheduler, on workloads of many kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import BaselinesOption, SeedsOption, with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.robust_runs import (
    SeedRuns,
    Standing,
    WorkloadRequest,
    WorkloadRun,
    find_standing,
    jct_over,
    wait_percentile_s,
)
from tessera.benchmarks.schedulers.robust_workloads import WORKLOADS, check_workload
from tessera.formulation.round.policy import DEFAULT_OBJECTIVE
from tessera.simulator.comparison.policies import ILP, options_of, split_list
from tessera.simulator.data import MissingData
from tessera.simulator.figures import Figure, Report
from tessera.simulator.sweeps.runner import Sweep
from tessera.solvers.schedulers.registry import scheduler_names

STEADY_SCHEDULERS: Final = ("fcfs", "easy", "conservative", "arena")
"""Schedulers that suspend no job for another's gain."""
BASELINES: Final = ",".join(
    (
        *STEADY_SCHEDULERS,
        "srt",
        "gandiva",
        "gavel",
        "gavel-las",
        "elasticflow",
        "sia",
        "morphling",
        "synergy",
        "antman",
    )
)
KEPT_REQUESTS: Final = "keep_requests=false"
"""The setting that lets rounds take GPUs from a job that asked for them."""
LAWS: Final[Mapping[str, str]] = {
    setting.partition("=")[0]: setting
    for setting in (KEPT_REQUESTS, "promise_starts=false", "change_spacing=0")
}
"""The settings that switch a law off, by option."""
BOUNDS: Final[Mapping[str, tuple[str, Figure]]] = {
    "worst_ratio_free": ("<=", 1.05),
    "worst_ratio_laws": ("<=", 1.05),
    "p95_ratio_free": ("<=", 1.2),
    "p95_ratio_laws": ("<=", 1.2),
}
MIN_JUDGED_JOBS: Final = 60
"""The number of jobs of a workload below which bounds are not judged, since chance decides."""

Runs = Mapping[str, Mapping[str, SeedRuns]]
"""Workload -> policy -> a run for each seed."""


@register_case(
    "robust",
    smoke={
        "seeds": 1,
        "workloads": "rigid-light,elastic-light",
        "jobs": 20,
        "baselines": "easy,arena",
        "workers": 0,
    },
    **BOUNDS,
)
@with_sweep
def compare_on_many_workloads(
    *,
    seeds: SeedsOption = 3,
    workloads: Annotated[
        str, typer.Option(help="Comma-separated workloads. Default: all of them.")
    ] = ",".join(WORKLOADS),
    jobs: Annotated[int, typer.Option(min=12, help="Number of jobs of a drawn workload.")] = 120,
    objective: Annotated[
        str,
        typer.Option(
            help="Comma-separated objectives, each perhaps with options: jct@change_spacing=10."
            " Figures are of the first."
        ),
    ] = DEFAULT_OBJECTIVE,
    baselines: BaselinesOption = BASELINES,
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Run our policy and published schedulers on workloads of many kinds, and find our worst one.

    Drawn workloads (``robust_workloads``) have rigid and elastic jobs, lengths with light and heavy
    tails, small jobs and large gangs, one to eight GPU types, loads of 0.5 to 4, bursts, models that
    scale well or badly, wrong estimates, and costly restarts, on 24 to 64 GPUs. Samples of published
    traces follow; those without data are skipped, and the table says so. Rounds are as a server
    has them. All jobs run to their end.

    ``ratio`` is our mean JCT over the best published scheduler's on a workload, over the jobs that
    both finished, as a geometric mean over seeds. ``worst_ratio`` is the largest over the workloads,
    and ``mean_ratio`` the geometric mean. ``p95_ratio`` is the same of the 95th percentile of the
    time that a job waits without GPUs, before its start and after stops, with 300 s added to both.
    The best scheduler may be another one for each figure and workload; ``p95_over_leader`` compares
    the waits with the scheduler that has the lowest mean JCT. A scheduler that broke a
    rule or did not finish all jobs of a workload is left out there.

    ``..._free`` figures are without ``keep_requests``, against all published schedulers: rounds may
    take GPUs from a job that asked for them, as most of these do. ``..._laws`` figures are with all laws,
    against the schedulers that suspend no job for another's gain: fcfs, easy, conservative, arena.
    The limits are 5 % of JCT and a fifth of waiting, with at
    least 60 jobs. ``cost_of_LAW`` is the geometric mean of our
    mean JCT over the same without one law.

    With several objectives, a row ``all`` of the table has these figures for each, so that a default
    can be chosen.
    """
    names = split_list(workloads, WORKLOADS)
    rivals = [name for name in split_list(baselines) if name in scheduler_names()]
    our_policies = [f"{ILP}{text}" for text in split_list(objective)]
    variants = [v for policy in our_policies for v in (policy, *variants_of(policy).values())]
    for policy in variants:
        options_of(policy)
    gaps = dict(_find_missing(names))
    requests = {
        (name, policy): [
            WorkloadRequest(workload=name, seed=k, jobs=jobs, policy=policy)
            for k in range(seed, seed + seeds)
        ]
        for name in names
        if name not in gaps
        for policy in dict.fromkeys((*variants, *rivals))
    }
    tasks = [request.task() for of_seeds in requests.values() for request in of_seeds]
    results = sweep.run(tasks)
    runs: dict[str, dict[str, SeedRuns]] = {}
    for (name, policy), of_seeds in requests.items():
        runs.setdefault(name, {})[policy] = [
            WorkloadRun(**results[request.task().name]) for request in of_seeds
        ]
    counts: dict[str, Figure] = {"workloads": len(runs), "skipped": len(gaps), "seeds": seeds}
    table = [*_summary_rows(runs, our_policies), *_workload_rows(runs)]
    table += [{"workload": name, "skipped": reason} for name, reason in gaps.items()]
    return Report(
        seed=seed,
        figures={**counts, **robust_figures(runs, our_policies[0])},
        waived=frozenset(BOUNDS if jobs < MIN_JUDGED_JOBS else ()),
        table=table,
    )


def _find_missing(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the workloads that lack data, each with the reason."""
    for name in names:
        try:
            check_workload(name)
        except MissingData as reason:
            yield name, str(reason)


def variants_of(policy: str) -> dict[str, str]:
    """Return the policy without each law, by the law's option."""
    return {law: f"{policy}@{setting}" for law, setting in LAWS.items()}


def robust_figures(runs: Runs, policy: str) -> dict[str, Figure]:
    """Return the figures of one of our policies. A figure without a value is left out."""
    result: dict[str, Figure] = {}
    for label, standings in find_standings(runs, policy).items():
        jct = np.array([standing.jct.ratio for standing in standings.values()])
        waits = np.array([standing.waits.ratio for standing in standings.values()])
        leader_waits = [standing.leader_waits for standing in standings.values()]
        if np.isfinite(jct).any():
            result |= {
                f"worst_ratio_{label}": float(np.nanmax(jct)),
                f"mean_ratio_{label}": float(np.exp(np.nanmean(np.log(jct)))),
                f"p95_ratio_{label}": float(np.nanmax(waits)),
                f"mean_p95_ratio_{label}": float(np.exp(np.nanmean(np.log(waits)))),
                f"p95_over_leader_{label}": float(np.nanmax(leader_waits)),
            }
    for law, variant in variants_of(policy).items():
        costs = [np.log(jct_over(pair[policy], pair[variant])) for pair in runs.values()]
        result[f"cost_of_{law}"] = float(np.exp(np.nanmean(costs)))
    return result


Standings = Mapping[str, Standing]
"""A policy's standing by workload."""


def find_standings(runs: Runs, policy: str) -> dict[str, Standings]:
    """Return our policy's standings: without kept requests ("free"), and with all "laws"."""
    free_policy = variants_of(policy).get("keep_requests", policy)
    return {
        "free": {name: find_standing(by_policy, free_policy) for name, by_policy in runs.items()},
        "laws": {
            name: find_standing(by_policy, policy, STEADY_SCHEDULERS)
            for name, by_policy in runs.items()
        },
    }


def _summary_rows(runs: Runs, policies: Sequence[str]) -> Iterator[dict[str, Figure | str]]:
    """Yield a row of figures for each of our policies, with the workloads that were worst."""
    for policy in policies:
        row: dict[str, Figure | str] = {"workload": "all", "policy": policy}
        row |= robust_figures(runs, policy)
        for label, standings in find_standings(runs, policy).items():
            slow = max(standings, key=lambda name: np.nan_to_num(standings[name].jct.ratio))
            patient = max(standings, key=lambda name: np.nan_to_num(standings[name].waits.ratio))
            row[f"worst_workload_{label}"] = f"{slow} ({standings[slow].jct.rival})"
            row[f"p95_workload_{label}"] = f"{patient} ({standings[patient].waits.rival})"
        yield row


def _workload_rows(runs: Runs) -> Iterator[dict[str, Figure | str]]:
    """Yield a row for each workload and policy, over all seeds."""
    for name, by_policy in runs.items():
        for policy, of_seeds in by_policy.items():
            standing = find_standing(by_policy, policy)
            steady = find_standing(by_policy, policy, STEADY_SCHEDULERS)
            jct_s = [np.array(run.jct_s)[run.has_ended] for run in of_seeds]
            yield {
                "workload": name,
                "policy": policy,
                "ratio": standing.jct.ratio,
                "best": standing.jct.rival,
                "p95_ratio": standing.waits.ratio,
                "p95_best": standing.waits.rival,
                "p95_over_leader": standing.leader_waits,
                "ratio_to_steady": steady.jct.ratio,
                "p95_ratio_to_steady": steady.waits.ratio,
                "jct_mean_s": float(np.concatenate(jct_s).mean()),
                "wait_p95_s": wait_percentile_s(of_seeds),
                "unfinished": sum(int((~run.has_ended).sum()) for run in of_seeds),
                "refused_rounds": sum(run.refused_rounds for run in of_seeds),
                "restarts": sum(run.restarts for run in of_seeds),
                "utilisation": float(np.mean([run.utilisation for run in of_seeds])),
                "decide_s": sum(run.decide_s for run in of_seeds),
                "longest_round_s": max(run.longest_round_s for run in of_seeds),
            }
