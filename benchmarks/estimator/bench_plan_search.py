"""The plans of the search, compared with older plans, with all plans, and with published ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, TypeVar

import numpy as np
import typer

from tessera.benchmarks.estimator.rival_plans import (
    PlanRivalry,
    job_of,
    make_estimator,
    read_old_plans,
    read_rows,
    rival_listed,
    rival_old,
    rival_published,
)
from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.estimator.architectures.published import PublishedModel, published_models
from tessera.estimator.hardware import A100, ALL, V100
from tessera.formulation.job.techniques import PlanLimits
from tessera.simulator.data import MissingData, require_data_file
from tessera.simulator.figures import Figure, Report

RUNTIMES: Final = ("jax", "torchrun", "deepspeed", "megatron", "alpa")
RUNTIME_GPUS: Final = (16, 8, 4, 2, 1)
JOB_GPUS: Final = (16, 32, 64)
CLUSTER_GPUS: Final = 64
REPEATS: Final = 3
CASES: Final = 400

Value = TypeVar("Value")
Row = dict[str, Figure | str]


@register_case(
    "plan-search",
    smoke={"cases": 2},
    worse_than_old=("<=", 0),
    infeasible_but_feasible=("<=", 0),
    worse_than_exhaustive=("<=", 0),
    worse_than_published=("<=", 0),
    models_jax=(">=", 20),
    cells_cpu_s=("<=", 1.0),
)
def judge_plan_search(
    cases: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of small settings to draw. Fewer than 400 also limit the settings with old"
            " or published plans to as many, and leave out runtimes and times.",
        ),
    ] = CASES,
) -> Report:
    """Search plans where others are known, and count those that are slower.

    **Old plans** were found by the product's two former searches, and recorded at commit 43ddf3d7 for the
    published models at their largest batch on six GPU types. ``cells_compared`` counts those that
    fit: one for each pipeline degree and runtime of a setting. ``median_gain`` is the old time over
    the new one, over the Cells that both have; ``best_median_gain`` is the same for the fastest
    Cells of each setting.

    **All plans** of drawn small settings (``exhaustive_cases``) come from a listing that shares only
    the costs of stages with the search (``listed_stages.py``, whose docstring lists its gaps).

    **Published plans** are Megatron-LM's. All plans have the times of the cost model, so this
    shows the quality of the search, and not how fast plans are on GPUs.

    ``infeasible_but_feasible`` counts the comparisons in which the rival alone has a plan that fits.
    ``models_X`` are the published models of which some plan fits that runtime X can run, on up to 16
    a100 on 4 nodes or up to 16 v100 on one. ``cells_cpu_s`` is the processor time of all Cells of a
    job of 32 GPUs for the slowest model: 16, 32 and 64 GPUs of four types with 64 GPUs each, the
    median of 3 runs after another one, each with a new estimator. The old times were measured at
    43ddf3d7. The bounds of ``models_jax`` and of times are this project's aims; all others
    follow from the purpose of a search.
    """
    records, is_small = read_old_plans(), cases < CASES
    settings = _spread(records["settings"], cases) if is_small else records["settings"]
    old_cases = [r for i in _steps(settings, "old plans") for r in rival_old(settings[i])]
    listed_cases = [r for i in track_steps(cases, "listed plans") for r in rival_listed(i)]
    published_cases, missing_data = _compare_published(cases)
    rivalries = [*old_cases, *listed_cases, *published_cases]
    figures: dict[str, Figure] = {
        "cells_compared": len(old_cases),
        "worse_than_old": _count_worse(old_cases),
        "infeasible_but_feasible": sum(r.is_missing for r in rivalries),
        "exhaustive_cases": cases,
        "worse_than_exhaustive": _count_worse(listed_cases),
        "published_rows": len(published_cases),
        "worse_than_published": np.nan if missing_data else _count_worse(published_cases),
        **_gains(old_cases),
    }
    table = [_lost_row(r) for r in rivalries if r.is_worse or r.is_missing]
    if missing_data:
        table.append({"model": "published plans", "reason": missing_data})
    if not is_small:
        rows = _model_rows(old_cases, records["cells_cpu_s"])
        figures |= {f"models_{r}": sum(r in str(row["runtimes"]) for row in rows) for r in RUNTIMES}
        for name in ("cells_cpu_s", "old_cells_cpu_s"):
            seconds = [float(row[name]) for row in rows]
            figures |= {name: max(seconds), f"{name}_median": float(np.median(seconds))}
        table = [*rows, *table]
    waived_names = frozenset({"worse_than_published"} if missing_data else ())
    return Report(seed=0, figures=figures, waived=waived_names, table=table)


def _compare_published(max_rows: int) -> tuple[list[PlanRivalry], str]:
    """Return the comparisons with published plans, or the reason for their absence."""
    try:
        rows = _spread(read_rows(require_data_file("published", "training.csv")), max_rows)
    except MissingData as reason:
        return [], str(reason)
    return [rival_published(rows[i]) for i in _steps(rows, "published plans")], ""


def _runtimes(model: PublishedModel) -> list[str]:
    """Return the runtimes that can run a plan of a model that fits."""
    estimator, job = make_estimator(model), job_of(model)
    return [
        runtime
        for runtime in RUNTIMES
        if any(
            estimate.price is not None
            for kind in (A100, V100)
            for gpus in RUNTIME_GPUS
            for estimate in estimator.cells(
                job,
                kind.name,
                gpus,
                nodes=RUNTIME_GPUS[0] // kind.gpus_per_node,
                limits=PlanLimits(runtime=runtime),
            )
        )
    ]


def _time_cells(model: PublishedModel) -> float:
    """Return the processor seconds of the Cells of a job on all GPU types."""
    seconds = []
    for _ in range(1 + REPEATS):
        start_s = time.process_time()
        estimator = make_estimator(model)
        for kind in ALL:
            for gpus in JOB_GPUS:
                nodes = CLUSTER_GPUS // kind.gpus_per_node
                estimator.cells(job_of(model), kind.name, gpus, nodes=nodes)
        seconds.append(time.process_time() - start_s)
    return float(np.median(seconds[1:]))


def _gains(old: Iterable[PlanRivalry]) -> dict[str, Figure]:
    """Return how much faster plans of Cells became, over all and over the fastest of settings."""
    cells = defaultdict[str, list[PlanRivalry]](list)
    for rivalry in old:
        if rivalry.source == "old cells" and not np.isnan(rivalry.gain):
            cells[rivalry.setting].append(rivalry)
    if not cells:
        return {}
    gains = [rivalry.gain for rivalries in cells.values() for rivalry in rivalries]
    best = [
        min(r.rival.iter_time_s for r in rivalries if r.rival)
        / min(r.price.iter_time_s for r in rivalries if r.price)
        for rivalries in cells.values()
    ]
    return {
        "median_gain": float(np.median(gains)),
        "mean_gain": float(np.mean(gains)),
        "best_median_gain": float(np.median(best)),
    }


def _model_rows(old: Sequence[PlanRivalry], old_cells_s: Mapping[str, float]) -> list[Row]:
    """Return a row for each published model, with its times and the runtimes that can run it."""
    models, rows = list(published_models().values()), list[Row]()
    for i in _steps(models, "runtimes and times"):
        name = f"{models[i].model} {models[i].params}"
        rivalries = [r for r in old if r.setting.startswith(f"{name},")]
        row: Row = {"model": name, "compared": len(rivalries), **_gains(rivalries)}
        row |= {"cells_cpu_s": _time_cells(models[i]), "old_cells_cpu_s": old_cells_s[name]}
        rows.append(row | {"runtimes": " ".join(_runtimes(models[i]))})
    return rows


def _lost_row(rivalry: PlanRivalry) -> Row:
    """Return a comparison that the search loses."""
    return {
        "model": f"{rivalry.setting}, {rivalry.limits}",
        "rival": rivalry.source,
        "ratio": 1.0 / rivalry.gain,
        "ours": str(rivalry.price.plan) if rivalry.price and rivalry.fits else "none fits",
        "theirs": str(rivalry.rival.plan) if rivalry.rival else "",
    }


def _count_worse(rivalries: Iterable[PlanRivalry]) -> int:
    return sum(rivalry.is_worse for rivalry in rivalries)


def _spread(values: Sequence[Value], max_count: int) -> list[Value]:
    """Return at most ``max_count`` values, spread evenly over all."""
    count = min(max_count, len(values))
    return [values[i * len(values) // count] for i in range(count)]


def _steps(values: Sequence[object], title: str) -> Iterable[int]:
    return track_steps(len(values), title)
