"""Estimates of iteration time and memory, compared with our own measurements on single GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.benchmarks.estimator.own_runs import RUNS_H100, RUNS_H200, read_rows
from tessera.benchmarks.harness.registry import register_case
from tessera.estimator.architectures.files import architecture_graph, parse_architecture
from tessera.estimator.cells import data_sheet_setting, plan_cells
from tessera.estimator.hardware import H100, H200, Hardware
from tessera.estimator.memory import States, UsableMemory
from tessera.estimator.plans import PricedPlan, Shape, Training
from tessera.simulator.figures import Figure, Report

FILES: Final[Mapping[str, tuple[Path, Hardware]]] = {
    "h200": (RUNS_H200, H200),
    "h100": (RUNS_H100, H100),
}

VOCABULARY: Final = 50_304
STATE_BYTES: Final = 16.0
"""Bytes of a parameter: weight and gradient in bf16, and Adam's states in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPlan:
    """A measured plan of a GPT on one GPU, with its estimate.

    If it ran out of memory, ``measured_s`` is inf and ``peak_bytes`` is nan. If no memory was
    predicted to suffice, ``estimate`` is None.
    """

    model: str
    accumulation: int
    checkpointing: bool
    measured_s: float
    peak_bytes: float
    estimate: PricedPlan | None

    @property
    def has_run(self) -> bool:
        """Return whether it had enough memory."""
        return math.isfinite(self.measured_s)

    @property
    def estimated_s(self) -> float:
        """Return the estimated time. It is inf if the plan was not expected to fit."""
        return math.inf if self.estimate is None else self.estimate.iter_time_s

    @property
    def is_judged(self) -> bool:
        """Return whether it ran, as was predicted."""
        return self.has_run and self.estimate is not None

    @property
    def time_error(self) -> float:
        """Return the estimated time over the measured one, less 1. It is nan if it is not judged."""
        return self.estimated_s / self.measured_s - 1 if self.is_judged else math.nan

    @property
    def memory_error(self) -> float:
        """Return the estimated memory over the measured peak, less 1, both without the context.

        It is nan if the plan is not judged.
        """
        if self.estimate is None:
            return math.nan
        estimated = max(self.estimate.memory_bytes) - UsableMemory().context_bytes
        return float(estimated) / self.peak_bytes - 1


@register_case(
    "gpu-estimates",
    smoke={},
    time_median_h200=("<=", 0.1),
    time_median_h100=("<=", 0.1),
    memory_median_h200=("<=", 0.05),
    memory_median_h100=("<=", 0.05),
    memory_lowest_h200=(">=", -0.05),
    memory_lowest_h100=(">=", -0.05),
    order_h200=(">=", 0.95),
    order_h100=(">=", 0.95),
    fits_wrong=("<=", 0),
)
def judge_gpu_estimates() -> Report:
    """Estimate GPTs on one GPU from its data sheet, and compare with what really ran there.

    **Data.** Iterations of GPTs in PyTorch, in bf16 with fused attention, by micro-batches and
    activation checkpointing: three sizes on one H200, seven on one H100. The files name their
    machines and the program.

    **Estimates** know the architecture, the plan and the GPU type's data sheet, and nothing that was
    measured on either GPU type. ``time_*`` are errors of an iteration, ``memory_*`` of the peak that
    PyTorch's allocator reports, without the driver's context. ``memory_lowest`` is that of the plan
    whose memory is estimated too low by most. ``order`` is the share of pairs of a model's plans that
    are in the right order by time. ``fits_wrong`` counts the plans of which it was wrongly foretold
    whether they fit.

    The count of what an unfused loss holds was corrected after these data were seen, by counting
    what PyTorch's operators keep. No number was fitted to them.
    """
    plans = {gpu: read_judged_plans(path, kind) for gpu, (path, kind) in FILES.items()}
    figures: dict[str, Figure] = {}
    for gpu, own in plans.items():
        figures |= {f"{name}_{gpu}": value for name, value in _figures(own).items()}
    everything = [plan for own in plans.values() for plan in own]
    figures["ran_out_of_memory"] = sum(not plan.has_run for plan in everything)
    figures["fits_wrong"] = sum(plan.has_run != (plan.estimate is not None) for plan in everything)
    return Report(seed=0, figures=figures, table=_rows(plans))


def read_judged_plans(path: Path, hardware: Hardware) -> list[JudgedPlan]:
    """Return the plans of a file that use the GPU alone, with their estimates."""
    return [_judged_plan(row, hardware) for row in read_rows(path) if not row["threads"]]


def _judged_plan(row: Mapping[str, Any], hardware: Hardware) -> JudgedPlan:
    sizes = {
        "architecture": "transformer",
        "layers": row["layers"],
        "hidden": row["hidden"],
        "heads": row["hidden"] // row["head"],
        "sequence": row["sequence"],
        "vocabulary": VOCABULARY,
        "dtype": "bf16",
    }
    graph = architecture_graph(
        parse_architecture(sizes, name=row["name"], sequence=None, dtype=None, flash=True)
    )
    training = Training(
        global_batch=row["batch"],
        micro_batches=row["accumulation"],
        state_bytes=STATE_BYTES,
        checkpointing=row["checkpointing"],
    )
    setting = data_sheet_setting(
        graph, training, hardware, Shape(nodes=1, gpus_per_node=1), States()
    )
    return JudgedPlan(
        model=row["name"],
        accumulation=row["accumulation"],
        checkpointing=row["checkpointing"],
        measured_s=row.get("iter_time_s", math.inf),
        peak_bytes=row.get("peak_bytes", math.nan),
        estimate=plan_cells(setting, [1]).get(1),
    )


def _figures(plans: Sequence[JudgedPlan]) -> dict[str, Figure]:
    judged = [plan for plan in plans if plan.is_judged]
    time = np.array([plan.time_error for plan in judged])
    memory = np.array([plan.memory_error for plan in judged])
    by_model = _by_model(judged)
    return {
        "time_median": float(np.median(np.abs(time))),
        "time_mean": float(np.abs(time).mean()),
        "time_bias": float(time.mean()),
        "memory_median": float(np.median(np.abs(memory))),
        "memory_lowest": float(memory.min()),
        "memory_highest": float(memory.max()),
        "order": _share_in_order(by_model),
        "points": len(judged),
        "models": len(by_model),
    }


def _by_model(plans: Sequence[JudgedPlan]) -> list[list[JudgedPlan]]:
    models = dict.fromkeys(plan.model for plan in plans)
    return [[plan for plan in plans if plan.model == model] for model in models]


def _share_in_order(by_model: Sequence[Sequence[JudgedPlan]]) -> float:
    """Return the share of pairs of a model's plans that the estimates order as they ran."""
    in_order = [
        (one.estimated_s - other.estimated_s) * (one.measured_s - other.measured_s) > 0
        for plans in by_model
        for one, other in combinations(plans, 2)
    ]
    return float(np.mean(in_order))


def _rows(plans: Mapping[str, Sequence[JudgedPlan]]) -> list[dict[str, Figure | str]]:
    return [
        {
            "gpu": gpu,
            "model": plan.model,
            "accumulation": plan.accumulation,
            "checkpointing": plan.checkpointing,
            "seconds": plan.measured_s if plan.has_run else "out of memory",
            "time_error": plan.time_error if plan.is_judged else "-",
            "memory_error": plan.memory_error if plan.is_judged else "-",
        }
        for gpu, own in plans.items()
        for plan in own
    ]
