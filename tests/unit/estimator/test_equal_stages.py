"""Iteration times of a runtime that cuts models into stages with equal numbers of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.estimator.calibration import Subject
from tessera.estimator.cells import Runtime, Setting, plan_cells, search_plans
from tessera.estimator.costs import candidates_of
from tessera.estimator.equal_stages import EqualStages
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import A40
from tessera.estimator.pipeline import Overlap, Transfers
from tessera.estimator.planning.options import options_of
from tessera.estimator.planning.search import latency_of
from tessera.estimator.plans import Candidates, Shape, Training
from tessera.estimator.rooflines import RooflineCompute
from tessera.estimator.times import PARAMETERS, CellTimes, PlanChooser, TimeParts
from tessera.formulation.base.tables import Floats, Ints
from tests.support.estimates import FlatNetwork, a_graph, a_layer

GRAPH = a_graph(*[a_layer(weights=w) for w in (1e7, 1e7, 2e7, 2e7, 4e7, 4e7, 8e7, 8e7)])
DEGREES = [1, 2, 4, 8]
ONES = np.ones(len(PARAMETERS))


class BestPlan:
    """A runtime that chooses the best plan by its own search."""

    def candidates(self, setting: Setting) -> Candidates:
        """Return every stage, without sequence parallelism."""
        return candidates_of(setting.graph, setting.shape, sequence_parallel=False)

    def plans(
        self, parts: TimeParts, factors: Floats, degrees: Sequence[int]
    ) -> list[tuple[float, Ints]]:
        """Return at most one plan."""
        setting, costs = parts.setting, parts.at(factors)
        runtime, count = setting.runtime, setting.training.micro_batches
        latency = latency_of(costs, count, runtime.planned_as or runtime.overlap)
        best = search_plans(setting, costs, options_of(parts.candidates, parts.depth), degrees)
        if not best:
            return []
        rows = min((f.rows for f in best.values()), key=latency.of)
        return [(1.0, np.array(rows, dtype=np.int64))]


def a_subject(gpus: int = 8, batch: int = 256) -> Subject:
    return Subject(
        family="bert",
        gpu_type="a40",
        nodes=gpus // 2 or 1,
        gpus_per_node=min(gpus, 2),
        global_batch=batch,
        parameters=1e9,
    )


def a_setting(subject: Subject, graph: Graph = GRAPH, memory: int = 48_000_000_000) -> Setting:
    hardware = replace(A40, memory_bytes=memory)
    return Setting(
        graph=graph,
        training=Training(global_batch=subject.global_batch),
        hardware=hardware,
        shape=Shape(nodes=subject.nodes, gpus_per_node=subject.gpus_per_node),
        compute=RooflineCompute(hardware=hardware),
        network=FlatNetwork(latency_s=1e-4),
        runtime=Runtime(overlap=Overlap(transfers=Transfers.IN_LINE)),
    )


def cell_times(planner: PlanChooser | None = None, memory: int = 48_000_000_000) -> CellTimes:
    chooser = planner or BestPlan()
    return CellTimes(lambda s: a_setting(s, memory=memory), lambda _: DEGREES, chooser=chooser)


def plans_and_parts(
    planner: EqualStages, memory: int = 48_000_000_000
) -> list[tuple[float, Sequence[int], TimeParts]]:
    parts = cell_times(planner, memory).parts(a_subject())
    return [(share, rows.tolist(), parts) for share, rows in planner.plans(parts, ONES, DEGREES)]


def test_stages_cover_all_layers_in_order_on_equal_gpus() -> None:
    plans = plans_and_parts(EqualStages(softness=100.0))
    assert sorted(len(rows) for _, rows, _ in plans) == DEGREES
    assert sum(share for share, _, _ in plans) == pytest.approx(1.0)
    for _, rows, parts in plans:
        stages = parts.candidates
        assert [int(stages.start[r]) for r in rows] == [0, *(int(stages.end[r]) for r in rows[:-1])]
        assert int(stages.end[rows[-1]]) == len(GRAPH)
        assert {int(stages.gpus[r]) for r in rows} == {8 // len(rows)}


def test_the_slowest_stage_is_as_fast_as_in_the_best_equal_cut() -> None:
    planner = EqualStages(softness=100.0, sync_weight=0.0)
    (found,) = [(rows, parts) for _, rows, parts in plans_and_parts(planner) if len(rows) == 2]
    rows, parts = found
    busy_s, stages = parts.costs.busy_s, parts.candidates
    own = stages.gpus == 4
    best = min(
        max(
            busy_s[own & (stages.start == 0) & (stages.end == cut)].min(),
            busy_s[own & (stages.start == cut) & (stages.end == len(GRAPH))].min(),
        )
        for cut in range(1, len(GRAPH))
    )
    assert busy_s[rows].max() == pytest.approx(best)


def test_an_expensive_gradient_exchange_favours_pipelines() -> None:
    def stages(weight: float) -> float:
        return sum(
            share * len(rows) for share, rows, _ in plans_and_parts(EqualStages(sync_weight=weight))
        )

    assert stages(0.0) < stages(4.0) < stages(400.0)


def test_with_low_softness_the_degree_that_looks_best_is_chosen() -> None:
    ((share, rows, parts),) = plans_and_parts(EqualStages(softness=1e-6, sync_weight=0.0))
    assert share == 1.0
    cut = {d: p.iter_time_s for d, p in plan_cells(a_setting(a_subject()), DEGREES).items()}
    assert len(rows) == min(cut, key=cut.__getitem__) == 1
    assert len(parts.depth) > 0


@pytest.mark.parametrize("memory", [3_500_000_000, 5_000_000_000, 8_000_000_000])
def test_plans_fit_in_memory_at_their_place_in_the_pipeline(memory: int) -> None:
    roomy, tight = (
        plans_and_parts(EqualStages(softness=100.0), size) for size in (48_000_000_000, memory)
    )
    assert {len(rows) for _, rows, _ in tight} < {len(rows) for _, rows, _ in roomy}
    for _, rows, parts in tight:
        assert all(parts.depth[row] >= len(rows) - place for place, row in enumerate(rows))


def test_without_memory_there_is_no_time() -> None:
    values, gradients = cell_times(EqualStages(), memory=1_000_000_000).log_times(
        [a_subject()], np.zeros((1, len(PARAMETERS)))
    )
    assert np.isnan(values).all()
    assert np.isnan(gradients).all()


def test_by_default_the_time_is_that_of_the_best_plan() -> None:
    values, _ = cell_times().log_times([a_subject()], np.zeros((1, len(PARAMETERS))))
    best = min(p.iter_time_s for p in plan_cells(a_setting(a_subject()), DEGREES).values())
    assert math.exp(values[0]) == pytest.approx(best)


@pytest.mark.parametrize("planner", [BestPlan(), EqualStages(softness=1e-6)])
def test_gradients_match_finite_differences_of_the_times(planner: PlanChooser) -> None:
    model, at = cell_times(planner), np.zeros((1, len(PARAMETERS)))
    (value,), (gradient,) = model.log_times([a_subject()], at)
    assert 0.9 < gradient.sum() < 1.01  # below 1: no parameter scales the optimizer's update
    for i in range(len(PARAMETERS)):
        moved = at.copy()
        moved[0, i] = 1e-3
        (after,), _ = model.log_times([a_subject()], moved)
        assert after - value == pytest.approx(1e-3 * gradient[i], rel=0.1, abs=2e-5)


def test_parts_scale_the_costs_by_their_factors() -> None:
    parts = cell_times().parts(a_subject())
    costs = parts.at(ONES)
    assert costs.busy_s == pytest.approx(parts.costs.busy_s)
    slow = parts.at(3 * ONES)
    assert slow.busy_s == pytest.approx(3 * parts.costs.busy_s)
    assert slow.sync_s == pytest.approx(3 * parts.costs.sync_s)
