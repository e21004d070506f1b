"""Morphling's traces on its cluster, compared with published results.

No job trains without GPUs, and restarts are charged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import (
    OverheadsOption,
    PoliciesOption,
    RoundsOption,
    with_sweep,
)
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.papers.morphling_runs import (
    TraceRuns,
    pool_runs,
    promised_figures,
    table_of,
    trace_figures,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.comparison.policies import is_ours, options_of, split_list
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, runs_of
from tessera.simulator.comparison.workload import WorkloadSpec, make_scenario
from tessera.simulator.completion_bound import completion_bound
from tessera.simulator.figures import Figure, Report
from tessera.simulator.overheads import preset_overheads
from tessera.simulator.sweeps.runner import Sweep

TICK_S: Final = 60.0
"""The least seconds between decisions, as in Morphling's simulator."""
OURS: Final = "ilp:jct@round_s=60"
"""The policy of ours whose figures are reported on Morphling's traces: the best on synthetic jobs."""
PROMISED_TRACES: Final = {"morphling-mt": "mt_", "morphling-quotas": "quotas_"}
"""The traces with guaranteed jobs, which are drawn by seed, and the prefixes of their figures."""
BASE: Final = "morphling-base"
TRACES: Final = (BASE, "morphling-bp", *PROMISED_TRACES)
POLICIES: Final = (
    "fcfs",
    "synergy",
    "antman",
    "sia",
    "srt",
    "arena",
    "morphling",
    "morphling-r",
    "morphling-e",
    "morphling-n",
    "ilp:jct",
    "ilp:throughput",
    "ilp:balanced",
    "ilp:balanced:0.25",
    "greedy:jct",
    OURS,
)
POLICY_LIST: Final = ",".join(POLICIES)
USUAL_ROUNDS: Final = 2000

_BASE_BOUNDS: Final = ("jct_over_bound", "jct_gain_vs_best_other")
_PROMISED_BOUNDS: Final = (
    "mt_guaranteed_jct_gain_vs_best_guarantor",
    "mt_best_effort_jct_gain_vs_best_guarantor",
)


@register_case(
    "morphling",
    smoke={
        "rounds": 24,
        "policies": "synergy,morphling",
        "ours": "greedy:jct",
        "draws": 1,
        "workers": 0,
    },
    jct_over_bound=("<=", 0.4),
    jct_gain_vs_best_other=(">=", 0.2),
    mt_guaranteed_jct_gain_vs_best_guarantor=(">=", 0.0),
    mt_best_effort_jct_gain_vs_best_guarantor=(">=", 0.0),
    mt_guarantees_kept=("==", 1),
    quotas_guarantees_kept=("==", 1),
    refused=("==", 0),
    unfinished=("==", 0),
)
@with_sweep
def run_morphling_traces(
    *,
    policies: PoliciesOption = POLICY_LIST,
    ours: Annotated[str, typer.Option(help="Policy of ours to which the figures refer.")] = OURS,
    overheads: OverheadsOption = "morphling",
    tick_s: Annotated[float, typer.Option(help="Minimum time between rounds in seconds.")] = TICK_S,
    rounds: RoundsOption = USUAL_ROUNDS,
    seed: int = 0,
    draws: Annotated[
        int, typer.Option(min=1, help="Number of draws of the traces with guaranteed jobs.")
    ] = 5,
    sweep: Sweep,
) -> Report:
    """Run Morphling's traces on 64 A800 under every policy, until all jobs have ended.

    Speeds are the artifact's measurements, and all measured execution plans are Cells, with the
    CPUs and host memory that they need. All policies choose among them. Synergy, AntMan,
    Morphling-R and Morphling-N run the plan that a job was submitted with, by their definition. A
    reconfiguration costs the paper's 78 s, and a first start half of that. A round runs when
    something has happened, but at most one in a minute. Unlike in the artifact's simulator, no job
    trains without GPUs. Our ``morphling`` is the paper's Algorithm 1, which the artifact's code does
    not reach, so it is better than that code.

    The measures are the paper's: mean and 99th percentile of JCT, and makespan. ``ours`` is the
    policy that was chosen on synthetic jobs. On the base trace, ``bound_h`` is the mean JCT that no
    schedule can beat, from prices of GPUs, ``jct_over_bound`` is our mean JCT over it, less 1, and
    ``jct_gain_vs_*`` is 1 less our mean JCT over theirs.

    On morphling-mt, 194 of 406 jobs, drawn by seed, belong to a tenant with a quota of all GPUs and
    are guaranteed. On morphling-quotas, the jobs are divided among four tenants, whose quotas are
    eight blocks of 8 GPUs: one for each tenant, and the others drawn. 194 jobs, drawn among those
    whose request is within their tenant's quota, are guaranteed. Both have ``draws`` draws, whose
    jobs are taken together. ``*_guarantees_kept`` is the share of guaranteed jobs that held GPUs
    from their first start to their end, and never ran slower than with their submitted plan on
    their request. ``*_gain_vs_best_guarantor`` compares ours with the best of AntMan and Morphling's
    variants, which know guaranteed jobs, for all jobs, for guaranteed and for best-effort ones. They
    break a few promises (``guarantees_broken`` in the table), because a gang may be placed on more
    nodes than its plan's rate holds for. ``*_jct_gain_vs_best_other`` compares with all policies,
    most of which suspend guaranteed jobs.

    The table has the deviations from the paper's Table 4 (``*_vs_paper``). Short jobs are those that
    would end within 300 s if they ran alone: ``short_share`` is their share, and
    ``short_part_of_gain`` their part of our gain over Morphling.
    """
    contestants = list(dict.fromkeys([*split_list(policies), ours]))
    for name in contestants:
        options_of(name)  # before anything runs
    if not is_ours(ours):
        raise InvalidInput("ours", f"{ours!r} is not ours; write ilp:OBJECTIVE, e.g. ilp:jct")
    works = draw_traces(rounds, seed, draws)
    asked = RunRequest(work=works[BASE][0], policy="", overheads=overheads, round_s=tick_s)
    result = run_traces(works, contestants, asked, sweep)
    usual = rounds >= USUAL_ROUNDS and ours == OURS
    return Report(
        seed=seed,
        figures=_figures(result, ours),
        table=table_of(result),
        waived=frozenset() if usual else frozenset((*_BASE_BOUNDS, *_PROMISED_BOUNDS)),
    )


def draw_traces(rounds: int, seed: int, draws: int) -> dict[str, list[WorkloadSpec]]:
    """Return the draws of each trace. Traces without guaranteed jobs have one."""
    return {
        trace: [
            WorkloadSpec(trace=trace, rounds=rounds, seed=seed + k)
            for k in range(draws if trace in PROMISED_TRACES else 1)
        ]
        for trace in TRACES
    }


def run_traces(
    works: Mapping[str, Sequence[WorkloadSpec]],
    contestants: Sequence[str],
    asked: RunRequest,
    sweep: Sweep,
) -> dict[str, TraceRuns]:
    """Run each policy on all draws of each trace, as ``asked`` in everything else."""
    bounded = {trace: _BoundedTrace(of, asked.overheads) for trace, of in works.items()}
    tasks = {
        (work.trace, policy, work.seed): replace(asked, work=work, policy=policy).task(
            f"{policy} on {work.trace}, seed {work.seed}"
        )
        for of in works.values()
        for work in of
        for policy in contestants
    }
    runs = runs_of(tasks, sweep)
    return {
        trace: bounded[trace].with_runs(
            {p: pool_runs([runs[trace, p, w.seed] for w in of]) for p in contestants}
        )
        for trace, of in works.items()
    }


class _BoundedTrace:
    """The draws of a trace, with the bounds on their mean JCT that no schedule can beat."""

    def __init__(self, works: Sequence[WorkloadSpec], overheads: str) -> None:
        scenarios = [make_scenario(work).scenario for work in works]
        self._guaranteed = [
            np.array([one.spec.guaranteed for one in scenario.arrivals]) for scenario in scenarios
        ]
        costs = preset_overheads(overheads)
        self._bounds = [completion_bound(scenario, costs) for scenario in scenarios]

    def with_runs(self, runs: Mapping[str, FinishedRun]) -> TraceRuns:
        """Return the runs with the bounds."""
        return TraceRuns(
            runs=runs,
            guaranteed=np.concatenate(self._guaranteed),
            bound_s=float(np.mean([bound.mean_s for bound in self._bounds])),
        )


def _figures(result: Mapping[str, TraceRuns], ours: str) -> dict[str, Figure]:
    figures = trace_figures(result[BASE], ours)
    for trace, prefix in PROMISED_TRACES.items():
        of = promised_figures(result[trace], ours)
        figures |= {prefix + name: value for name, value in of.items()}
    every = [run for of in result.values() for run in of.runs.values()]
    return figures | {
        "refused": sum(int(run.figures["refused"]) for run in every),
        "unfinished": sum(int((~np.isfinite(run.end_s)).sum()) for run in every),
    }
