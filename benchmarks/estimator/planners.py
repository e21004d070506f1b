"""The speed of the papers' planners relative to the exact search, under our own cost model.

The seeds draw ``SETTINGS_DRAWN`` settings without replacement. They are drawn from Arena's published models
at their batches, the four GPU types of the papers' simulated cluster, and ``GPU_COUNTS`` GPUs on the
fewest nodes. Links and kernels are those of data sheets; nothing is measured. In each setting,
every usual pipeline degree is a Cell, which is planned by

* the exact search (least latency of all plans that fit),
* Arena's proxy (section 3.3): least computation bias, then least communication load, within memory,
* Crius' cut and assembly (sections 4.2 and 5.1): the cut ignores memory, and each stage is either
  data parallel or tensor parallel.

``planner_share_X`` is exact latency / X's latency, as the mean over the Cells for which both have a
plan. Plans have the 16 micro-batches of the published measurements. ``_worst`` is the lowest share.
``_best_degree`` compares the fastest degrees of both, as the mean over settings. ``_own`` is
``planner_share_X`` where both plan with the paper's own number of micro-batches: the number of
stages (Arena) or four times that (Crius). ``planner_missed_X`` is the share of the exact search's
Cells for which X finds no plan that fits. ``planner_seconds_X`` is the processor time of a
setting's Cells, including the pricing of candidates.

This shows the cost of the rules if the cost model is right. It does not show the speed of plans on
GPUs; for that see ``choice_of_plan``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.benchmarks.estimator.speed import setting_of
from tessera.estimator.architectures.published import PublishedModel
from tessera.estimator.cells import MicroBatches, Planner, Setting, plan_cells
from tessera.estimator.hardware import ALL, Hardware
from tessera.estimator.plans import PricedPlan
from tessera.estimator.samples import sampled_models
from tessera.simulator.figures import Figure

GPU_COUNTS: Final = (2, 4, 8, 16, 32)
SETTINGS_DRAWN: Final = 100
PAPER_RULES: Final[Mapping[Planner, MicroBatches]] = {
    Planner.ARENA: MicroBatches.STAGES,
    Planner.CRIUS: MicroBatches.FOUR_STAGES,
}
"""The judged planners, with the rule of their papers for the number of micro-batches."""

Drawn = tuple[PublishedModel, int, Hardware, int]
"""A model, batch, GPU type and number of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerComparison:
    """A comparison with the exact search in one setting. Shares are exact over other latency."""

    shares: tuple[float, ...]  # one for each degree that both have
    missed: int  # degrees that the exact search alone has
    best: float | None  # share of the fastest degrees, or None if the planner has no plan


def judge_planner(
    exact: Mapping[int, PricedPlan], other: Mapping[int, PricedPlan]
) -> PlannerComparison:
    """Compare a planner's Cells with the exact ones, by degree."""
    both = sorted(exact.keys() & other.keys())
    fastest = [min((p.iter_time_s for p in x.values()), default=None) for x in (exact, other)]
    return PlannerComparison(
        shares=tuple(exact[d].iter_time_s / other[d].iter_time_s for d in both),
        missed=len(exact.keys() - other.keys()),
        best=None if fastest[0] is None or fastest[1] is None else fastest[0] / fastest[1],
    )


def run_planner_section(data: Path | None, seeds: Sequence[int]) -> EstimatorSection:
    """Return the figures and rows of the protocol. No data are read."""
    del data
    every = [(drawn, *_compared(setting_of(*drawn))) for drawn in draw_settings(seeds)]
    figures: dict[str, Figure] = {"planner_settings": len(every)}
    for planner in PAPER_RULES:
        figures |= _figures(
            str(planner),
            [given[planner] for _, given, _, _ in every],
            [own[planner] for _, _, own, _ in every],
        )
    for planner in Planner:
        mean_s = np.mean([seconds[planner] for _, _, _, seconds in every])
        figures[f"planner_seconds_{planner}"] = float(mean_s)
    return EstimatorSection(
        figures=figures, rows=[_row(drawn, given) for drawn, given, _, _ in every]
    )


def draw_settings(seeds: Sequence[int], count: int = SETTINGS_DRAWN) -> list[Drawn]:
    """Return ``count`` different settings."""
    jobs = [(model, batch) for model in sampled_models() for batch in model.batches]
    every = [(*job, hardware, gpus) for job, hardware, gpus in product(jobs, ALL, GPU_COUNTS)]
    at = np.random.default_rng(list(seeds)).choice(len(every), size=count, replace=False)
    return [every[i] for i in at]


def _compared(
    setting: Setting,
) -> tuple[
    dict[Planner, PlannerComparison], dict[Planner, PlannerComparison], dict[Planner, float]
]:
    """Judge each planner with the given micro-batches and with those of its paper.

    Return both comparisons, and the processor seconds with the given micro-batches.
    """
    result: dict[Planner, dict[int, PricedPlan]] = {}
    seconds: dict[Planner, float] = {}
    for planner in Planner:
        start_s = time.process_time()
        result[planner] = plan_cells(setting, planner=planner)
        seconds[planner] = time.process_time() - start_s
    given = {
        planner: judge_planner(result[Planner.EXACT], result[planner]) for planner in PAPER_RULES
    }
    own = {
        planner: judge_planner(
            plan_cells(setting, micro_batches=rule),
            plan_cells(setting, micro_batches=rule, planner=planner),
        )
        for planner, rule in PAPER_RULES.items()
    }
    return given, own, seconds


def _figures(
    name: str, given: Sequence[PlannerComparison], own: Sequence[PlannerComparison]
) -> dict[str, Figure]:
    shares = _shares(given)
    best = [each.best for each in given if each.best is not None]
    return {
        f"planner_share_{name}": float(np.mean(shares)),
        f"planner_share_{name}_worst": min(shares),
        f"planner_share_{name}_best_degree": float(np.mean(best)),
        f"planner_share_{name}_own": float(np.mean(_shares(own))),
        f"planner_missed_{name}": _missed(given),
        f"planner_missed_{name}_own": _missed(own),
    }


def _shares(every: Sequence[PlannerComparison]) -> list[float]:
    return [share for each in every for share in each.shares]


def _missed(every: Sequence[PlannerComparison]) -> float:
    missed = sum(each.missed for each in every)
    return missed / (missed + len(_shares(every)))


def _row(drawn: Drawn, given: Mapping[Planner, PlannerComparison]) -> dict[str, Figure | str]:
    model, batch, hardware, gpus = drawn
    row: dict[str, Figure | str] = {
        "section": "planners",
        "model": f"{model.model} {model.params}",
        "batch": batch,
        "gpu_type": hardware.name,
        "gpus": gpus,
    }
    for planner, each in given.items():
        row[f"missed_{planner}"] = each.missed
        if each.shares:
            row[f"share_{planner}"] = float(np.mean(each.shares))
    return row
