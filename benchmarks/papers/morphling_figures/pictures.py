"""Pictures of Morphling's figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tessera.benchmarks.papers.morphling_figures.demands import PlanDemand
from tessera.benchmarks.papers.morphling_figures.pairs import PAIR_MODELS, SharedGpus
from tessera.benchmarks.papers.morphling_figures.runs import SWEEP_NAMES, Row
from tessera.benchmarks.papers.morphling_figures.shrinking import ShrinkingStep
from tessera.benchmarks.schedulers.bench_load import RunsByPoint, plot_points
from tessera.simulator.report.comparisons import bars_plot
from tessera.simulator.report.model import Plot
from tessera.simulator.statistics import Interval


def plot_demands(demands: Sequence[PlanDemand]) -> Plot:
    """Return Figure 2: each plan's demand as a share of the largest demand."""
    amounts: dict[str, Sequence[float]] = {
        "GPUs": [d.gpus for d in demands],
        "GPU memory": [d.gpu_bytes for d in demands],
        "host memory": [d.host_bytes for d in demands],
        "CPU cores": [d.cpus for d in demands],
        "bytes to other GPUs per second": [d.sent_bytes_per_s for d in demands],
    }
    names = [f"{d.family}, {d.gpus} GPUs" for d in demands]
    shares = {
        resource: {
            name: _point(amount / (max(needed) or 1.0))
            for name, amount in zip(names, needed, strict=True)
        }
        for resource, needed in amounts.items()
    }
    return bars_plot(
        "Figure 2: demands of GPT-2's plans",
        shares,
        label="share of the largest demand",
        percent=True,
        caption="On the fewest GPUs on which each plan was measured. GPU memory is modelled.",
    )


def plot_steps(figure: str, model: str, steps: Sequence[ShrinkingStep]) -> Plot:
    """Return the speeds of all families of plans, and of the choice, in each step."""
    series: dict[str, dict[str, Interval]] = {}
    for step in steps:
        for family, speed in step.speeds().items():
            series.setdefault(family, {})[step.limits.name] = _point(speed)
    return bars_plot(
        f"Figure {figure}: {model} under shrinking limits",
        series,
        label="samples/s of the best plan of a family",
        caption="Without a bar, no plan of the family fits.",
    )


def plot_choices(
    honest: Sequence[ShrinkingStep], measured: Sequence[ShrinkingStep], samples: int
) -> Plot:
    """Return Figure 7: speeds of the plans that were chosen, and of the best one."""
    speeds = {
        "chosen by estimates": [step.chosen_s for step in honest],
        "chosen by measurements": [step.chosen_s for step in measured],
        "best": [step.best_s for step in measured],
    }
    series = {
        name: {
            step.limits.name: _point(samples / time_s)
            for step, time_s in zip(measured, times_s, strict=True)
        }
        for name, times_s in speeds.items()
    }
    return bars_plot("Figure 7: LLaMA-2-7B from 32 GPUs to 1", series, label="samples/s")


def plot_pairs(pairs: Mapping[str, SharedGpus]) -> Plot:
    """Return Figure 8: the speed-up of each job and the total."""
    series = {
        model: {name: _point(pair.speedups[k]) for name, pair in pairs.items()}
        for k, model in enumerate(PAIR_MODELS)
    }
    series["total"] = {name: _point(pair.total) for name, pair in pairs.items()}
    return bars_plot(
        "Figure 8: two jobs on 4 GPUs", series, label="speed-up over a rigid plan on 4 GPUs"
    )


def plot_sweeps(found: RunsByPoint) -> list[Plot]:
    """Return Figures 10 and 11: mean JCT and throughput along each sweep."""
    return [
        replace(plot, title=f"{SWEEP_NAMES[sweep]}, {plot.title.lower()}")
        for sweep, by_x in found.items()
        for plot in plot_points({sweep: by_x})
    ]


def plot_errors(rows: Sequence[Row]) -> Plot:
    """Return Table 2: mean errors of ours and of the artifact, by model and plan."""
    series = {
        name: {f"{row['what']}, {row['choice']}": _point(float(row[column])) for row in rows}
        for name, column in (("ours", "mean_error"), ("artifact's", "artifact_mean_error"))
    }
    return bars_plot("Table 2: mean errors", series, label="mean error", percent=True)


def plot_table_4(rows: Sequence[Row]) -> Plot:
    """Return Table 4: mean JCT here and in the paper."""
    series = {
        name: {f"{row['what']}, {row['choice']}": _point(float(row[column])) for row in rows}
        for name, column in (("here", "jct_h"), ("paper", "paper_jct_h"))
    }
    return bars_plot("Table 4: mean JCT", series, label="hours")


def _point(value: float) -> Interval:
    return Interval(value=value, low=np.nan, high=np.nan)
