"""Morphling's traces on its cluster, compared with published results.

No job trains without GPUs, and restarts are charged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from tessera.formulation.errors import InvalidInput
from tessera.formulation.tables import Bools, Floats
from tessera.simulator.comparison.policies import is_ours, options_of, split_list
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, runs_of
from tessera.simulator.comparison.workload import WorkloadSpec, make_scenario
from tessera.simulator.figures import Figure, Report
from tessera.simulator.report.comparisons import bars_plot
from tessera.simulator.report.lines import distribution_plot, time_plot
from tessera.simulator.report.model import Plot, ReportFolder, report_of
from tessera.simulator.report.style import series_styles
from tessera.simulator.report.write import write_report
from tessera.simulator.statistics import Interval
from tessera.simulator.sweeps.runner import Sweep

MT_TRACE: Final = "morphling-mt"
TRACES: Final = ("morphling-base", "morphling-bp", MT_TRACE)
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
    "ilp:jct",
    "ilp:throughput",
    "ilp:0.5*throughput + jct",
    "ilp:jct within 5% then throughput",
    "ilp:finish-time-fairness",
    "greedy:jct",
)
POLICY_LIST: Final = ",".join(POLICIES)
TICK_S: Final = 60.0
"""The seconds between decisions of Morphling's simulator."""
SHORT_S: Final = 300.0
"""The run time alone below which a job counts as short."""
HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class KnownResult:
    """A published or re-measured result, in hours.

    ``jct_h``, ``guaranteed_h`` and ``best_effort_h`` are mean JCTs.
    """

    trace: str
    policy: str
    source: str
    jct_h: float
    p99_h: float
    makespan_h: float
    guaranteed_h: float = np.nan
    best_effort_h: float = np.nan


_PAPER: Final = "Morphling, Table 4"
_SHIPPED: Final = "its simulator as shipped, 260 s"
_FIXED: Final = "its simulator, no job without GPUs, 78 s"
_FIXED_260: Final = "its simulator, no job without GPUs, 260 s"
KNOWN_RESULTS: Final = (
    KnownResult("morphling-base", "morphling", _PAPER, 0.96, 7.1, 15.3),
    KnownResult("morphling-base", "morphling-r", _PAPER, 1.6, 9.9, 19.8),
    KnownResult("morphling-base", "morphling-e", _PAPER, 2.4, 10.9, 20.2),
    KnownResult("morphling-base", "morphling-n", _PAPER, 3.1, 12.8, 22.0),
    KnownResult("morphling-base", "sia", _PAPER, 2.5, 12.2, 18.8),
    KnownResult("morphling-base", "synergy", _PAPER, 3.1, 13.5, 21.5),
    KnownResult("morphling-base", "morphling", _SHIPPED, 1.01, 8.1, 16.3),
    KnownResult("morphling-base", "morphling", _FIXED, 1.68, 12.2, 24.6),
    KnownResult("morphling-base", "synergy", _FIXED, 1.38, 10.9, 20.6),
    KnownResult("morphling-bp", "morphling", _PAPER, 0.96, 7.1, 15.3),
    KnownResult("morphling-bp", "sia", _PAPER, 1.8, 9.0, 16.5),
    KnownResult("morphling-bp", "synergy", _PAPER, 2.3, 10.8, 20.5),
    KnownResult("morphling-bp", "synergy", _FIXED, 1.59, 10.7, 20.7),
    KnownResult("morphling-mt", "morphling", _PAPER, 1.1, 11.4, 17.9, 0.85, 1.34),
    KnownResult("morphling-mt", "antman", _PAPER, 1.75, 13.4, 19.6, 1.41, 2.1),
    KnownResult("morphling-mt", "morphling", _SHIPPED, 1.12, 7.9, 16.9, 0.65, 1.55),
    KnownResult("morphling-mt", "antman", _FIXED_260, 2.81, 11.2, 20.8, 1.22, 4.26),
)
"""Known results. Those of the paper are from its cluster, the others from the artifact's simulator.

The simulator was run as it is, or with a stop for the jobs that it lets train without GPUs. It
charges 260 s for a restart; the paper has 78 s.
"""

Runs = Mapping[tuple[str, str], FinishedRun]
"""The runs by trace and policy."""


@register_case(
    "morphling",
    smoke={"rounds": 24, "policies": "synergy,morphling", "ours": "greedy:jct", "workers": 0},
    jct_gain_vs_morphling=(">=", 0.0),
    jct_gain_vs_synergy=(">=", 0.0),
    mt_jct_gain_vs_morphling=(">=", 0.0),
    mt_jct_gain_vs_antman=(">=", 0.0),
    refused=("==", 0),
    unfinished=("==", 0),
)
@with_sweep
def run_morphling_traces(
    *,
    traces: Annotated[str, typer.Option(help=f"Comma-separated traces: {', '.join(TRACES)}.")] = (
        "morphling-base,morphling-mt"
    ),
    policies: PoliciesOption = POLICY_LIST,
    ours: Annotated[str, typer.Option(help="Policy of ours to which the figures refer.")] = (
        "ilp:jct"
    ),
    overheads: OverheadsOption = "morphling",
    tick_s: Annotated[float, typer.Option(help="Minimum time between rounds in seconds.")] = TICK_S,
    rounds: RoundsOption = 2000,
    seed: int = 0,
    sweep: Sweep,
    report: ReportFolder = None,
) -> Report:
    """Run Morphling's traces on 64 A800 under every policy, until all jobs have ended.

    Speeds are the artifact's measurements (a Cell's plan is the best measured one). A
    reconfiguration costs the paper's 78 s, and a first start half of that. A round runs when
    something has happened, but at most one in a minute. Unlike in the artifact's simulator, no job
    trains without GPUs. Our ``run_morphling_traces`` is the paper's Algorithm 1, which the artifact's code
    does not reach, so it is better than that code. The plan with which a job was submitted plays no
    role, so base and bp are one workload, and Morphling-N is Morphling-E.

    The measures are the paper's: mean and 99th percentile of JCT, and makespan. ``ours`` is the
    objective for mean JCT, not chosen on these traces. ``jct_gain_vs_*`` is 1 less our mean JCT
    over theirs, on the base trace (or the first trace given). ``mt_*`` is the same on mt, where 194
    of 406 jobs, drawn by seed, are guaranteed within a quota of all GPUs. ``mt_jct_rank_kept`` is
    the rank among the policies that take no guaranteed job off its GPUs until the last arrival
    (``guaranteed_off`` 0 in the table), as ours must not. ``bound_h`` is the mean JCT that no
    schedule can beat. Short jobs are those that would end within 300 s if they ran alone:
    ``short_share`` is their share, and ``short_part_of_gain`` their part of our gain over
    Morphling.
    """
    names = split_list(traces, TRACES)
    contestants = list(dict.fromkeys([*split_list(policies), ours]))
    for name in contestants:
        options_of(name)  # before anything runs
    if not is_ours(ours):
        raise InvalidInput("ours", f"{ours!r} is not ours; write ilp:OBJECTIVE, e.g. ilp:jct")
    works = {trace: WorkloadSpec(trace=trace, rounds=rounds, seed=seed) for trace in names}
    guaranteed = {
        trace: np.array([one.spec.guaranteed for one in make_scenario(work).scenario.arrivals])
        for trace, work in works.items()
    }
    tasks = {
        (trace, policy): RunRequest(
            work=work, policy=policy, overheads=overheads, round_s=tick_s, mapped=True
        ).task(f"{policy} on {trace}")
        for trace, work in works.items()
        for policy in contestants
    }
    result = runs_of(tasks, sweep)
    waived = frozenset(_GAINS) if rounds < 2000 else frozenset()
    made_here = Report(
        seed=seed,
        figures=_figures(result, names, ours, guaranteed),
        table=_table(result, guaranteed),
        waived=waived,
    )
    if report is not None:
        options = {"traces": names, "ours": ours, "overheads": overheads, "tick_s": tick_s}
        page = report_of(
            made_here,
            title="Morphling's traces",
            options=options,
            plots=_plots(result, names, ours),
            summary="JCT and makespan on 64 A800, with GPUs counted and restarts charged.",
            notes=_notes(made_here.figures, ours),
        )
        write_report(page, report)
    return made_here


_GAINS: Final = tuple(
    f"{prefix}jct_gain_vs_{baseline}"
    for prefix, baselines in (("", ("morphling", "synergy")), ("mt_", ("morphling", "antman")))
    for baseline in baselines
)


def mean_jct_h(ran: FinishedRun, which: Bools | None = None) -> float:
    """Return the mean JCT in hours of the jobs that ended, or NaN without any.

    If ``which`` is given, only the jobs in it count.
    """
    jct_s = ran.jct_s[np.isfinite(ran.end_s) & (True if which is None else which)]
    return float(jct_s.mean()) / HOUR_S if len(jct_s) else float("nan")


def _figures(
    ran: Runs, traces: Sequence[str], ours: str, guaranteed: Mapping[str, Bools]
) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for trace in dict.fromkeys((traces[0], *(t for t in traces if t == MT_TRACE))):
        runs = {policy: one for (name, policy), one in ran.items() if name == trace}
        mine, prefix = runs[ours], "mt_" if trace == MT_TRACE else ""
        result: dict[str, Figure] = {
            "jct_h": mean_jct_h(mine),
            "jct_p99_h": _p99_h(mine),
            "makespan_h": mine.figures["makespan_s"] / HOUR_S,
            "bound_h": float(mine.alone_s.mean()) / HOUR_S,
        }
        for baseline in ("morphling", "antman" if trace == MT_TRACE else "synergy"):
            if baseline in runs:
                result[f"jct_gain_vs_{baseline}"] = 1.0 - mean_jct_h(mine) / mean_jct_h(
                    runs[baseline]
                )
        others = {p: one for p, one in runs.items() if not is_ours(p)}
        result |= {"jct_rank": _rank(mine, others.values()), "others": len(others)}
        if trace == MT_TRACE:
            kept = [one for one in others.values() if not taken_off(one, guaranteed[trace])]
            result |= {"jct_rank_kept": _rank(mine, kept), "others_kept": len(kept)}
            result["guaranteed_jct_h"] = mean_jct_h(mine, guaranteed[trace])
        elif "morphling" in runs:
            result["short_part_of_gain"] = short_part(mine, runs["morphling"])
        figures |= {prefix + name: value for name, value in result.items()}
    first = ran[traces[0], ours]
    return figures | {
        "short_share": float((first.alone_s < SHORT_S).mean()),
        "refused": sum(int(one.figures["refused"]) for one in ran.values()),
        "unfinished": sum(int((~np.isfinite(one.end_s)).sum()) for one in ran.values()),
    }


def _rank(mine: FinishedRun, others: Iterable[FinishedRun]) -> int:
    return 1 + sum(mean_jct_h(one) < mean_jct_h(mine) for one in others)


def short_part(mine: FinishedRun, baseline: FinishedRun) -> float:
    """Return the share of short jobs in the JCT that ``mine`` gains on ``baseline``."""
    both = np.isfinite(mine.end_s) & np.isfinite(baseline.end_s)
    gain_s = np.where(both, baseline.end_s, 0.0) - np.where(both, mine.end_s, 0.0)
    whole_s = float(gain_s.sum())
    return float(gain_s[mine.alone_s < SHORT_S].sum()) / whole_s if whole_s else float("nan")


def taken_off(ran: FinishedRun, promised: Bools) -> int:
    """Return the number of guaranteed jobs suspended after a start, if the run was mapped."""
    of_job: dict[int, list[tuple[float, float]]] = {}
    for job, start_s, end_s, _ in ran.segments:
        if promised[int(job)]:
            of_job.setdefault(int(job), []).append((start_s, end_s))
    return sum(
        any(b[0] > a[1] for a, b in pairwise(sorted(stretches))) for stretches in of_job.values()
    )


def _p99_h(ran: FinishedRun) -> float:
    return float(np.percentile(ran.jct_s[np.isfinite(ran.end_s)], 99)) / HOUR_S


def _table(ran: Runs, guaranteed: Mapping[str, Bools]) -> list[dict[str, Figure | str]]:
    """Return a row for each run by mean JCT, followed by the published results for each trace."""
    table: list[dict[str, Figure | str]] = []
    for trace, promised in guaranteed.items():
        mine = [(policy, one) for (name, policy), one in ran.items() if name == trace]
        for policy, one in sorted(mine, key=lambda pair: mean_jct_h(pair[1])):
            table.append(_row(trace, policy, one, promised))
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
    return {
        "trace": trace,
        "policy": policy,
        "source": "here",
        "jct_h": mean_jct_h(ran),
        "p99_h": _p99_h(ran),
        "makespan_h": ran.figures["makespan_s"] / HOUR_S,
        "guaranteed_h": mean_jct_h(ran, promised),
        "best_effort_h": mean_jct_h(ran, ~promised),
        "guaranteed_off": taken_off(ran, promised) if promised.any() else np.nan,
        "short_h": mean_jct_h(ran, short),
        "long_h": mean_jct_h(ran, ~short),
        "restarts": ran.figures["restarts"],
        "restart_share": ran.figures["restart_share"],
        "decide_s": ran.figures["decide_s"],
    }


def _notes(figures: Mapping[str, Figure], ours: str) -> list[str]:
    """Return notes that explain the figures."""
    notes = [
        "The paper's published results were measured on its cluster, the others with the artifact's"
        " simulator, whose restarts take 260 s unless said otherwise."
    ]
    if "short_part_of_gain" in figures:
        notes.append(
            f"{figures['short_share']:.0%} of the jobs would end within {SHORT_S:.0f} s if they ran"
            f" alone. They account for {figures['short_part_of_gain']:.0%} of the gain of {ours} over"
            " Morphling: a job that waits a few minutes for a large one waits many times its own length."
        )
    return notes


def _plots(ran: Runs, traces: Sequence[str], ours: str) -> list[Plot]:
    order = sorted({policy for _, policy in ran}, key=lambda p: mean_jct_h(ran[traces[0], p]))
    means = {t: {p: _alone(mean_jct_h(ran[t, p])) for p in order} for t in traces}
    plots = [bars_plot("Mean JCT", means, label="hours")]
    shown = list(dict.fromkeys([ours, "morphling", "synergy", *order]))[:6]
    shown = [policy for policy in shown if policy in order]
    for trace in traces:
        looks = series_styles(shown, bold=[ours])
        jct_s: dict[str, Floats] = {
            p: ran[trace, p].jct_s[np.isfinite(ran[trace, p].end_s)] for p in shown
        }
        plots.append(
            distribution_plot(
                f"Job completion time on {trace}",
                jct_s,
                label="time from arrival to end",
                seconds=True,
                totals={p: len(ran[trace, p].end_s) for p in shown},
                styles=looks,
            )
        )
        queue = {p: (ran[trace, p].course["at_s"], ran[trace, p].course["waiting"]) for p in shown}
        end_s = max(ran[trace, p].figures["horizon_s"] for p in shown)
        title = f"Waiting jobs on {trace}"
        plots.append(time_plot(title, queue, label="waiting jobs", end_s=end_s, styles=looks))
    return plots


def _alone(value: float) -> Interval:
    return Interval(value=value, low=np.nan, high=np.nan)
