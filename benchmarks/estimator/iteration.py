"""The accuracy of iteration times of Alpa's plans that are predicted from few measurements.

Data: the rows of ``arena/alpa_optimal.csv`` that ran. For each seed, at most three of them are used
for calibration for each model family and GPU type. The rows of all other (model, size, batch) are
judged (:func:`tessera.benchmarks.estimator.alpa.split_rows`). Figures pool the judged rows of all seeds.
``mape_N`` is the mean of abs(estimate / measured - 1) at N GPUs, and ``rows_N`` the number of
different rows behind it. For ``mape_unseen_gpu``, the calibration rows of each GPU type in turn are
removed, and its judged rows are predicted from those of the other types. ``accuracy`` is 1 - abs(Te
- Td) / Td as in Crius and Arena. It is given as the mean, as the lowest mean of a family on a GPU
type, and as the lowest value of a row.

The plan is not an input. The model makes it as Alpa would (``estimator/equal_stages.py``).

**Choices made with all rows in view.** There is no second data set, so the following were settled
on this one: that kernels are a sum of four parts, that Alpa's plans have equal stages, how much its
search counts gradient exchanges, and the standard deviations of priors and residuals. No constant
was fitted to judged rows. Rates come from other records (``history/cell_modules.csv``). Seeds
change the calibration rows, not these choices.

``consistent_mape_N`` leaves out rows that contradict others of the same workload, GPU type and GPUs
per node. A row contradicts if it is no faster than a row on fewer GPUs. It also contradicts if a
row on more GPUs is faster by more than 1.15 times the ratio of GPUs. This depends on measured times
alone. ``all_rows_mape_N`` is the error when every row of other workloads calibrates (workloads in
thirds). It shows how much more measurements would help.

Baselines are judged on the same rows:

* ``linear`` is Sia's scaling (time times GPUs is constant) from the fewest GPUs on which the *same*
  workload was measured on that type. Our model does not have that measurement.
* ``flops`` is FLOPs over peak, divided by a utilisation: the median of the family's calibration
  rows on the type.
* ``authors`` is the best plan in ``estimates.csv`` (without v100).
* ``uncalibrated`` is our model without any measurement.

``ours_on_X`` are our errors on the rows that X has an answer for.
"""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.alpa import (
    GPU_COUNTS,
    HARDWARE,
    AlpaCell,
    MeasuredRow,
    RowSplit,
    cell_key,
    rows_of,
    split_rows,
    times_of,
)
from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.architectures.published import find_published
from tessera.estimator.calibration import Calibration, Estimate, TimeModel
from tessera.simulator.figures import Figure

SUPERLINEAR_FACTOR: Final = 1.15
FOLD_COUNT: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """A row with its prediction."""

    row: MeasuredRow
    seconds: float
    sd: float = 0.0  # of the logarithm

    @property
    def error(self) -> float:
        """Return the absolute error of the prediction, relative to the measurement."""
        return abs(self.seconds / self.row.seconds - 1)


def run_iteration_section(data: Path, seeds: Sequence[int]) -> EstimatorSection:
    """Return the protocol's figures and rows. ``data`` is the folder of ``alpa_optimal.csv``."""
    rows, model = rows_of(data), times_of(data)
    splits = [split_rows(rows, model, seed) for seed in seeds]
    judged = [one for each in splits for one in predict_rows(model, each.calibration, each.test)]
    contradicting = {row.cell for row in contradicted_rows(rows)}
    clear = [one for one in judged if one.row.cell not in contradicting]
    figures = {
        **_by_count("mape", judged),
        "mape": _mape(judged),
        **_by_count("median", judged, np.median),
        "median": _median(judged),
        **{
            f"rows_{n}": len({j.row.cell for j in judged if j.row.cell.gpus == n})
            for n in GPU_COUNTS
        },
        "mape_unseen_gpu": _mape(_unseen(model, splits)),
        **_accuracies(judged),
        **_coverage(judged),
        **_by_count("consistent_mape", clear),
        "contradicting_rows": len(contradicting),
        **_by_count("all_rows_mape", _from_all_others(model, rows)),
        **_baselines(data, model, rows, splits, judged),
        "calibration_rows": float(np.mean([len(each.calibration) for each in splits])),
        "seeds": len(seeds),
    }
    return EstimatorSection(figures=figures, rows=_table(judged))


def predict_rows(
    model: TimeModel, calibration: Iterable[MeasuredRow], test: Sequence[MeasuredRow]
) -> list[RowPrediction]:
    """Return predictions for the test rows for which the model has a plan."""
    learned = Calibration(model, [row.measurement for row in calibration])
    result = learned.estimates([row.cell for row in test])
    return [_judged(row, one) for row, one in zip(test, result, strict=True) if one is not None]


def _judged(row: MeasuredRow, estimate: Estimate) -> RowPrediction:
    return RowPrediction(row=row, seconds=estimate.iter_time_s, sd=estimate.sd)


def contradicted_rows(rows: Iterable[MeasuredRow]) -> list[MeasuredRow]:
    """Return the rows that another row of the same workload, type and GPUs per node contradicts."""
    alike: dict[tuple[object, ...], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        alike[(*row.cell.workload, row.cell.gpu_type, row.cell.gpus_per_node)].append(row)
    result: dict[AlpaCell, MeasuredRow] = {}
    for group in alike.values():
        group.sort(key=lambda row: row.cell.gpus)
        for few, many in itertools.combinations(group, 2):
            gain, most = few.seconds / many.seconds, many.cell.gpus / few.cell.gpus
            if gain <= 1:
                result[many.cell] = many
            elif gain > SUPERLINEAR_FACTOR * most:
                result[few.cell] = few
    return list(result.values())


def _unseen(model: TimeModel, splits: Iterable[RowSplit]) -> list[RowPrediction]:
    return [
        one
        for each in splits
        for kind in HARDWARE
        for one in predict_rows(
            model,
            [row for row in each.calibration if row.cell.gpu_type != kind],
            [row for row in each.test if row.cell.gpu_type == kind],
        )
    ]


def _from_all_others(model: TimeModel, rows: Sequence[MeasuredRow]) -> list[RowPrediction]:
    workloads = sorted({row.cell.workload for row in rows})
    np.random.default_rng(0).shuffle(workloads)
    fold = {tuple(workload): i % FOLD_COUNT for i, workload in enumerate(workloads)}
    return [
        one
        for i in range(FOLD_COUNT)
        for one in predict_rows(
            model,
            [row for row in rows if fold[row.cell.workload] != i],
            [row for row in rows if fold[row.cell.workload] == i],
        )
    ]


def _baselines(
    data: Path,
    model: TimeModel,
    rows: Sequence[MeasuredRow],
    splits: Sequence[RowSplit],
    ours: list[RowPrediction],
) -> dict[str, Figure]:
    anchors, authors = anchors_of(rows), _authors(data / "estimates.csv")
    result = {
        "linear": [one for s in splits for one in _answers(s.test, _linear(anchors))],
        "flops": [one for s in splits for one in _answers(s.test, _flops(s.calibration))],
        "authors": [one for s in splits for one in _answers(s.test, authors)],
        "uncalibrated": [one for s in splits for one in predict_rows(model, [], s.test)],
    }
    figures: dict[str, Figure] = {}
    for name, judged in result.items():
        answered = {one.row.cell for one in judged}
        same = [one for one in ours if one.row.cell in answered]
        figures |= {f"mape_{name}": _mape(judged), f"median_{name}": _median(judged)}
        figures |= _by_count(f"mape_{name}", judged)
        figures |= {f"mape_ours_on_{name}": _mape(same), f"rows_{name}": len(answered)}
    return figures


def _answers(
    test: Iterable[MeasuredRow], seconds_of: Callable[[AlpaCell], float | None]
) -> list[RowPrediction]:
    answers = [(row, seconds_of(row.cell)) for row in test]
    return [
        RowPrediction(row=row, seconds=seconds) for row, seconds in answers if seconds is not None
    ]


def anchors_of(rows: Iterable[MeasuredRow]) -> dict[tuple[object, ...], MeasuredRow]:
    """Return each workload and type's row on the fewest GPUs, and among those the fewest nodes."""
    anchors: dict[tuple[object, ...], MeasuredRow] = {}
    for row in sorted(rows, key=lambda row: (row.cell.gpus, row.cell.nodes)):
        anchors.setdefault((*row.cell.workload, row.cell.gpu_type), row)
    return anchors


def _linear(
    anchors: Mapping[tuple[object, ...], MeasuredRow],
) -> Callable[[AlpaCell], float | None]:
    def seconds_of(cell: AlpaCell) -> float | None:
        anchor = anchors[(*cell.workload, cell.gpu_type)]
        if anchor.cell == cell:
            return None
        return anchor.seconds * anchor.cell.gpus / cell.gpus

    return seconds_of


def _flops(calibration: Iterable[MeasuredRow]) -> Callable[[AlpaCell], float | None]:
    used: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in calibration:
        at_peak_s = _at_peak_s(row.cell)
        used[row.cell.family, row.cell.gpu_type].append(at_peak_s / row.seconds)

    def seconds_of(cell: AlpaCell) -> float | None:
        known = used.get((cell.family, cell.gpu_type))
        return _at_peak_s(cell) / float(np.median(known)) if known else None

    return seconds_of


def _at_peak_s(cell: AlpaCell) -> float:
    """Return the seconds that the passes' FLOPs take at the GPUs' peak."""
    graph = find_published(cell.family, cell.params).graph
    training = find_published(cell.family, cell.params).at(cell.global_batch)
    passes = training.forwards + 2
    peak = HARDWARE[cell.gpu_type].flops(graph.dtype) * cell.gpus
    return float(passes * graph.flops.sum()) * cell.global_batch / peak


def _authors(path: Path) -> Callable[[AlpaCell], float | None]:
    best: dict[tuple[str, str, int, str, int, int], float] = {}
    with path.open(newline="") as lines:
        for line in csv.DictReader(lines):
            if line["status"] == "ok":
                key, seconds = cell_key(line), float(line["iter_time_s"])
                best[key] = min(seconds, best.get(key, seconds))

    def seconds_of(cell: AlpaCell) -> float | None:
        return best.get((*cell.workload, cell.gpu_type, cell.nodes, cell.gpus_per_node))

    return seconds_of


def _mape(judged: Iterable[RowPrediction]) -> float:
    return float(np.mean([one.error for one in judged]))


def _median(judged: Iterable[RowPrediction]) -> float:
    return float(np.median([one.error for one in judged]))


def _by_count(
    name: str,
    judged: Sequence[RowPrediction],
    middle: Callable[[list[float]], np.floating] = np.mean,
) -> dict[str, Figure]:
    result = {n: [one.error for one in judged if one.row.cell.gpus == n] for n in GPU_COUNTS}
    return {f"{name}_{n}": float(middle(some)) for n, some in result.items() if some}


def _accuracies(judged: Sequence[RowPrediction]) -> dict[str, Figure]:
    pairs = _grouped(judged, lambda cell: (cell.family, cell.gpu_type))
    return {
        "accuracy": 1 - _mape(judged),
        "accuracy_worst_pair": min(1 - _mape(some) for some in pairs.values()),
        "accuracy_worst_row": min(1 - one.error for one in judged),
    }


def _coverage(judged: Sequence[RowPrediction]) -> dict[str, Figure]:
    """Return the shares of rows within one and two claimed standard deviations."""
    distance = np.array([abs(np.log(one.seconds / one.row.seconds)) / one.sd for one in judged])
    return {
        "within_1_sd": float((distance <= 1).mean()),
        "within_2_sd": float((distance <= 2).mean()),
    }


def _grouped(
    judged: Iterable[RowPrediction], key: Callable[[AlpaCell], tuple[str, ...]]
) -> dict[tuple[str, ...], list[RowPrediction]]:
    groups: dict[tuple[str, ...], list[RowPrediction]] = defaultdict(list)
    for one in judged:
        groups[key(one.row.cell)].append(one)
    return groups


def _table(judged: Sequence[RowPrediction]) -> list[dict[str, Figure | str]]:
    keys: dict[str, Callable[[AlpaCell], tuple[str, ...]]] = {
        "family, type": lambda cell: (cell.family, cell.gpu_type),
        "type, shape": lambda cell: (cell.gpu_type, f"{cell.nodes}x{cell.gpus_per_node}"),
    }
    return [
        {
            "section": "iteration",
            "by": by,
            "of": " ".join(group),
            "rows": len({one.row.cell for one in some}),
            "mape": _mape(some),
            "median": _median(some),
            "bias": float(np.mean([np.log(one.seconds / one.row.seconds) for one in some])),
        }
        for by, key in keys.items()
        for group, some in sorted(_grouped(judged, key).items())
    ]
