"""The accuracy of prices of stated plans, judged on published runs whose plans are known.

Each run's plan is completed as its runtime divides layers, and priced from data sheets alone. Nothing
was chosen or fitted on these rows. ``plain_mape`` is the error without what the price of a plan adds
to the cost model of the search (chunks, selective recomputation, fp8 products), on the rows without
context parallelism, which that model cannot price; ``mape_of_the_same`` is ours on these rows. ``fits``
is the share of plans that fit by our memory model; all of them ran. ``gain_error`` is the error of
the speed that a switch gains, between two runs that differ in it alone. ``memory_ratio`` is the mean of
modelled over measured peak memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.published_runs import PublishedRun, published_runs
from tessera.benchmarks.harness.registry import register_case
from tessera.estimator.architectures.transformer import transformer_graph
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.memory import States
from tessera.estimator.plans import Shape, Training
from tessera.estimator.pricing.price import price_plan
from tessera.estimator.stated.comparison import join_chunks
from tessera.estimator.stated.completion import PlanContext, complete_plan
from tessera.formulation.execution_plan import ExecutionPlan, Precision, Recomputation
from tessera.simulator.figures import Figure, Report


@register_case("stated-plans", smoke={}, mape=("<=", 0.30))
def judge_stated_plans() -> Report:
    """Compare prices of stated plans with the measured iteration times of published runs."""
    errors: dict[str, list[float]] = defaultdict(list)
    table: list[dict[str, Figure | str]] = []
    for run in published_runs():
        setting, plan = _setting_and_plan(run)
        price = price_plan(setting, plan)
        ratio = price.iter_time_s / run.seconds
        group = run.group.lower().replace(" ", "_").replace("-", "_")
        errors["mape"].append(abs(ratio - 1))
        errors[f"mape_{group}"].append(abs(ratio - 1))
        if plain := _plain_plan(plan):
            plain_ratio = price_plan(setting, plain).iter_time_s / run.seconds
            errors["plain_mape"].append(abs(plain_ratio - 1))
            errors["mape_of_the_same"].append(abs(ratio - 1))
            errors[f"plain_mape_{group}"].append(abs(plain_ratio - 1))
        else:
            plain_ratio = math.nan
        held = max(price.memory_bytes) / run.memory_bytes if run.memory_bytes else math.nan
        errors["fits"].append(price.overflow is None)
        errors["memory_ratio"] += [held] if run.memory_bytes else []
        table.append(
            {
                "run": f"{run.group} {run.name}",
                "plan": str(plan),
                "seconds": run.seconds,
                "ratio": ratio,
                "plain_ratio": plain_ratio,
                "memory_ratio": held,
            }
        )
    errors["gain_error"] = _gain_errors({str(row["run"]): float(row["ratio"]) for row in table})
    figures: dict[str, Figure] = {name: float(np.mean(row)) for name, row in errors.items()}
    return Report(seed=0, figures=figures | {"runs": len(table)}, table=table)


GAINS: Final = (
    *(
        (f"Megatron-LM {size} full", f"Megatron-LM {size} selective")
        for size in ("22B", "175B", "530B", "1T")
    ),
    *(
        (
            f"torchtitan 8B s8192 x{gpus} tp1 pp1 cp1 v1 bf16",
            f"torchtitan 8B s8192 x{gpus} tp1 pp1 cp1 v1 fp8",
        )
        for gpus in (8, 128)
    ),
    (
        "torchtitan 405B s8192 x512 tp8 pp8 cp1 v1 fp8",
        "torchtitan 405B s8192 x512 tp8 pp8 cp1 v2 fp8",
    ),
)
"""Pairs of runs that differ in one switch: recomputation with sequence parallelism, fp8, chunks."""


def _gain_errors(ratios: Mapping[str, float]) -> list[float]:
    """Return the relative errors of the modelled gain of a switch, from modelled / measured times."""
    return [abs(ratios[without] / ratios[having] - 1) for without, having in GAINS]


def _setting_and_plan(run: PublishedRun) -> tuple[Setting, ExecutionPlan]:
    graph = transformer_graph(run.model)
    training = Training(global_batch=run.batch, micro_batches=1)
    shape = Shape(nodes=run.gpus // 8, gpus_per_node=8)
    context = PlanContext(graph=graph, training=training, shape=shape)
    setting = data_sheet_setting(graph, training, run.hardware, shape, States())
    return setting, complete_plan(run.stated, context)


def _plain_plan(plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return a plan without what the search's cost model cannot price, or None with context groups."""
    if any(stage.cp > 1 for stage in plan.stages):
        return None
    plain = join_chunks(plan) if plan.chunks > 1 else plan
    if plain.recomputation is Recomputation.SELECTIVE:
        plain = replace(plain, recomputation=Recomputation.NONE)
    return replace(plain, precision=Precision.BF16)
