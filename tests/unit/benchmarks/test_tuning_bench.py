"""The benchmark of tuning at launch: its Cells, and what its figures are made of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tessera.benchmarks.service import bench_tuning
from tessera.benchmarks.service.bench_tuning import measure_tuning
from tessera.benchmarks.service.tuning.cells import ModelSize, TunedCell, list_cells
from tessera.benchmarks.service.tuning.searches import SearchFailed, SpaceSearch, Workbench
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.formulation.launch import TuningSpace
from tessera.formulation.runtimes import JAX, RUNTIMES

SIZE = ModelSize(blocks=4)


def test_each_cell_has_plans_of_its_degree_in_all_spaces() -> None:
    cells = list_cells(SIZE, 4, [1, 2, 4], 16, 4, JAX)
    assert [cell.degree for cell in cells] == [1, 2, 4]
    for cell in cells:
        whole = set(cell.spaces[TuningSpace.FULL])
        assert cell.plan in whole
        for plans in cell.spaces.values():
            assert set(plans) <= whole
            assert {plan.pipeline_degree for plan in plans} == {cell.degree}
            assert {(plan.layers, plan.gpus, plan.global_batch) for plan in plans} == {(6, 4, 16)}
            assert not any(RUNTIMES[JAX].refuse_plan(plan) for plan in plans)
    assert cells == list_cells(SIZE, 4, [1, 2, 4], 16, 4, JAX)


def test_a_degree_without_plans_is_refused() -> None:
    with pytest.raises(InvalidInput, match="8 stages of 6 layers have no plans on 8 devices"):
        list_cells(SIZE, 8, [8], 16, 4, JAX)
    with pytest.raises(InvalidInput, match="whole numbers"):
        measure_tuning(degrees="1,two")


class ScriptedBench(Workbench):
    """A workbench on which each plan takes the seconds of its digest, and half a second to try."""

    def search_space(self, cell: TunedCell, space: TuningSpace) -> SpaceSearch:
        tried = {cell.plan, *cell.spaces[space]}
        return SpaceSearch(
            winner=min(tried, key=seconds_of), tried=len(tried), failed=0, spent_s=len(tried) / 2
        )

    def judge_plans(self, plans: Any, rounds: int) -> dict[ExecutionPlan, float]:
        return {plan: seconds_of(plan) for plan in plans}


def seconds_of(plan: ExecutionPlan) -> float:
    return 1 + int(plan.digest[:4], 16) / 65_536


def test_figures_compare_the_pruned_searches_with_the_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_tuning, "Workbench", ScriptedBench)
    report = measure_tuning()
    figures, cells = report.figures, list_cells(SIZE, 4, [1, 2, 4], 16, 4, JAX)
    full = sum(len(cell.spaces[TuningSpace.FULL]) for cell in cells)
    assert (figures["cells"], figures["full_tried"]) == (3, full)
    for name, space in bench_tuning.RULES.items():
        tried = [{cell.plan, *cell.spaces[space]} for cell in cells]
        best = [
            min(map(seconds_of, cell.spaces[TuningSpace.FULL])) / min(map(seconds_of, own))
            for cell, own in zip(cells, tried, strict=True)
        ]
        assert figures[f"speed_{name}"] == pytest.approx(sum(best) / 3)
        assert figures[f"speed_{name}_worst"] == pytest.approx(min(best))
        assert figures[f"time_{name}"] == pytest.approx(sum(map(len, tried)) / full)
        assert figures[f"plans_{name}"] == pytest.approx(sum(map(len, tried)) / full)
    assert figures["pruned_speed"] == min(figures["speed_crius"], figures["speed_arena"])
    assert figures["pruned_time"] == max(figures["time_crius"], figures["time_arena"])
    assert len(report.table) == 9


def test_a_search_takes_the_fastest_trial_and_counts_the_failed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (cell,) = list_cells(SIZE, 4, [2], 16, 4, JAX)
    plans = cell.spaces[TuningSpace.FULL]
    trials = [
        {"plan": json.loads(plan.to_json()), "iteration_s": seconds, "problem": problem}
        for plan, seconds, problem in [
            (plans[0], 2.0, ""),
            (plans[1], float("inf"), "no memory"),
            (plans[2], 1.0, ""),
        ]
    ]
    bench = Workbench(size=SIZE, batch=16, devices=4)
    answer = {"trials": trials, "spent_s": 9.0}
    monkeypatch.setattr(Workbench, "_run", lambda _self, _task: answer)
    found = bench.search_space(cell, TuningSpace.FULL)
    assert found == SpaceSearch(winner=plans[2], tried=3, failed=1, spent_s=9.0)
    answer["trials"] = trials[1:2]
    with pytest.raises(SearchFailed, match="no plan of 1 runs: no memory"):
        bench.search_space(cell, TuningSpace.FULL)
