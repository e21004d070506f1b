"""The benchmark of proxy plans and search spaces: only what planners know is used, and reported correctly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.estimator import choice_of_plan, tuning
from tessera.benchmarks.estimator.recorded_cells import RecordedCell, read_cells
from tessera.estimator.planning.tuning import whole_space
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.data import data_dir


@pytest.fixture(scope="module")
def folder() -> Path:
    found = data_dir()
    if found is None or not (found / "arena" / "history" / "cell_plans.csv").is_file():
        pytest.skip("the Arena artifact's cell_plans.csv is not here; see docs/results/method.md")
    return found / "arena"


@pytest.fixture(scope="module")
def cells(folder: Path) -> list[RecordedCell]:
    return read_cells(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cell_plans\.csv"):
        read_cells(tmp_path)


def test_measurement_groups_of_one_cell_are_merged(cells: list[RecordedCell]) -> None:
    assert len(cells) == 9
    assert sum(len(cell.ends) for cell in cells) == 647
    assert {cell.groups for cell in cells} >= {("8d", "8d_2"), ("16d_moe",)}


def test_plans_are_rows_of_the_candidates(cells: list[RecordedCell]) -> None:
    for cell in cells:
        space = whole_space(cell.candidates, cell.gpus, cell.stages)
        assert tuning.kept_plans(space, cell).all()
        assert (cell.candidates.dp[cell.rows] == np.where(cell.data_parallel, 2, 1)).all()


def test_kernel_times_of_layers_add_up_to_those_of_stages(cells: list[RecordedCell]) -> None:
    for cell in cells:
        layers = np.concatenate([[0.0], cell.kernels_of_layers(True).cumsum()])
        stages = (layers[cell.ends] - layers[cell.starts])[cell.data_parallel]
        assert stages == pytest.approx(cell.kernels_s[cell.data_parallel], rel=0.03)


@pytest.mark.parametrize("load", [choice_of_plan.learned_compute, choice_of_plan.recorded_roofline])
def test_no_choice_depends_on_times_of_the_cell_that_is_judged(
    cells: list[RecordedCell], load: choice_of_plan.Load
) -> None:
    for k, cell in enumerate(cells):
        nothing = np.full_like(cell.kernels_s, np.nan)
        blind = replace(
            cell,
            iter_time_s=np.full_like(cell.iter_time_s, np.nan),
            kernels_s=nothing,
            comm_s=nothing,
            sync_s=nothing,
        )
        others = [*cells[:k], blind, *cells[k + 1 :]]
        assert (load(blind, others) == load(cell, cells)).all()
        assert choice_of_plan.proxy_plan(blind, load(blind, others)) == choice_of_plan.proxy_plan(
            cell, load(cell, cells)
        )
        latency = choice_of_plan.latency_of_candidates(blind, others)
        assert np.isfinite(latency.worst_s).all()


def test_proxies_come_close_to_the_best_plans(folder: Path) -> None:
    figures = choice_of_plan.run_plan_section(folder, [0]).figures
    assert figures["proxy_share"] >= 0.95
    assert figures["proxy_share_any"] < figures["proxy_share_even"] < figures["proxy_share"]
    assert figures["proxy_share_searched"] >= figures["proxy_share"]


def test_pruned_spaces_keep_good_plans_and_are_small(folder: Path) -> None:
    figures = tuning.run_tuning_section(folder, [0]).figures
    assert figures["tuning_quality"] >= 0.97
    assert figures["tuning_reduction"] >= 5
    wider = [figures[f"tuning_reduction_slack_{x}"] for x in ("1.1", "1.2", "1.3")]
    assert wider == sorted(wider, reverse=True)
