"""An ablation: each part of a policy is taken away and measured on the same workloads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import (
    GpusShareOption,
    JobsOption,
    JobsShareOption,
    SeedsOption,
    parse_number_list,
    with_sweep,
    with_work,
)
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.ablations import (
    ARENA,
    NEEDS_KNOWLEDGE,
    AblationPlan,
    AblationRow,
)
from tessera.benchmarks.schedulers.knowledge import Knowledge, learn_workloads
from tessera.benchmarks.schedulers.variants import check_variants, queue_of, seed_run
from tessera.simulator.comparison.comparisons import (
    SeedRuns,
    jct_ratio,
    mean_figure,
    throughput_ratio,
)
from tessera.simulator.comparison.policies import DEFAULT_POLICY, split_list
from tessera.simulator.comparison.runs import RunRequest, runs_of
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec, resize_workload
from tessera.simulator.figures import Figure, Report
from tessera.simulator.report.comparisons import IntervalCurve, bars_plot, curves_plot
from tessera.simulator.report.model import Plot, ReportFolder, report_of
from tessera.simulator.report.style import series_styles
from tessera.simulator.report.write import write_report
from tessera.simulator.statistics import Interval
from tessera.simulator.sweeps.runner import Sweep

PARTS: Final = ("components", "alone", "depth", "queues", "types")
BASELINES: Final = ("fcfs", "elasticflow-ls", "sia")
"""The baselines of the scheduler alone and of the GPU types."""
MEAN_FIGURES: Final = (
    "throughput",
    "completed",
    "queue_mean_s",
    "queue_p95_s",
    "fairness_worst",
    "restarts",
    "restart_share",
    "utilisation",
    "stuck",
    "load",
    "decide_p50_s",
    "decide_max_s",
)


RunsByRow = Mapping[AblationRow, SeedRuns]


@register_case(
    "ablation",
    smoke={
        "trace": SYNTHETIC,
        "gpus_share": 0.05,
        "jobs": 6,
        "seeds": 1,
        "workers": 0,
        "depths": "2",
        "queues": "2",
        "types": "1",
        "ours": "greedy:throughput",
        "others": "fcfs",
    },
)
@with_work
@with_sweep
def ablate_policies(
    *,
    work: WorkloadSpec,
    gpus_share: GpusShareOption = 0.25,
    jobs_share: JobsShareOption = 0.25,
    jobs: JobsOption = 200,
    parts: Annotated[str, typer.Option(help="Comma-separated parts to run.")] = ",".join(PARTS),
    ours: Annotated[str, typer.Option(help="The policy of ours.")] = DEFAULT_POLICY,
    others: Annotated[
        str, typer.Option(help="Comma-separated baselines for `alone` and `types`.")
    ] = ",".join(BASELINES),
    depths: Annotated[str, typer.Option(help="Depths of Arena's search.")] = "1,2,3,4,5",
    queues: Annotated[str, typer.Option(help="Numbers of priority queues.")] = "1,2,4,8",
    types: Annotated[str, typer.Option(help="Numbers of GPU types.")] = "1,2,4",
    heavy: Annotated[
        float, typer.Option(help="Factor on the arrival rate under `depth` and `queues`.")
    ] = 4.0,
    seeds: SeedsOption = 3,
    sweep: Sweep,
    report: ReportFolder = None,
) -> Report:
    """Remove one component at a time from Arena's policy and from ours. Everything else stays the same.

    ``components`` (Arena section 5.7, Crius section 8.6). Without elasticity, a job runs on the
    number of GPUs that it requests. Without heterogeneity, it runs on the type that it requests.
    Without opportunism, no job starts ahead of a blocked job. Arena's policy has switches for
    these. For ours, jobs are pinned to their types, or bounded by the GPUs that they request. Ours
    has no blocked jobs, because it starts jobs by value. In place of opportunism, its jobs start in
    order of arrival (``queue_order``).

    In ``components`` and ``alone``, rounds see the estimates of the estimator's own planner, and
    jobs always run at the speeds of the trace (``tessera.benchmarks.schedulers.knowledge``).

    * Full: the best plan of the planner on each GPU type, GPU count and shape, by profiles. Profiling
      tasks hold GPUs of the cluster, and rounds see a model on a type only when its task has ended.
      A search for the plan at a start takes as long as a pruned one on Arena's testbed.
    * Without pruning, a search takes as long as a full one on that testbed (``testbed-full``).
    * Without a planner, rounds see what the estimator prices for pure data parallelism, by profiles.
      Counts on which that does not fit are infeasible.
    * Without a profiler, rounds see the best plan of the planner by data sheets alone, from the
      arrival of the first job on, and there are no profiling tasks. This is what the service knows of
      a model that nobody profiled.
    * A further variant has the estimates of the full one with an error of 20 % on average.

    The trace's own smallest run of a model on a type stands for its profile, since no such GPU is at
    hand. GPU types and counts on which the trace has no run are left out of all variants alike. A
    workload whose model is in no catalogue has no estimates: its jobs run at an unknown rate on what
    they request, as in the service. A GPU type that the hardware catalogue lacks has no estimates
    either. ``unknown_workloads`` and ``unknown_types`` count these. Elsewhere, rounds know the true
    speeds.

    ``alone``: all policies see data-parallel estimates, and pay for full searches. ``depth`` and
    ``queues``: Arena's search depth and the number of priority queues, while jobs arrive
    ``--heavy`` times as fast (Crius section 8.7, Arena section 5.8). Queues are drawn evenly, and
    ours has ``queue_order`` and ``opportunistic`` there. ``types``: the same jobs on the same
    number of GPUs, of 1, 2 and 4 types (``tessera.benchmarks.schedulers.variants.on_fewer_types``).

    Ratios are relative to the run named in ``against``, with the same seeds and 95 % intervals.
    They are of mean JCT over the jobs that both finished, to completion, and of normalised
    throughput while jobs arrive. A figure ``jct_loss_POLICY_PART`` is the first ratio less 1;
    ``throughput_loss_*`` is 1 less the second. One of the two runs may leave jobs that the other
    finished, because what rounds see says that they run nowhere. Mean JCT is then meaningless, and
    ``unfinished_*``, their share, replaces it. No bound says that a loss is positive.
    """
    chosen = split_list(parts, PARTS)
    work, seed = resize_workload(work, gpus_share, jobs_share, jobs), work.seed
    drawn = range(seed, seed + seeds)
    known = Knowledge()
    if NEEDS_KNOWLEDGE & set(chosen):
        known = learn_workloads([replace(work, seed=k) for k in drawn], sweep)
    plan = AblationPlan(
        base=RunRequest(work=work, policy=ARENA),
        ours=ours,
        others=tuple(split_list(others)),
        heavy=heavy,
        depths=parse_whole_numbers(depths),
        queues=parse_whole_numbers(queues),
        types=parse_whole_numbers(types),
        rows_of=known.rows,
    )
    runs = _ran(plan.rows(chosen), drawn, sweep)
    made = Report(
        seed=seed,
        figures={
            **_figures(runs),
            "unknown_workloads": len(known.unknown),
            "unknown_types": len(known.unknown_types),
        },
        table=[_line(row, runs) for row in runs],
    )
    if report is not None:
        options = {
            "trace": work.trace,
            "gpus_share": gpus_share,
            "jobs_share": work.jobs_share,
            "rounds": work.rounds,
            "parts": chosen,
            "ours": ours,
            "heavy": heavy,
        }
        page = report_of(
            made,
            title="Ablation",
            options=options,
            seeds=list(drawn),
            plots=list(_plots(runs)),
            summary="The contribution of each component of Arena's policy and of ours.",
        )
        write_report(page, report)
    return made


def _ran(rows: Sequence[AblationRow], drawn: range, sweep: Sweep) -> dict[AblationRow, SeedRuns]:
    """Return the runs of each row, in the order of the seeds ``drawn``."""
    check_variants([row.run for row in rows], len(drawn))
    tasks = {
        (row, k): seed_run(row.run, k).task(f"{row.part} {row.x:g} {row.name}, seed {k}")
        for row in rows
        for k in drawn
    }
    result = runs_of(tasks, sweep)
    return {row: [result[row, k] for k in drawn] for row in rows}


def parse_whole_numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a comma-separated list, in ascending order.

    Raises InvalidInput.
    """
    result = parse_number_list(
        "list", text, lambda n: n >= 1 and n.is_integer(), "positive whole numbers"
    )
    return tuple(map(int, result))


def reference_runs(row: AblationRow, every: RunsByRow) -> SeedRuns | None:
    """Return the runs that ``row`` is compared with. If they are not there, return None.

    For depths and queues these are the first of the sweep, otherwise those with the same ``x``.
    """
    swept = row.part in ("depth", "queues")
    same = [r for r in every if r.part == row.part and r.name == row.against]
    result = [r for r in same if swept or r.x == row.x]
    return every[min(result, key=lambda r: r.x)] if result else None


def relative_results(row: AblationRow, every: RunsByRow) -> tuple[Interval, Interval]:
    """Return mean JCT and throughput divided by those of the runs that ``row`` is compared with."""
    over = reference_runs(row, every)
    if over is None:
        nothing = Interval(value=np.nan, low=np.nan, high=np.nan)
        return nothing, nothing
    return jct_ratio(every[row], over), throughput_ratio(every[row], over)


def _figures(every: RunsByRow) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for row in every:
        over = reference_runs(row, every)
        if over is None or over is every[row]:
            continue
        what = row.variant if row.part == "components" else row.part
        x = f"_{row.x:g}" if row.x else ""
        policy = row.policy.partition("@")[0]
        name = f"{policy}_{what.replace(' ', '_')}{x}"
        jct, throughput = relative_results(row, every)
        if fewer := unfinished_share(every[row], over):
            figures[f"unfinished_{name}"] = fewer
        else:
            figures[f"jct_loss_{name}"] = jct.value - 1
        figures[f"throughput_loss_{name}"] = 1 - throughput.value
    return figures


def unfinished_share(runs: SeedRuns, over: SeedRuns) -> float:
    """Return the share of jobs that only one of the two runs of a seed finished, over all seeds."""
    pairs = list(zip(runs, over, strict=True))
    either = sum(int((np.isfinite(a.end_s) ^ np.isfinite(b.end_s)).sum()) for a, b in pairs)
    return either / sum(len(a.end_s) for a in runs)


def _line(row: AblationRow, every: RunsByRow) -> dict[str, Figure | str]:
    jct, throughput = relative_results(row, every)
    runs, over = every[row], reference_runs(row, every)
    ended = [one.jct_s[np.isfinite(one.jct_s)] for one in runs]
    return {
        "part": row.part,
        "x": row.x,
        "policy": row.policy,
        "variant": row.variant,
        "against": row.against,
        "workload": Path(row.run.asked.work.trace).name,
        "seeds": len(runs),
        "unfinished": math.nan if over is None else unfinished_share(runs, over),
        "jct_ratio": jct.value,
        "jct_ratio_low": jct.low,
        "jct_ratio_high": jct.high,
        "throughput_ratio": throughput.value,
        "throughput_ratio_low": throughput.low,
        "throughput_ratio_high": throughput.high,
        "jct_mean_s": float(np.mean([t.mean() if len(t) else np.nan for t in ended])),
        "jct_first_queue_s": first_queue_s(row, runs),
        "jobs": mean_figure(runs, "jobs"),
        **{key: mean_figure(runs, key) for key in MEAN_FIGURES},
    }


def first_queue_s(row: AblationRow, runs: SeedRuns) -> float:
    """Return the mean JCT of the jobs of the first queue that ended."""
    of_seeds = []
    for k, one in enumerate(runs):
        queue = queue_of(len(one.jct_s), row.run.shape.queues, row.run.asked.work.seed + k)
        result = one.jct_s[(queue == 1) & np.isfinite(one.jct_s)]
        of_seeds.append(result.mean() if len(result) else np.nan)
    return float(np.mean(of_seeds))


def _plots(every: RunsByRow) -> Iterator[Plot]:
    for title, part, label in (
        ("Without each component", "components", "over the full policy"),
        ("The scheduler alone", "alone", "over Arena's policy"),
    ):
        rows = [row for row in every if row.part == part]
        if rows:
            yield _bars(title, rows, every, label)
    for title, part, label in (
        ("Search depth at heavy load", "depth", "search depth"),
        ("Priority queues at heavy load", "queues", "priority queues"),
        ("GPU types", "types", "GPU types of the cluster"),
    ):
        rows = [row for row in every if row.part == part]
        if rows:
            yield from _curves(title, rows, every, label)


def _bars(title: str, rows: Sequence[AblationRow], every: RunsByRow, label: str) -> Plot:
    names = {row: row.name if row.part == "components" else row.policy for row in rows}
    both = {name: relative_results(row, every) for row, name in names.items()}
    alike = [
        name
        for row, name in names.items()
        if (over := reference_runs(row, every)) is not None
        and not unfinished_share(every[row], over)
    ]
    left = [
        f"{row.name} {int(sum((~np.isfinite(one.end_s)).sum() for one in every[row]))}"
        for row in rows
        if any(not np.isfinite(one.end_s).all() for one in every[row])
    ]
    never = f" Jobs that never finished, over all seeds: {'; '.join(left)}." if left else ""
    if len(alike) < len(rows):
        never += " There is no bar of JCT if the two runs finished different jobs."
    return bars_plot(
        title,
        {
            "mean JCT (lower is better)": {name: both[name][0] for name in alike},
            "throughput (higher is better)": {name: result[1] for name, result in both.items()},
        },
        label=label,
        caption="JCT over the jobs that both finished, to completion. Lines are 95 % intervals over seeds."
        f"{never}",
    )


def _curves(
    title: str, rows: Sequence[AblationRow], every: RunsByRow, label: str
) -> Iterator[Plot]:
    names = list(dict.fromkeys(row.policy for row in rows))
    looks = series_styles(names)
    over = "the first point's" if rows[0].part in ("depth", "queues") else "Arena's policy's"
    for i, what in enumerate(("Mean JCT", "Normalised throughput")):
        series = {
            name: _curve([row for row in rows if row.policy == name], every, i) for name in names
        }
        yield curves_plot(
            f"{title}: {what.lower()}",
            series,
            x_label=label,
            y_label=f"{what} over {over}",
            styles=looks,
            caption="Bands are 95 % intervals over seeds.",
        )


def _curve(rows: Iterable[AblationRow], every: RunsByRow, which: int) -> IntervalCurve:
    result = [(row.x, relative_results(row, every)[which]) for row in rows]
    return IntervalCurve(
        x=np.array([x for x, _ in result]),
        value=np.array([i.value for _, i in result]),
        low=np.array([i.low for _, i in result]),
        high=np.array([i.high for _, i in result]),
    )
