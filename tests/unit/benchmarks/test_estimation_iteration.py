"""The benchmark of iteration times: its splits, baselines and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.estimator import choice, iteration
from tessera.benchmarks.estimator.alpa import (
    MAX_POINTS,
    AlpaCell,
    CachedTimes,
    MeasuredRow,
    rows_of,
    split_rows,
    times_of,
)
from tessera.benchmarks.estimator.iteration import RowPrediction, anchors_of, contradicted_rows
from tessera.estimator.calibration import Parameter, Subject, TimeModel
from tessera.formulation.base.tables import Floats
from tessera.simulator.data import data_dir


def a_row(
    seconds: float, *, gpu: str = "a40", nodes: int = 1, per_node: int = 2, batch: int = 256
) -> MeasuredRow:
    cell = AlpaCell(
        family="bert",
        params="1.3B",
        gpu_type=gpu,
        nodes=nodes,
        gpus_per_node=per_node,
        global_batch=batch,
        parameters=1.4e9,
    )
    return MeasuredRow(cell=cell, seconds=seconds)


class CountingModel:
    """A model with seconds = batch / GPUs that counts its calls."""

    parameters = (Parameter(name="rate", value=1.0, shared_sd=0.5, family_sd=0.1, gpu_sd=0.1),)

    def __init__(self) -> None:
        self.asked = 0

    def log_times(self, subjects: Sequence[Subject], log_values: Floats) -> tuple[Floats, Floats]:
        self.asked += len(subjects)
        seconds = [s.global_batch / s.nodes / s.gpus_per_node for s in subjects]
        return np.log(seconds) + log_values[:, 0], np.ones((len(subjects), 1))


def test_errors_are_relative_to_the_measurement() -> None:
    assert RowPrediction(row=a_row(2.0), seconds=3.0).error == pytest.approx(0.5)
    assert RowPrediction(row=a_row(2.0), seconds=1.0).error == pytest.approx(0.5)


def test_more_gpus_that_are_slower_contradict_fewer_ones() -> None:
    few, many = a_row(10.0, nodes=2), a_row(10.5, nodes=4)
    assert contradicted_rows([few, many]) == [many]
    assert contradicted_rows([few, a_row(5.0, nodes=4)]) == []


def test_a_speedup_beyond_the_ratio_of_gpus_is_a_contradiction() -> None:
    few, many = a_row(10.0, nodes=2), a_row(4.0, nodes=4)
    assert contradicted_rows([few, many]) == [few]


def test_other_machines_and_batches_are_no_contradiction() -> None:
    few = a_row(10.0, nodes=2)
    for other in (
        a_row(11.0, nodes=4, per_node=1),
        a_row(11.0, nodes=4, gpu="a10"),
        a_row(11.0, nodes=4, batch=512),
    ):
        assert contradicted_rows([few, other]) == []


def test_scaling_starts_from_the_fewest_gpus() -> None:
    rows = [a_row(5.0, nodes=4), a_row(9.0, nodes=2, per_node=1), a_row(10.0, nodes=1)]
    assert list(anchors_of(rows).values()) == [rows[2]]


def test_a_choice_loses_the_share_of_the_best_speed() -> None:
    choices = [a_row(2.0, gpu="a40"), a_row(1.0, gpu="a100"), a_row(4.0, gpu="a10")]
    assert choice.speed_losses(choices) == pytest.approx([0.5, 0.0, 0.75])
    assert choice.choice_regret(choices, lambda cell: {"a40": 1.0}.get(cell.gpu_type, 2.0)) == 0.5


def test_cases_have_two_types_each_on_its_fewest_nodes() -> None:
    near, far = a_row(2.0, nodes=1, per_node=4), a_row(3.0, nodes=2)
    other, alone = a_row(1.0, nodes=2, gpu="a10"), a_row(1.0, nodes=4)
    (found,) = choice.choice_cases([far, near, other, alone]).values()
    assert found == [near, other]


def test_no_subject_is_computed_twice() -> None:
    work = CountingModel()
    model, cells = CachedTimes(work), [a_row(1.0).cell, a_row(1.0, batch=512).cell]
    first = model.log_times(cells, np.zeros((2, 1)))
    second = model.log_times(cells[::-1], np.zeros((2, 1)))
    assert work.asked == 2
    assert second[0].tolist() == first[0][::-1].tolist()
    model.log_times(cells, np.ones((2, 1)))
    assert work.asked == 4


def require_arena() -> Path:
    folder = data_dir()
    if folder is None or not (folder / "arena" / "alpa_optimal.csv").is_file():
        pytest.skip("needs the measurements of Arena's artifact")
    return folder / "arena"


@pytest.mark.parametrize("seed", [0, 1])
def test_no_judged_workload_was_measured_and_no_pair_more_than_thrice(seed: int) -> None:
    rows = rows_of(require_arena())
    parts = split_rows(rows, CountingModel(), seed)
    pairs = [(row.cell.family, row.cell.gpu_type) for row in parts.calibration]
    assert max(pairs.count(pair) for pair in pairs) <= MAX_POINTS
    used = {row.cell.workload for row in parts.calibration}
    assert parts.test
    assert not used & {row.cell.workload for row in parts.test}
    assert len(parts.test) + sum(row.cell.workload in used for row in rows) == len(rows) == 318


@pytest.mark.full
def test_a_little_calibration_beats_no_calibration() -> None:
    data = require_arena()
    model: TimeModel = times_of(data)
    parts = split_rows(rows_of(data), model, 0)
    ours, none = (
        np.mean([one.error for one in iteration.predict_rows(model, some, parts.test)])
        for some in (parts.calibration, [])
    )
    assert ours < 0.12
    assert ours < none
