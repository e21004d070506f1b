"""The loss of speed from running on the GPU type with the best estimate, at equal numbers of GPUs.

Data, calibration and judged rows are those of :mod:`tessera.benchmarks.estimator.iteration`. A case
is a judged workload at a number of GPUs that was measured on at least two types, each on its fewest
nodes. ``choice_regret`` is the mean loss of speed over the cases of all seeds: 1 - (time on the
best type) / (time on the chosen one). ``choice_right`` is the share of cases where the best type
was chosen. The baselines are the type with the highest peak for the model's type of compute, the
uncalibrated model, and any type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tessera.benchmarks.estimator.alpa import (
    HARDWARE,
    AlpaCell,
    MeasuredRow,
    WorkloadKey,
    rows_of,
    split_rows,
    times_of,
)
from tessera.benchmarks.estimator.iteration import predict_rows
from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.architectures.published import find_published
from tessera.simulator.figures import Figure

Case: TypeAlias = tuple[WorkloadKey, int]  # GPUs


def run_choice_section(data: Path, seeds: Sequence[int]) -> EstimatorSection:
    """Return the protocol's figures and rows. ``data`` is the folder of ``alpa_optimal.csv``."""
    rows, model = rows_of(data), times_of(data)
    lost: dict[str, list[float]] = defaultdict(list)
    by_count: dict[int, list[float]] = defaultdict(list)
    seen: set[Case] = set()
    for seed in seeds:
        parts = split_rows(rows, model, seed)
        estimates = {
            j.row.cell: j.seconds for j in predict_rows(model, parts.calibration, parts.test)
        }
        untaught = {j.row.cell: j.seconds for j in predict_rows(model, [], parts.test)}
        for case, choices in choice_cases(parts.test).items():
            mine = choice_regret(choices, _by(estimates))
            seen.add(case)
            by_count[case[1]].append(mine)
            lost["choice_regret"].append(mine)
            lost["choice_regret_uncalibrated"].append(choice_regret(choices, _by(untaught)))
            lost["choice_regret_peak"].append(choice_regret(choices, _at_peak))
            lost["choice_regret_any"].append(float(np.mean(speed_losses(choices))))
    figures: dict[str, Figure] = {name: float(np.mean(some)) for name, some in lost.items()}
    figures["choice_right"] = float(np.mean([loss == 0 for loss in lost["choice_regret"]]))
    figures["choice_worst"] = max(lost["choice_regret"])
    figures["choice_cases"] = len(seen)
    return EstimatorSection(
        figures=figures,
        rows=[
            {"section": "choice", "gpus": gpus, "cases": len(some), "regret": float(np.mean(some))}
            for gpus, some in sorted(by_count.items())
        ],
    )


def choice_cases(rows: Iterable[MeasuredRow]) -> dict[Case, list[MeasuredRow]]:
    """Return the choices of each workload and GPU count that has rows on two or more GPU types."""
    result: dict[Case, dict[str, MeasuredRow]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row.cell.nodes):
        result[row.cell.workload, row.cell.gpus].setdefault(row.cell.gpu_type, row)
    return {case: list(types.values()) for case, types in result.items() if len(types) > 1}


def speed_losses(choices: Sequence[MeasuredRow]) -> list[float]:
    """Return the share of the best speed that each choice loses."""
    best = min(row.seconds for row in choices)
    return [1 - best / row.seconds for row in choices]


def choice_regret(choices: Sequence[MeasuredRow], seconds_of: Callable[[AlpaCell], float]) -> float:
    """Return the loss from choosing the row of least estimated seconds."""
    chosen = min(range(len(choices)), key=lambda i: seconds_of(choices[i].cell))
    return speed_losses(choices)[chosen]


def _by(estimates: Mapping[AlpaCell, float]) -> Callable[[AlpaCell], float]:
    return lambda cell: estimates.get(cell, np.inf)


def _at_peak(cell: AlpaCell) -> float:
    graph = find_published(cell.family, cell.params).graph
    return 1 / HARDWARE[cell.gpu_type].flops(graph.dtype)
