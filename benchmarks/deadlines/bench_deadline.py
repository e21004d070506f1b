"""A benchmark of deadlines over tightness, for policies with and without promises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

import numpy as np
import typer

from tessera.benchmarks.deadlines.large_rounds import measure_large_round
from tessera.benchmarks.harness.options import (
    GpusShareOption,
    JobsOption,
    JobsShareOption,
    LoadOption,
    OverheadsOption,
    PoliciesOption,
    RoundsOption,
    SeedsOption,
    TraceOption,
    parse_number_list,
    with_sweep,
)
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.comparison.comparisons import jct_ratio, mean_figure, throughput_ratio
from tessera.simulator.comparison.information import DP_MEMORY
from tessera.simulator.comparison.policies import is_ours, split_list
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, check_requests, runs_of
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec, default_trace
from tessera.simulator.data import data_file
from tessera.simulator.figures import Figure, Report
from tessera.simulator.statistics import mean_interval, ratio_interval
from tessera.simulator.sweeps.runner import Sweep

LOOK_AHEAD: Final = "ilp:deadline@deadlines=look-ahead"
PLANNED: Final = "ilp:deadline@deadlines=planned"
MYOPIC: Final = "ilp:deadline@deadlines=myopic"
ELASTICFLOW: Final = "elasticflow"
PAPER_ELASTICFLOW: Final = "elasticflow (data parallel)"
"""ElasticFlow with the information that it sees in Arena's evaluation."""
POLICIES: Final = (
    LOOK_AHEAD,
    PLANNED,
    MYOPIC,
    ELASTICFLOW,
    "arena-deadline",
    "edf",
    "fcfs",
    "srt",
    "arena",
)
POLICY_LIST: Final = ",".join(POLICIES)
DISPLAY_NAMES: Final = {
    LOOK_AHEAD: "look-ahead",
    PLANNED: "planned",
    MYOPIC: "myopic",
    "arena-deadline": "crius-ddl",
}
DEFAULT_TIGHTNESS: Final = "1,1.2,1.5,2,3,5"
TRACE_FACTOR: Final = 5.0

BySeed = Mapping[tuple[str, float], Sequence[FinishedRun]]
"""(policy, tightness) -> a run for each seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineSweep:
    """The runs of a sweep, with the names of its policies and its values of tightness."""

    runs: BySeed
    names: tuple[str, ...]
    tightness: tuple[float, ...]

    def satisfied(self, name: str, tightness: float) -> float:
        """Return the share of submitted jobs that met their deadlines, as the mean over seeds."""
        return mean_figure(self.runs[name, tightness], "satisfaction")

    def pooled(self, name: str, key: str) -> list[float]:
        """Return a figure of each seed, as the mean over the sweep."""
        by_tightness = [
            [one.figures[key] for one in self.runs[name, value]] for value in self.tightness
        ]
        return [float(x) for x in np.mean(by_tightness, axis=0)]

    @property
    def others(self) -> list[str]:
        """Return the policies that are not ours and see the same information as ours."""
        return [name for name in self.names if not is_ours(name) and name != PAPER_ELASTICFLOW]


@register_case(
    "deadline",
    smoke={
        "trace": SYNTHETIC,
        "gpus_share": 0.03,
        "jobs": 12,
        "tightness": "1.5,3",
        "workers": 0,
        "policies": f"{LOOK_AHEAD},{MYOPIC},{ELASTICFLOW},edf",
        "round_jobs": 60,
    },
    admitted_missed=("==", 0),
    lookahead_cpu_s=("<=", 1.5),
    planned_cpu_s=("<=", 1.5),
)
@with_sweep
def sweep_deadlines(
    *,
    trace: TraceOption = None,
    gpus_share: GpusShareOption = 0.0625,
    jobs_share: JobsShareOption = 1.0,
    rounds: RoundsOption = 300,
    jobs: JobsOption = 60,
    load: LoadOption = 2.0,
    tightness: Annotated[
        str, typer.Option(help="Comma-separated factors on a job's duration on what it requested.")
    ] = DEFAULT_TIGHTNESS,
    deadlines: Annotated[
        Literal["tightness", "trace"],
        typer.Option(
            help="Deadlines by --tightness, or the trace's own at five times their distance, as in Arena."
        ),
    ] = "tightness",
    policies: PoliciesOption = POLICY_LIST,
    overheads: OverheadsOption = "default",
    search: Annotated[
        bool,
        typer.Option(
            help="Let CP-SAT search for more promises than the first fits of look-ahead find."
        ),
    ] = False,
    round_jobs: Annotated[
        int,
        typer.Option(help="Number of jobs of the large round that is timed. 0: no such round."),
    ] = 10_000,
    seeds: SeedsOption = 1,
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Vary how tight deadlines are, and measure the share of all submitted jobs that meet theirs.

    A deadline is the arrival plus ``--tightness`` times the job's duration on the GPUs that it
    requested, without restarts. ElasticFlow (ASPLOS 2023, section 6.1) draws 0.5 to 1.5. Arena and
    Crius give no number, and their artifact multiplies the deadlines of its trace by 5
    (``--deadlines trace``). So the sweep begins where only a faster Cell than the requested one can
    meet the deadline, and ends where nearly all do.

    All policies pay for restarts. A round runs when a job has arrived or ended. For look-ahead, a
    round also runs when a schedule that it promised needs one. ``satisfaction`` is the share of
    submitted jobs that ended by their deadline. ``admitted`` counts the jobs whose deadlines were
    promised, or the jobs that were started for policies that promise nothing. ``dropped`` jobs
    never ended, ``late`` jobs ended after their deadline, and ``missed`` jobs were admitted but did
    not meet it.

    ``gain_vs_elasticflow`` is our mean satisfaction over the sweep, divided by that of ElasticFlow
    with the information that it has in Arena's evaluation, which is data-parallel runs.
    ``gain_same_information`` is the same with the estimates. ``worst_margin_vs_any`` is the least
    of our satisfaction less the best other's, all with the same information. Ours is look-ahead, if
    it runs. ``admitted_missed`` counts promises that ours did not keep; none may be broken. JCT
    gains are over the jobs that both finished, and throughput is normalised. The cluster is a
    sixteenth of Arena's 1,280 GPUs, for the 101 jobs of the trace's first 300 rounds.

    The aims are a gain of 1.69 over ElasticFlow (Crius section 8.5) and a margin that is never
    below 0. ``docs/results/method.md`` says why look-ahead's margin has no bound. ``planned``
    promises nothing (``deadlines = planned``) and starts from EDF;
    ``planned_worst_margin_vs_any`` is its margin. CP-SAT's search for more promises is off
    (``--search``), because it found hardly any in five times the time.

    ``lookahead_cpu_s`` and ``planned_cpu_s`` are the least CPU seconds of three runs in which the
    deadlines of one round of ``--round-jobs`` new jobs are decided (``large_rounds``).
    ``lookahead_gap`` and ``planned_gap`` are its gaps to the bound by prices.
    """
    base = WorkloadSpec(
        trace=default_trace(trace),
        gpus_share=gpus_share,
        jobs_share=jobs_share,
        rounds=rounds,
        jobs=jobs,
        load=load,
    )
    values, drawn = _values(tightness, deadlines), range(seed, seed + seeds)
    costs = RunRequest(work=base, policy="", overheads=overheads, search=search)
    asked = _sweep_tasks(costs, split_list(policies), seeds)
    swept = _run_sweep(asked, values, drawn, sweep)
    figures = figures_of(swept)
    if round_jobs:
        figures |= measure_large_round(round_jobs, seed)
    return Report(seed=seed, figures=figures, table=table_of(swept))


def _sweep_tasks(costs: RunRequest, names: Sequence[str], seeds: int) -> dict[str, RunRequest]:
    """Return the request of each policy, and of ElasticFlow as in the paper if it takes part.

    The paper's needs a file of the data folder, which does not cover synthetic jobs.

    Raises:
        MissingData: a data set is absent.
        InvalidInput: a policy is not known, or all seeds draw the same jobs.
    """
    asked = {name: replace(costs, policy=name) for name in names}
    check_requests(asked.values(), seeds)
    published = costs.work.trace != SYNTHETIC and data_file(None, *DP_MEMORY) is not None
    if published and ELASTICFLOW in names:
        asked[PAPER_ELASTICFLOW] = replace(costs, policy=ELASTICFLOW, information="data-parallel")
    return asked


def _run_sweep(
    asked: Mapping[str, RunRequest], values: tuple[float, ...], drawn: range, sweep: Sweep
) -> DeadlineSweep:
    """Run each request at each value of tightness and with each seed of ``drawn``."""
    tasks = {
        (name, value, k): replace(one, work=_work(one.work, value, k)).task(
            f"{display_name(name)} at {value:g}, seed {k}"
        )
        for name, one in asked.items()
        for value in values
        for k in drawn
    }
    result = runs_of(tasks, sweep)
    runs = {(n, v): [result[n, v, k] for k in drawn] for n in asked for v in values}
    return DeadlineSweep(runs=runs, names=tuple(asked), tightness=values)


def display_name(name: str) -> str:
    """Return a policy's name in tables and pictures."""
    return DISPLAY_NAMES.get(name, name)


def figures_of(swept: DeadlineSweep) -> dict[str, Figure]:
    """Return the figures of the sweep.

    Ours is look-ahead, or if that did not run, the first of ours.
    """
    own = [name for name in swept.names if is_ours(name)]
    if not own:
        raise InvalidInput("policies", f"must include one of ours, e.g. {LOOK_AHEAD}")
    ours = LOOK_AHEAD if LOOK_AHEAD in own else own[0]
    kept = swept.pooled(ours, "satisfaction")
    result: dict[str, Figure] = {"mean_satisfaction": float(np.mean(kept))}
    result |= _gains_over_elasticflow(swept, ours) | _margins(swept, ours)
    if MYOPIC in own and ours != MYOPIC:
        result["look_ahead_vs_myopic"] = ratio_interval(
            kept, swept.pooled(MYOPIC, "satisfaction")
        ).value
    runs = [one for name in own for value in swept.tightness for one in swept.runs[name, value]]
    result["admitted_missed"] = int(sum(r.figures["deadlines_missed_admitted"] for r in runs))
    result["admitted_by_ours"] = int(sum(r.figures["deadlines_admitted"] for r in runs))
    return result


def _gains_over_elasticflow(swept: DeadlineSweep, ours: str) -> dict[str, Figure]:
    """Return the gains of ``ours`` over ElasticFlow, if that ran."""
    kept, result = swept.pooled(ours, "satisfaction"), dict[str, Figure]()
    for baseline, key in (
        (PAPER_ELASTICFLOW, "gain_vs_elasticflow"),
        (ELASTICFLOW, "gain_same_information"),
    ):
        if baseline in swept.names:
            gain = ratio_interval(kept, swept.pooled(baseline, "satisfaction"))
            result[key] = gain.value
            if not math.isnan(gain.low):
                result |= {f"{key}_low": gain.low, f"{key}_high": gain.high}
    baseline = PAPER_ELASTICFLOW if PAPER_ELASTICFLOW in swept.names else ELASTICFLOW
    if baseline in swept.names:
        result |= {
            "jct_gain_vs_elasticflow": 1 - _mean_of(swept, ours, baseline, "jct"),
            "throughput_vs_elasticflow": _mean_of(swept, ours, baseline, "throughput"),
            "peak_throughput_vs_elasticflow": ratio_interval(
                swept.pooled(ours, "throughput_peak"), swept.pooled(baseline, "throughput_peak")
            ).value,
        }
    return result


def _margins(swept: DeadlineSweep, ours: str) -> dict[str, Figure]:
    """Return the smallest margins of ``ours`` and of the planned policy over the best other one."""
    result: dict[str, Figure] = {}
    if not swept.others:
        return result
    margin, at = _worst_margin(swept, ours)
    result |= {"worst_margin_vs_any": margin, "worst_margin_tightness": at}
    if PLANNED in swept.names and ours != PLANNED:
        margin, at = _worst_margin(swept, PLANNED)
        result |= {
            "planned_satisfaction": float(np.mean(swept.pooled(PLANNED, "satisfaction"))),
            "planned_worst_margin_vs_any": margin,
            "planned_worst_margin_tightness": at,
        }
    return result


def _worst_margin(swept: DeadlineSweep, ours: str) -> tuple[float, float]:
    """Return the smallest margin of ``ours`` over the best other policy, and its tightness."""
    margins = [
        swept.satisfied(ours, value) - max(swept.satisfied(o, value) for o in swept.others)
        for value in swept.tightness
    ]
    worst = int(np.argmin(margins))
    return margins[worst], swept.tightness[worst]


def _mean_of(swept: DeadlineSweep, ours: str, baseline: str, what: str) -> float:
    """Return the mean ratio over the sweep.

    Values of tightness at which no job finished do not count.
    """
    compare = jct_ratio if what == "jct" else throughput_ratio
    ratios = [
        compare(swept.runs[ours, value], swept.runs[baseline, value]).value
        for value in swept.tightness
    ]
    known = [r for r in ratios if not math.isnan(r)]
    return float(np.mean(known)) if known else math.nan


def table_of(swept: DeadlineSweep) -> list[dict[str, Figure | str]]:
    """Return a row for each tightness and policy, sorted by satisfaction."""
    result = []
    for value in swept.tightness:
        rows = [_row(swept, name, value) for name in swept.names]
        result += sorted(rows, key=lambda row: -float(row["satisfaction"]))
    return result


def _row(swept: DeadlineSweep, name: str, value: float) -> dict[str, Figure | str]:
    runs = swept.runs[name, value]
    share = mean_interval([one.figures["satisfaction"] for one in runs])
    keeps = is_ours(name) and name != PLANNED
    promises = "deadlines_admitted" if keeps else "deadlines_started"
    admitted, met = mean_figure(runs, promises), mean_figure(runs, "deadlines_met")
    row: dict[str, Figure | str] = {
        "tightness": value or "trace",
        "policy": display_name(name),
        "ours": is_ours(name),
        "jobs": mean_figure(runs, "jobs"),
        "load": mean_figure(runs, "load"),
        "satisfaction": share.value,
    }
    if not math.isnan(share.low):
        row |= {"satisfaction_low": share.low, "satisfaction_high": share.high}
    row |= {
        "met": met,
        "admitted": admitted,
        "missed": admitted - met,
        "late": mean_figure(runs, "deadlines_late"),
        "dropped": mean_figure(runs, "jobs") - mean_figure(runs, "completed"),
    }
    keys = (
        "jct_mean_s",
        "throughput",
        "throughput_peak",
        "samples_per_s",
        "samples_per_s_peak",
        "utilisation",
        "restarts",
        "restart_share",
        "rounds",
        "refused",
        "decide_s",
        "decide_max_s",
    )
    return row | {key: mean_figure(runs, key) for key in keys}


def _values(tightness: str, deadlines: str) -> tuple[float, ...]:
    """Return the values of the sweep in ascending order; (0,) means the trace's own.

    Raises InvalidInput.
    """
    if deadlines == "trace":
        return (0.0,)
    return parse_number_list("tightness", tightness, lambda x: 0 < x < math.inf, "positive numbers")


def _work(base: WorkloadSpec, tightness: float, seed: int) -> WorkloadSpec:
    if tightness:
        return replace(base, tightness=tightness, seed=seed)
    return replace(base, deadlines=True, deadline_factor=TRACE_FACTOR, seed=seed)
