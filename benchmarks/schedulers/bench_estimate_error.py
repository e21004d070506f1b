"""A benchmark of the cost of wrong estimates, while jobs run at the true speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import (
    GpusShareOption,
    JobsOption,
    OverheadsOption,
    PoliciesOption,
    parse_number_list,
    with_sweep,
    with_work,
)
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.errors import InvalidInput
from tessera.simulator.comparison.comparisons import finished_by
from tessera.simulator.comparison.policies import split_list
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, check_requests, runs_of
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.report.comparisons import IntervalCurve, curves_plot
from tessera.simulator.report.model import Plot, ReportFolder, report_of
from tessera.simulator.report.style import series_styles
from tessera.simulator.report.write import write_report
from tessera.simulator.statistics import mean_interval
from tessera.simulator.sweeps.runner import Sweep

POLICIES: Final = ("ilp:balanced", "ilp:jct", "ilp:throughput", "arena")
POLICY_LIST: Final = ",".join(POLICIES)
ERRORS: Final = (0.05, 0.1, 0.2)

Losses = Mapping[str, Mapping[float, Sequence[tuple[float, float]]]]
"""Policy -> error -> the shares of (JCT, throughput) that were lost with each seed."""


@register_case(
    "estimate-error",
    smoke={
        "trace": SYNTHETIC,
        "gpus_share": 0.05,
        "jobs": 15,
        "errors": "0.2",
        "seeds": 1,
        "workers": 0,
        "policies": "ilp:jct,arena",
    },
)
@with_work
@with_sweep
def estimate_error(
    *,
    work: WorkloadSpec,
    gpus_share: GpusShareOption = 1.0,
    jobs: JobsOption = 400,
    policies: PoliciesOption = POLICY_LIST,
    errors: Annotated[
        str, typer.Option(help="Comma-separated mean relative errors. 0 is always run.")
    ] = ",".join(map(str, ERRORS)),
    overheads: OverheadsOption = "default",
    seeds: Annotated[int, typer.Option(min=1, help="Number of draws of each error.")] = 5,
    sweep: Sweep,
    report: ReportFolder = None,
) -> Report:
    """Decide rounds on estimates that are wrong by 5, 10 and 20 % on average, and measure the loss.

    All policies see the same estimates, drawn once for each seed
    (``tessera.simulator.truth.perturb_estimates``: log-normal factors on the times of Cells). The
    jobs, the cluster and the true speeds stay the same. A loss is relative to the policy's own run
    on the true speeds. ``jct_loss_*`` is the loss of mean JCT over the jobs that both runs
    finished, to completion. ``throughput_loss_*`` is the loss of normalised throughput over the
    horizon. Both are means over seeds at the largest error; below 0, nothing was lost. They have no
    bounds. The table has all errors, with 95 % intervals.
    """
    names = split_list(policies)
    base, seed = replace(work, gpus_share=gpus_share, jobs=jobs), work.seed
    sizes, drawn = error_sizes(errors), range(seed, seed + seeds)
    cases = [(name, 0.0, seed) for name in names]
    cases += [(name, size, k) for name in names for size in sizes for k in drawn]
    costs = RunRequest(work=base, policy="", overheads=overheads)
    check_requests((replace(costs, policy=name) for name in names), seeds=1)
    tasks = {
        key: replace(costs, policy=key[0], error=key[1], error_seed=key[2]).task(
            f"{key[0]} with {key[1]:.0%} error, seed {key[2]}"
        )
        for key in cases
    }
    result = runs_of(tasks, sweep)
    losses = {
        name: {
            size: [run_loss(result[name, 0.0, seed], result[name, size, k]) for k in drawn]
            for size in sizes
        }
        for name in names
    }
    made = Report(seed=seed, figures=_figures(losses), table=_table(base, losses, result, seed))
    if report is not None:
        options = {"policies": names, "errors": sizes, "overheads": overheads, "trace": base.trace}
        page = report_of(
            made,
            title="Wrong estimates",
            options=options,
            seeds=list(drawn),
            plots=loss_plots(losses),
            summary="The loss of policies that decide on wrong estimates.",
        )
        write_report(page, report)
    return made


def error_sizes(text: str) -> list[float]:
    """Return the errors of a comma-separated list in ascending order, without 0.

    Raises InvalidInput.
    """
    result = parse_number_list(
        "errors", text, lambda size: 0 <= size < 1, "numbers from 0 to below 1"
    )
    if result == (0.0,):
        raise InvalidInput("errors", "must include numbers above 0")
    return [size for size in result if size]


def run_loss(truth: FinishedRun, told: FinishedRun) -> tuple[float, float]:
    """Return the shares of JCT and of throughput that a run lost to wrong estimates."""
    both = finished_by((truth, told))
    if not both.any():
        return math.nan, math.nan
    jct = float(told.jct_s[both].mean() / truth.jct_s[both].mean()) - 1.0
    return jct, 1.0 - told.figures["throughput"] / truth.figures["throughput"]


def _figures(losses: Losses) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for name, by_size in losses.items():
        for size in [max(by_size)]:
            mean = np.mean(by_size[size], axis=0)
            figures |= {
                f"jct_loss_{name}": float(mean[0]),
                f"throughput_loss_{name}": float(mean[1]),
            }
    return figures


def _table(
    work: WorkloadSpec,
    losses: Losses,
    found: Mapping[tuple[str, float, int], FinishedRun],
    seed: int,
) -> list[dict[str, Figure | str]]:
    table: list[dict[str, Figure | str]] = []
    for name, by_size in losses.items():
        for size, of_seeds in {0.0: [(0.0, 0.0)], **by_size}.items():
            runs = [found[name, size, seed + k] for k in range(len(of_seeds))]
            jct, throughput = (mean_interval([one[i] for one in of_seeds]) for i in (0, 1))
            table.append(
                {
                    "policy": name,
                    "workload": Path(work.trace).name,
                    "error": size,
                    "seeds": len(of_seeds),
                    "jct_loss": jct.value,
                    "jct_loss_low": jct.low,
                    "jct_loss_high": jct.high,
                    "throughput_loss": throughput.value,
                    "throughput_loss_low": throughput.low,
                    "throughput_loss_high": throughput.high,
                    **{
                        key: float(np.mean([one.figures[key] for one in runs]))
                        for key in ("jct_mean_s", "throughput", "completed", "finished", "restarts")
                    },
                }
            )
    return table


def loss_plots(losses: Losses) -> list[Plot]:
    """Return the curves of the losses over the error."""
    looks = series_styles(losses)
    result = []
    for i, what in ((0, "mean JCT"), (1, "normalised throughput")):
        series = {}
        for name, by_size in losses.items():
            points = np.array([[one[i] for one in of_seeds] for of_seeds in by_size.values()])
            runs = np.vstack([np.zeros(points.shape[1]), points]).T
            series[name] = IntervalCurve.of([0.0, *by_size], runs)
        result.append(
            curves_plot(
                f"Loss in {what}",
                series,
                x_label="mean relative error of estimates",
                y_label=f"{what} lost",
                percent=True,
                styles=looks,
                caption="Relative to the same policy's run on the true speeds. Bands are 95 % intervals"
                " over draws.",
            )
        )
    return result
