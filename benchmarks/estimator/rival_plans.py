"""Execution plans that the search of plans must not be slower than: older, listed and published ones.

``old_plans.json.gz`` has the plans of the two searches that the product had before, with where and
how they were recorded. Published plans are rows of ``published/training.csv`` in the data folder:
Megatron-LM's runs, with all sizes of their models.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.benchmarks.estimator.drawn_settings import draw_setting
from tessera.benchmarks.estimator.listed_stages import fastest_listed
from tessera.estimator.architectures.published import PublishedModel, published_models
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.hardware import A100_80, CATALOGUE
from tessera.estimator.memory import States
from tessera.estimator.models import Model
from tessera.estimator.plan_search import PlanSearch
from tessera.estimator.plans import Training, shape_of
from tessera.estimator.pricing.price import PlanPrice, price_plan
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    model_name,
    read_execution_plan,
)
from tessera.formulation.job.techniques import PlanLimits

OLD_PLANS: Final = Path(__file__).with_name("old_plans.json.gz")
ROUNDING: Final = 1e-9
"""Share of a time by which equal times may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRivalry:
    """The plan of the search, or None if it has none, next to a rival that fits.

    ``rival`` is None if no listed plan is faster. ``limits`` is a pipeline degree, a runtime, or ""
    for the fastest plan of all.
    """

    source: str
    setting: str
    limits: str
    price: PlanPrice | None
    rival: PlanPrice | None

    @property
    def fits(self) -> bool:
        """Return whether the search has a plan that fits."""
        return self.price is not None and self.price.overflow is None

    @property
    def gain(self) -> float:
        """Return the rival's time over the search's time. It is nan unless both have a plan."""
        if self.price is None or self.rival is None or not self.fits:
            return np.nan
        return self.rival.iter_time_s / self.price.iter_time_s

    @property
    def is_missing(self) -> bool:
        """Return whether the rival alone has a plan that fits."""
        return self.rival is not None and not self.fits

    @property
    def is_worse(self) -> bool:
        """Return whether both have a plan that fits, and the rival's is faster."""
        return self.gain < 1.0 - ROUNDING


def job_of(model: PublishedModel) -> Workload:
    """Return a model at its largest batch."""
    return Workload(model=model.model, params=model.params, global_batch=max(model.batches))


def make_estimator(model: PublishedModel) -> Estimator:
    """Return an estimator of a model's Cells on every GPU type of the catalogue, by data sheets."""
    trained_model = Model(graph=model.graph, training=model.training, zero=model.zero)
    return Estimator({kind.name: kind for kind in CATALOGUE}, {job_of(model): trained_model})


@cache
def read_old_plans() -> dict[str, Any]:
    """Return what ``old_plans.json.gz`` has: its provenance, plans, settings and times."""
    with gzip.open(OLD_PLANS, "rt", encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


def rival_old(record: dict[str, Any]) -> Iterator[PlanRivalry]:
    """Yield the Cells and runtimes of a recorded setting of which an old plan fits.

    Both plans are priced by the present model. Old Cells, whose limits are a pipeline degree, come
    before the best old plans without limits (``command``), which have the limits of their degree.
    """
    plans, model = (
        read_old_plans()["plans"],
        published_models()[record["model"], record["params"]],
    )
    job, gpus, kind = job_of(model), record["gpus"], record["gpu_type"]
    estimator = make_estimator(model)
    shape = shape_of(gpus, estimator.hardware[kind].gpus_per_node)
    setting = estimator.setting(job, kind, shape)
    best = PlanSearch(setting, model=model_name(job)).best_by_degree()
    for source in ("cells", "runtimes"):
        for limits, index in record[source].items():
            rival = price_plan(setting, read_execution_plan("plan", plans[index]))
            if rival.overflow is not None:
                continue
            is_open = source == "cells" or limits == "command"
            yield PlanRivalry(
                source=f"old {source}",
                setting=f"{job.model} {job.params}, {gpus} x {kind}",
                limits=str(rival.plan.pipeline_degree) if is_open else limits,
                price=best.get(rival.plan.pipeline_degree)
                if is_open
                else _fastest(setting, limits, model_name(job)),
                rival=rival,
            )


def rival_listed(seed: int) -> Iterator[PlanRivalry]:
    """Yield each pipeline degree of a drawn setting. The rival is a listed plan that is faster."""
    setting = draw_setting(np.random.default_rng(seed))
    search = PlanSearch(setting)
    best = search.best_by_degree()
    for degree in search.degrees:
        price = best.get(degree)
        fits = price is not None and price.overflow is None
        known_s = price.iter_time_s * (1.0 - ROUNDING) if price and fits else np.inf
        yield PlanRivalry(
            source="listed",
            setting=f"seed {seed}",
            limits=str(degree),
            price=price,
            rival=fastest_listed(setting, degree, known_s),
        )


def rival_published(row: dict[str, str]) -> PlanRivalry:
    """Return a published run's plan next to ours."""
    setting, plan = read_published(row)
    rival = price_plan(setting, plan)
    return PlanRivalry(
        source="published",
        setting=f"{row['row']}, {row['gpus']} x {row['gpu']}",
        limits="",
        price=_fastest(setting, "command", ""),
        rival=rival if rival.overflow is None else None,
    )


def read_rows(path: Path) -> Sequence[dict[str, str]]:
    """Return the published runs without ZeRO in 16 bits, whose plans are stated completely."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [r for r in rows if r["zero"] == "0" and r["precision"] in ("f16", "bf16")]


def read_published(row: dict[str, str]) -> tuple[Setting, ExecutionPlan]:
    """Return the setting and the plan of a published run."""
    sizes = {name: int(text) for name, text in row.items() if text.isdigit()}
    graph = transformer_graph(
        Transformer(
            name=row["row"],
            layers=sizes["layers"],
            hidden=sizes["hidden"],
            heads=sizes["heads"],
            sequence=sizes["sequence"],
            vocabulary=sizes["vocabulary"],
            intermediate=sizes["intermediate"],
            dtype=row["precision"],
            flash=bool(sizes["flash_attention"]),
        )
    )
    gpus, tp, batch = sizes["gpus"], sizes["tp"], sizes["global_batch"]
    pieces = sizes["pp"] * sizes["virtual_stages"]
    dp = gpus // (tp * sizes["pp"])
    micro_batch = dp * sizes["micro_batch"]
    inner = [1 + sizes["layers"] // pieces * (i + 1) for i in range(pieces - 1)]
    plan = ExecutionPlan(
        stages=tuple(
            PlanStage(start=start, end=end, dp=dp, tp=tp, sp=bool(sizes["sequence_parallel"]))
            for start, end in pairwise((0, *inner, len(graph)))
        ),
        micro_batch=micro_batch,
        accumulation=batch // micro_batch,
        chunks=sizes["virtual_stages"],
        schedule=Schedule.INTERLEAVED if pieces > sizes["pp"] else Schedule.ONE_F_ONE_B,
        recomputation=Recomputation(row["recompute"]),
        precision=Precision(row["precision"]),
    )
    training = Training(
        global_batch=batch,
        micro_batches=plan.accumulation,
        checkpointing=row["recompute"] != "none",
    )
    shape = shape_of(gpus, A100_80.gpus_per_node)
    return data_sheet_setting(graph, training, A100_80, shape, States()), plan


def _fastest(setting: Setting, runtime: str, model: str) -> PlanPrice | None:
    """Return the fastest plan of a setting that a runtime can run, or None."""
    variants = PlanSearch(setting, PlanLimits(runtime=runtime), model).host_variants()
    return min(variants, key=lambda price: price.iter_time_s, default=None)
