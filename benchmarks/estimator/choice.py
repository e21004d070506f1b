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
    Cell,
    Row,
    Workload,
    rows_of,
    split,
    times_of,
)
from tessera.benchmarks.estimator.iteration import predict_rows
from tessera.benchmarks.estimator.section import Section
from tessera.estimator.architectures.published import find
from tessera.simulator.figures import Figure

Case: TypeAlias = tuple[Workload, int]  # GPUs


def section(data: Path, seeds: Sequence[int]) -> Section:
    """Return the protocol's figures and rows. ``data`` is the folder of ``alpa_optimal.csv``."""
    rows, model = rows_of(data), times_of(data)
    lost: dict[str, list[float]] = defaultdict(list)
    by_count: dict[int, list[float]] = defaultdict(list)
    seen: set[Case] = set()
    for seed in seeds:
        parts = split(rows, model, seed)
        estimates = {
            j.row.cell: j.seconds for j in predict_rows(model, parts.calibration, parts.test)
        }
        untaught = {j.row.cell: j.seconds for j in predict_rows(model, [], parts.test)}
        for case, choices in cases(parts.test).items():
            mine = regret(choices, _by(estimates))
            seen.add(case)
            by_count[case[1]].append(mine)
            lost["choice_regret"].append(mine)
            lost["choice_regret_uncalibrated"].append(regret(choices, _by(untaught)))
            lost["choice_regret_peak"].append(regret(choices, _at_peak))
            lost["choice_regret_any"].append(float(np.mean(losses(choices))))
    figures: dict[str, Figure] = {name: float(np.mean(some)) for name, some in lost.items()}
    figures["choice_right"] = float(np.mean([loss == 0 for loss in lost["choice_regret"]]))
    figures["choice_worst"] = max(lost["choice_regret"])
    figures["choice_cases"] = len(seen)
    return Section(
        figures=figures,
        rows=[
            {"section": "choice", "gpus": gpus, "cases": len(some), "regret": float(np.mean(some))}
            for gpus, some in sorted(by_count.items())
        ],
    )


def cases(rows: Iterable[Row]) -> dict[Case, list[Row]]:
    """Return the choices of each workload and GPU count that has rows on two or more GPU types."""
    result: dict[Case, dict[str, Row]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row.cell.nodes):
        result[row.cell.workload, row.cell.gpus].setdefault(row.cell.gpu_type, row)
    return {case: list(types.values()) for case, types in result.items() if len(types) > 1}


def losses(choices: Sequence[Row]) -> list[float]:
    """Return the share of the best speed that each choice loses."""
    best = min(row.seconds for row in choices)
    return [1 - best / row.seconds for row in choices]


def regret(choices: Sequence[Row], seconds_of: Callable[[Cell], float]) -> float:
    """Return the loss from choosing the row of least estimated seconds."""
    chosen = min(range(len(choices)), key=lambda i: seconds_of(choices[i].cell))
    return losses(choices)[chosen]


def _by(estimates: Mapping[Cell, float]) -> Callable[[Cell], float]:
    return lambda cell: estimates.get(cell, np.inf)


def _at_peak(cell: Cell) -> float:
    graph = find(cell.family, cell.params).graph
    return 1 / HARDWARE[cell.gpu_type].flops(graph.dtype)
