"""The accuracy of estimates, judged on the published measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.benchmarks.estimator import (
    choice,
    choice_of_plan,
    collectives,
    iteration,
    latency,
    memory,
    planners,
    speed,
    tuning,
)
from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.data import require_data_file
from tessera.simulator.figures import Figure, Report

SECTIONS: Final[Mapping[str, Callable[[Path, Sequence[int]], EstimatorSection]]] = {
    "iteration": iteration.run_iteration_section,
    "choice": choice.run_choice_section,
    "collectives": collectives.run_collective_section,
    "plans": choice_of_plan.run_plan_section,
    "tuning": tuning.run_tuning_section,
    "latency": latency.run_latency_section,
    "memory": memory.run_memory_section,
    "cells": speed.run_speed_section,
    "planners": planners.run_planner_section,
}


@register_case(
    "estimator",
    smoke={"sections": "cells,latency", "seeds": 1},
    mape_1=("<=", 0.08),
    mape_2=("<=", 0.08),
    mape_4=("<=", 0.08),
    mape_8=("<=", 0.08),
    mape_16=("<=", 0.08),
    mape_unseen_gpu=("<=", 0.20),
    choice_regret=("<=", 0.03),
    collectives_median_error=("<=", 0.10),
    proxy_share=(">=", 0.95),
    tuning_quality=(">=", 0.97),
    tuning_reduction=(">=", 5),
    latency_median_error=("<=", 0.05),
    memory_mape=("<=", 0.15),
    oom_accuracy=(">=", 0.95),
    cells_s=("<=", 0.5),
)
def judge_estimator(
    sections: Annotated[
        str, typer.Option(help=f"Comma-separated sections: {', '.join(SECTIONS)}.")
    ] = ",".join(SECTIONS),
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of splits into calibration and test rows.")
    ] = 5,
    rows: Annotated[
        bool, typer.Option(help="Also list the rows from which the figures are computed.")
    ] = False,
) -> Report:
    """Compare the estimator with the measurements in Arena's artifact.

    The docstring of each section's module in ``benchmarks/estimator/`` describes its protocol:
    calibration and test rows, and baselines. Bounds are this project's aims, not published results.
    """
    folder = require_data_file("arena", "comm.csv").parent
    chosen = _chosen(sections)
    result: list[EstimatorSection] = []
    for i in track_steps(len(chosen), "estimator"):
        result.append(SECTIONS[chosen[i]](folder, range(seeds)))
    figures: dict[str, Figure] = {}
    for part in result:
        figures |= part.figures
    table = [row for part in result for row in part.rows] if rows else []
    return Report(seed=0, figures=figures, table=table)


def _chosen(sections: str) -> list[str]:
    names = sections.replace(" ", "").split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise InvalidInput(
            "sections", f"unknown sections {', '.join(unknown)}; choose from {', '.join(SECTIONS)}"
        )
    return names
