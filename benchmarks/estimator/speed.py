"""The time to compute the Cells of one job.

A job has Cells on all four GPU types of the papers' simulated cluster, at five counts, with every
pipeline degree up to the number of GPUs. Models are the published ones, and links are those of data
sheets. Times are seconds of processor time of one thread, as the median of ``REPEATS`` runs after a
warm-up run. ``cells_s`` is the time of the slowest of three models, one from each family.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.architectures.published import PublishedModel, find_published
from tessera.estimator.cells import Setting, data_sheet_setting, plan_cells
from tessera.estimator.hardware import ALL, Hardware
from tessera.estimator.memory import FUSED, States
from tessera.estimator.plans import shape_of

MODELS: Final = (("bert", "1.3B"), ("moe", "2.4B"), ("wide_resnet", "2B"))
GPU_COUNTS: Final = (2, 4, 8, 16, 32)
BATCH: Final = 256
REPEATS: Final = 3


def run_speed_section(data: Path | None, seeds: Sequence[int]) -> EstimatorSection:
    """Return the figures and rows of the protocol. Nothing is drawn or read."""
    del data, seeds
    rows = [_timed(find_published(model, params)) for model, params in MODELS]
    return EstimatorSection(
        figures={
            "cells_s": max(float(row["seconds"]) for row in rows),
            "cells_plans": sum(int(row["plans"]) for row in rows),
        },
        rows=[dict(row) for row in rows],
    )


def _timed(published: PublishedModel) -> dict[str, float | int | str]:
    taken, plans = [], 0
    for _ in range(1 + REPEATS):
        start_s = time.process_time()
        plans = sum(_plans(published, hardware, count) for hardware in ALL for count in GPU_COUNTS)
        taken.append(time.process_time() - start_s)
    name = f"{published.model} {published.params}"
    return {
        "section": "cells",
        "model": name,
        "seconds": float(np.median(taken[1:])),
        "plans": plans,
    }


def _plans(published: PublishedModel, hardware: Hardware, gpus: int) -> int:
    """Return the number of pipeline degrees that have a plan."""
    return len(plan_cells(setting_of(published, BATCH, hardware, gpus)))


def setting_of(published: PublishedModel, batch: int, hardware: Hardware, gpus: int) -> Setting:
    """Return the setting of a model on ``gpus`` GPUs on the fewest nodes, by data sheets."""
    shape = shape_of(gpus, hardware.gpus_per_node)
    states = States(zero=published.zero)
    return data_sheet_setting(published.graph, published.at(batch), hardware, shape, states, FUSED)
