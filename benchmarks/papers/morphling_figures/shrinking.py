"""Plans under shrinking limits: Morphling's Figures 3 and 7."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessera.benchmarks.papers.morphling_figures.plans import MeasuredPlan
from tessera.benchmarks.papers.morphling_figures.records import (
    FIGURE_SET,
    Record,
    choose_fitted,
    choose_micro_batch,
    read_facts,
    read_records,
    set_micro_batch,
)
from tessera.benchmarks.papers.morphling_figures.scenes import (
    ResourceLimits,
    SceneJob,
    decide_cells,
    measured_s,
    records_within,
)
from tessera.estimator.reconfiguration.configurations import TransformerFacts
from tessera.estimator.reconfiguration.pooling import fit_pooled
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import Cell, EstimateSource
from tessera.simulator.figures import Figure

_THREADS: Final = 2
"""CPU threads for each GPU of the measurements of Figure 7, before they are doubled."""
FIGURE_7_STEPS: Final = (
    ResourceLimits(name="4 x 8 GPUs", nodes=4, gpus=8, cpus=8 * _THREADS),
    ResourceLimits(name="4 x 4 GPUs", nodes=4, gpus=4, cpus=4 * _THREADS),
    ResourceLimits(name="4 GPUs", nodes=1, gpus=4, cpus=4 * _THREADS),
    ResourceLimits(name="1 GPU", nodes=1, gpus=1, cpus=_THREADS),
    ResourceLimits(name="1 GPU, twice the CPUs", nodes=1, gpus=1, cpus=2 * _THREADS),
)
FIGURE_7_PAPER_S: Final = (1.165, 1.803, 5.107, 66.0, 46.0)
"""Iteration times of the plans that Morphling chose, from its artifact's measurements."""
LITTLE_HOST_BYTES: Final = 10 * 10**9
FIGURE_3_STEPS: Final = (
    ResourceLimits(name="4 x 8 GPUs", nodes=4, gpus=8),
    ResourceLimits(name="4 x 4 GPUs", nodes=4, gpus=4),
    ResourceLimits(name="4 GPUs", nodes=1, gpus=4),
    ResourceLimits(name="1 GPU", nodes=1, gpus=1),
    ResourceLimits(
        name="1 GPU, 10 GB of host memory", nodes=1, gpus=1, host_bytes=LITTLE_HOST_BYTES
    ),
)
FIGURE_3_MODELS: Final = ("roberta", "t5", "t5_3B")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkingStep:
    """A step under its limits: the chosen Cell, and the measured plans that fit, fastest first."""

    limits: ResourceLimits
    cell: Cell | None  # None if the job waits
    chosen_s: float  # measured; inf if the Cell does not run
    fitting: tuple[EstimateRecord, ...]

    @property
    def best_s(self) -> float:
        """Return the iteration time of the best measured plan in seconds, or inf without one."""
        return self.fitting[0].iter_time_s if self.fitting else math.inf

    @property
    def regret(self) -> float:
        """Return the share of the best measured plan's speed that is lost."""
        return 1 - self.best_s / self.chosen_s if math.isfinite(self.best_s) else 0.0

    def speeds(self) -> dict[str, float]:
        """Return the best measured samples/s of each family of plans that fits."""
        best: dict[str, float] = {}
        for record in self.fitting:
            speed = record.workload.global_batch / record.iter_time_s
            best.setdefault(MeasuredPlan.of(record).family, speed)
        return best

    def row(self, figure: str, estimates: str) -> dict[str, Figure | str]:
        """Return the row of the table."""
        best = self.fitting[0].cell if self.fitting else None
        return {
            "figure": figure,
            "what": f"{self.limits.name}, {estimates}",
            "choice": describe_cell(self.cell),
            "best": describe_cell(best),
            "iter_time_s": self.chosen_s,
            "best_s": self.best_s,
            "regret": self.regret,
        }


def describe_cell(cell: Cell | None) -> str:
    """Return the plan, the GPUs and the nodes of a Cell, or "none"."""
    if cell is None:
        return "none"
    nodes = "1 node" if cell.nodes == 1 else f"{cell.nodes} nodes"
    return f"{cell.plan} on {cell.gpus} x {cell.gpu_type}, {nodes}"


def decide_step(
    limits: ResourceLimits, truth: Sequence[EstimateRecord], seen: Sequence[EstimateRecord]
) -> ShrinkingStep:
    """Return the step of a job of the only workload of ``truth``, decided by ``seen``."""
    (cell,) = decide_cells(limits, [SceneJob(workload=truth[0].workload)], seen)
    return ShrinkingStep(
        limits=limits,
        cell=cell,
        chosen_s=measured_s(cell, truth),
        fitting=tuple(records_within(limits, truth)),
    )


def estimate_plans(
    known: Sequence[Record], truth: Sequence[EstimateRecord], facts: TransformerFacts
) -> list[EstimateRecord]:
    """Return estimates of the plans of ``truth`` from known runs, without their own times.

    The performance model is fitted to ``known``, and the memory model decides whether a plan runs.
    """
    micro_batch = choose_micro_batch(known)
    fit = fit_pooled([record.run for record in set_micro_batch(known, micro_batch)])
    running = [plan for plan in map(MeasuredPlan.of, truth) if plan.runs()]
    times_s = fit.predict_s([plan.configuration(facts, micro_batch) for plan in running])
    return [
        replace(plan.record, iter_time_s=float(time_s), source=EstimateSource.ANALYTIC)
        for plan, time_s in zip(running, times_s, strict=True)
    ]


def runs_without(fitted: Sequence[Record], gpus: int = 0) -> list[Record]:
    """Return the runs without those of Figure 7 on ``gpus`` GPUs, or on any number if it is 0."""
    return [
        record
        for record in fitted
        if record.model != FIGURE_SET or gpus not in (0, record.run.configuration.gpus)
    ]


def memory_mistakes(truth: Sequence[EstimateRecord]) -> int:
    """Return the number of plans about which the memory model errs: whether they run."""
    return sum(
        math.isfinite(plan.record.iter_time_s) != plan.runs()
        for plan in map(MeasuredPlan.of, truth)
    )


def shrink_by_measurements(
    steps: Sequence[ResourceLimits], truth: Sequence[EstimateRecord]
) -> list[ShrinkingStep]:
    """Return the steps as decided by the measured times."""
    return [decide_step(limits, truth, truth) for limits in steps]


def shrink_by_estimates(
    steps: Sequence[ResourceLimits], truth: Sequence[EstimateRecord], folder: Path
) -> tuple[list[ShrinkingStep], list[ShrinkingStep]]:
    """Return the steps as decided by estimates that are fitted on nothing that is scored.

    The first ones learn from seven runs of each model, without those of Figure 7 on as many GPUs as
    the step has. The second ones learn from no run of Figure 7.
    """
    fitted = choose_fitted(read_records(folder))
    facts = read_facts(folder / "models.csv")[FIGURE_SET]
    counts = dict.fromkeys(limits.total_gpus for limits in steps)
    seen = {gpus: estimate_plans(runs_without(fitted, gpus), truth, facts) for gpus in counts}
    unseen = estimate_plans(runs_without(fitted), truth, facts)
    return (
        [decide_step(limits, truth, seen[limits.total_gpus]) for limits in steps],
        [decide_step(limits, truth, unseen) for limits in steps],
    )


def figure_7_figures(
    honest: Sequence[ShrinkingStep],
    unseen: Sequence[ShrinkingStep],
    measured: Sequence[ShrinkingStep],
) -> dict[str, Figure]:
    """Return the figures of Figure 7: by both kinds of estimates, and by the measured times."""
    regrets = [step.regret for step in honest]
    slower = [s.chosen_s / p for s, p in zip(measured, FIGURE_7_PAPER_S, strict=True)]
    *_, before, after = measured
    return {
        "figure7_regret": max(regrets),
        "figure7_mean_regret": sum(regrets) / len(regrets),
        "figure7_unseen_regret": max(step.regret for step in unseen),
        "figure7_measured_regret": max(step.regret for step in measured),
        "figure7_over_paper": max(slower) - 1,
        "figure7_cpu_speedup": before.chosen_s / after.chosen_s,
    }


def figure_3_figures(of: Mapping[str, Sequence[ShrinkingStep]]) -> dict[str, Figure]:
    """Return the figures of Figure 3: whether offload alone runs on the last GPU, and then fails."""
    *_, alone, little = of["t5_3B"]
    offloads = {MeasuredPlan.of(record).offload for record in alone.fitting}
    return {
        "figure3_regret": max(step.regret for steps in of.values() for step in steps),
        "figure3_only_offload_runs": int(offloads == {True} and alone.cell is not None),
        "figure3_offload_fails": int(little.cell is None and not little.fitting),
        "figure3_t5_gap": largest_gap(of["t5"]),
        "figure3_roberta_gap": largest_gap(of["roberta"]),
    }


def largest_gap(steps: Sequence[ShrinkingStep]) -> float:
    """Return the largest ratio of speeds between families of plans in a step."""
    each = [step.speeds().values() for step in steps if step.fitting]
    return max(max(speeds) / min(speeds) for speeds in each)
