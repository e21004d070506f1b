"""Calibration by a few measured iteration times, and the uncertainty of the resulting estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.estimator.calibration import (
    Calibration,
    Measurement,
    Parameter,
    Residual,
    Subject,
    select_measurements,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats


class TwoParameterModel:
    """A model with seconds = work / rate / GPUs + latency * nodes; it has no estimates above 64 GPUs."""

    parameters = (
        Parameter(name="rate", value=1.0, shared_sd=0.5, family_sd=0.3, gpu_sd=0.3),
        Parameter(name="latency_s", value=1.0, shared_sd=0.5, family_sd=0.1, gpu_sd=0.1),
    )

    def log_times(self, subjects: Sequence[Subject], log_values: Floats) -> tuple[Floats, Floats]:
        gpus = np.array([s.nodes * s.gpus_per_node for s in subjects], dtype=np.float64)
        busy = np.array([s.global_batch for s in subjects]) / gpus / np.exp(log_values[:, 0])
        waits = np.array([s.nodes for s in subjects]) * np.exp(log_values[:, 1])
        total = np.where(gpus > 64, np.nan, busy + waits)
        return np.log(total), np.stack([-busy / total, waits / total], axis=1)


def a_subject(
    *, family: str = "bert", gpu: str = "a100", nodes: int = 1, per_node: int = 4, batch: int = 64
) -> Subject:
    return Subject(
        family=family,
        gpu_type=gpu,
        nodes=nodes,
        gpus_per_node=per_node,
        global_batch=batch,
        parameters=1e9,
    )


GRID = [
    a_subject(family=f, gpu=g, nodes=n, per_node=p, batch=b)
    for f in ("bert", "moe")
    for g in ("a100", "v100")
    for n in (1, 2, 4)
    for p in (1, 2, 4)
    for b in (64, 256)
]


def true_times(subjects: Sequence[Subject], rate: float, latency_s: float) -> list[float]:
    at = np.tile(np.log([rate, latency_s]), (len(subjects), 1))
    return [float(t) for t in np.exp(TwoParameterModel().log_times(subjects, at)[0])]


def measurements_of(
    subjects: Sequence[Subject], rate: float, latency_s: float
) -> list[Measurement]:
    times = true_times(subjects, rate, latency_s)
    return [Measurement(subject=s, iter_time_s=t) for s, t in zip(subjects, times, strict=True)]


def relative_errors(calibration: Calibration, rate: float, latency_s: float) -> Floats:
    estimates = calibration.estimates(GRID)
    times = [e.iter_time_s for e in estimates if e is not None]
    assert len(times) == len(GRID)
    off: Floats = np.abs(np.array(times) / np.array(true_times(GRID, rate, latency_s)) - 1)
    return off


def test_without_measurements_the_model_uses_its_defaults() -> None:
    assert relative_errors(Calibration(TwoParameterModel()), 1.0, 1.0).max() < 1e-12


def test_two_measurements_determine_both_parameters() -> None:
    two = [a_subject(per_node=1, batch=256), a_subject(nodes=4, batch=64)]
    alike = np.array([s.family == "bert" and s.gpu_type == "a100" for s in GRID])
    untaught = relative_errors(Calibration(TwoParameterModel()), 0.5, 2.0)
    taught = relative_errors(
        Calibration(TwoParameterModel(), measurements_of(two, 0.5, 2.0)), 0.5, 2.0
    )
    assert untaught.min() > 0.4
    assert taught[alike].max() < 0.1
    assert taught.max() < 0.3


def test_lessons_from_one_gpu_type_count_less_on_another() -> None:
    calibration = Calibration(
        TwoParameterModel(), measurements_of([a_subject(per_node=1, batch=256)], 0.5, 1.0)
    )
    same, other = calibration.log_values([a_subject(), a_subject(gpu="v100")])[:, 0]
    assert same < other < 0.0


def test_one_outlier_among_many_measurements_has_little_influence() -> None:
    wild = measurements_of(GRID[::3], 0.5, 2.0)
    wild[4] = Measurement(subject=wild[4].subject, iter_time_s=wild[4].iter_time_s * 8)
    assert np.median(relative_errors(Calibration(TwoParameterModel(), wild), 0.5, 2.0)) < 0.03


def test_uncertainty_is_least_at_measured_cells_and_grows_with_distance() -> None:
    calibration = Calibration(TwoParameterModel(), measurements_of([a_subject()] * 2, 1.0, 1.0))
    near, further, unseen = calibration.estimates(
        [a_subject(), a_subject(nodes=4), a_subject(family="moe", gpu="v100", nodes=4)]
    )
    assert near is not None
    assert further is not None
    assert unseen is not None
    assert near.sd < further.sd < unseen.sd


def test_shape_deviations_begin_at_two_gpus_per_node_and_are_complete_at_four() -> None:
    model = TwoParameterModel()
    known = [replace(p, shared_sd=0.0, family_sd=0.0, gpu_sd=0.0) for p in model.parameters]
    model.parameters = (known[0], known[1])
    alone = Residual(gpu_sd=0.0, family_sd=0.0, pair_sd=0.0, shape_sd=0.2, noise_sd=1e-6)
    estimates = Calibration(model, (), alone).estimates(
        [a_subject(per_node=n) for n in (1, 2, 4, 8)]
    )
    assert [e.sd for e in estimates if e is not None] == pytest.approx(
        [0.0, 0.1, 0.2, 0.2], abs=1e-5
    )


def test_stated_uncertainty_covers_worlds_drawn_from_the_prior() -> None:
    rng = np.random.default_rng(3)
    residual = Residual(gpu_sd=0.0, family_sd=0.0, pair_sd=0.0, shape_sd=0.0, noise_sd=0.05)
    inside = total = 0
    for _ in range(40):
        rate, latency_s = np.exp(rng.normal(0.0, 0.5, 2))
        noise = np.exp(rng.normal(0.0, 0.05, len(GRID)))
        times = np.array(true_times(GRID, rate, latency_s)) * noise
        measured = rng.choice(len(GRID), 4, replace=False)
        taught = [Measurement(subject=GRID[i], iter_time_s=times[i]) for i in measured]
        for i, estimate in enumerate(
            Calibration(TwoParameterModel(), taught, residual).estimates(GRID)
        ):
            assert estimate is not None
            inside += abs(math.log(estimate.iter_time_s / times[i])) <= 2 * estimate.sd
            total += 1
    assert 0.93 <= inside / total <= 1.0


def test_a_cell_without_a_plan_has_no_estimate_and_is_not_learned_from() -> None:
    huge = a_subject(nodes=32)
    calibration = Calibration(TwoParameterModel(), [Measurement(subject=huge, iter_time_s=1.0)])
    assert calibration.estimates([huge]) == [None]
    assert calibration.left_out == 1
    assert relative_errors(calibration, 1.0, 1.0).max() < 1e-12


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="above 0"):
        Calibration(TwoParameterModel(), [Measurement(subject=a_subject(), iter_time_s=seconds)])


def test_the_cells_to_measure_first_are_diverse_and_few_for_each_pair() -> None:
    chosen = select_measurements(TwoParameterModel(), GRID, GRID, most=2)
    pairs = [(GRID[i].family, GRID[i].gpu_type) for i in chosen]
    assert len(chosen) == len(set(chosen)) == 8
    assert all(pairs.count(p) == 2 for p in pairs)
    assert len({(GRID[i].nodes, GRID[i].gpus_per_node) for i in chosen}) > 2


def test_measuring_the_most_informative_cells_beats_measuring_as_many_similar_ones() -> None:
    rng = np.random.default_rng(0)
    telling = select_measurements(TwoParameterModel(), GRID, GRID, most=2)
    alike = [i for i, s in enumerate(GRID) if s.nodes * s.gpus_per_node == 1]
    found = {"telling": 0.0, "alike": 0.0}
    for _ in range(10):
        rate, latency_s = np.exp(rng.normal(0.0, 0.5, 2))
        for name, cells in (("telling", telling), ("alike", alike)):
            taught = measurements_of([GRID[i] for i in cells], rate, latency_s)
            found[name] += float(
                relative_errors(Calibration(TwoParameterModel(), taught), rate, latency_s).mean()
            )
    assert len(telling) == len(alike) == 8
    assert found["telling"] < found["alike"]
