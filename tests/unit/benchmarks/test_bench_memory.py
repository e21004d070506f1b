from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.estimator.memory import (
    DEFAULT_COPIES,
    TriedPlan,
    fit_copies,
    run_memory_section,
)
from tessera.estimator.hardware import A40
from tessera.formulation.base.tables import Floats
from tessera.simulator.data import data_dir

BYTES = "model,params,global_batch,dp_degree,mem_per_gpu_gib,status\n"
SEARCH = (
    "model,params,global_batch,gpu_type,num_nodes,gpus_per_node,mem_per_gpu_gib,stage_layers,"
    "stage_logical_shapes,stage_sharding\n"
)


def a_run(parts: Floats | None = None, **given: object) -> TriedPlan:
    """Return a run of one stage that needs 4 GiB, and 2, 1 and 3 GiB for one copy of each kind."""
    of_stages = (
        np.array([[[4.0, 2.0, 1.0, 3.0]], [[1.0, 2.0, 1.0, 0.0]]]) if parts is None else parts
    )
    fields: dict[str, object] = {
        "source": "x",
        "job": ("bert", "1.3B", 128),
        "hardware": A40,
        "gpus": 1,
        "group": ("bert", "fine"),
        "free": np.zeros(of_stages.shape[1], dtype=bool),
        "parameters_gib": 1.0,
        "measured_gib": 10.0,
    }
    return TriedPlan(parts=of_stages, **(fields | given))  # type: ignore[arg-type]


def test_the_fullest_stage_is_predicted() -> None:
    stages = np.array([[4.0, 2.0, 1.0, 3.0], [8.0, 0.0, 0.0, 2.0]])
    run = a_run(np.stack([stages, stages]))
    assert run.predicted_gib(np.array([1.0, 0.0, 0.0])) == 8.0
    assert run.predicted_gib(np.array([1.0, 0.0, 1.0])) == 10.0
    assert run.predicted_gib(np.array([4.0, 0.0, 0.0])) == 12.0


def test_free_sharding_divides_weights_only_if_they_do_not_fit() -> None:
    copies = np.array([1.0, 0.0, 1.0])
    tight = a_run(10 * a_run().parts, free=np.array([True]))
    assert tight.predicted_gib(copies) == 30.0
    assert replace(tight, free=np.array([False])).predicted_gib(copies) == 90.0
    assert a_run(free=np.array([True])).predicted_gib(copies) == 9.0


def test_fitting_recovers_the_copies_that_made_the_measurements() -> None:
    rng = np.random.default_rng(3)
    truth = np.array([0.7, 0.0, 1.3])
    runs = [a_run(rng.uniform(1, 9, (2, 3, 4))) for _ in range(40)]
    runs = [replace(run, measured_gib=run.predicted_gib(truth)) for run in runs]
    runs[0] = replace(runs[0], measured_gib=500.0)  # one absurd row changes nothing
    assert fit_copies(runs, rounds=20) == pytest.approx(truth, abs=0.02)


def test_copies_are_not_negative() -> None:
    runs = [a_run(np.full((2, 1, 4), x), measured_gib=x / 2) for x in (1.0, 2.0, 3.0)]
    assert (fit_copies(runs) >= 0).all()
    assert fit_copies(runs).sum() < DEFAULT_COPIES.sum()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "history").mkdir()
    rows = [
        ("bert", "1.3B", 128, 1, "", "infeasible"),
        ("bert", "1.3B", 128, 2, "", "infeasible"),
        ("bert", "1.3B", 128, 4, "13.8", "ok"),
        ("bert", "1.3B", 128, 8, "", "infeasible"),
        ("bert", "1.3B", 256, 1, "", "infeasible"),
        ("bert", "1.3B", 256, 4, "15.7", "ok"),
        ("bert", "6.7B", 128, 4, "", "infeasible"),
    ]
    lines = "\n".join(",".join(map(str, row)) for row in rows)
    (tmp_path / "dp_memory.csv").write_text(BYTES + lines)
    searched = [
        "bert,1.3B,128,a40,1,1,33.0,0-5,1x1,free",
        "bert,1.3B,128,a40,1,2,20.1,0-2|3-5,1x1|1x1,free|batch0",
        "bert,1.3B,256,a40,1,1,,0-5,1x1,free",
    ]
    (tmp_path / "history" / "alpa_search.csv").write_text(SEARCH + "\n".join(searched))
    return tmp_path


def test_rows_without_memory_figures_are_skipped_and_counted(small: Path) -> None:
    figures = run_memory_section(small, [0]).figures
    assert figures["left_out_above_a_fit"] == 1
    assert figures["left_out_ran_elsewhere"] == 1
    assert figures["left_out_untried"] == 1
    assert figures["oom_rows"] == 10 - 3
    assert figures["memory_rows"] == 4


def test_calibration_jobs_are_not_judged(small: Path) -> None:
    section = run_memory_section(small, range(4))
    judged = section.figures["oom_judged_rows"]
    assert isinstance(judged, float)
    assert 0 < judged < 7


@pytest.mark.full
def test_measured_memory_is_predicted_within_fifteen_percent() -> None:
    folder = data_dir()
    if folder is None or not (folder / "arena" / "history").is_dir():
        pytest.skip("the Arena data set is not there (TESSERA_DATA)")
    figures = run_memory_section(folder / "arena", range(1)).figures
    assert figures["memory_rows"] == 278
    assert figures["memory_mape"] <= 0.15
    assert figures["memory_mape"] < figures["memory_mape_parameters"]
    assert figures["oom_accuracy"] >= 0.95
