"""Planners of Cells: complete plans that fit, follow the papers' rules and never beat the exact planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.benchmarks.estimator import planners
from tessera.benchmarks.estimator.speed import setting_of
from tessera.estimator.architectures.published import find_published
from tessera.estimator.cells import (
    MicroBatches,
    Planner,
    Setting,
    plan_cells,
)
from tessera.estimator.collectives import LinkNetwork
from tessera.estimator.hardware import A10, A40, A100, V100, Hardware
from tessera.estimator.memory import limit_bytes
from tessera.estimator.planning.assembly import pure_candidates
from tessera.estimator.planning.stages import Stages
from tessera.estimator.plans import Candidates, PricedPlan, Shape, Training
from tessera.estimator.rooflines import RooflineCompute
from tests.support.estimates import a_graph, a_layer

PAPERS = (Planner.ARENA, Planner.CRIUS)
KINDS = {kind.name: kind for kind in (A10, A40, A100, V100)}


def published_setting(model: str, params: str, batch: int, kind: str, gpus: int) -> Setting:
    return setting_of(find_published(model, params), batch, KINDS[kind], gpus)


def a_setting_on_8_gpus(*boundaries: float, flops: tuple[float, ...] = (1e12,) * 8) -> Setting:
    """Return a setting of layers with these boundary bytes, on 8 GPUs of one node."""
    layers = [a_layer(boundary=b, flops=f) for b, f in zip(boundaries, flops, strict=True)]
    hardware: Hardware = A40
    shape = Shape(nodes=1, gpus_per_node=8)
    return Setting(
        graph=a_graph(*layers),
        training=Training(global_batch=256),
        hardware=hardware,
        shape=shape,
        compute=RooflineCompute(hardware=hardware),
        network=LinkNetwork(hardware=hardware, shape=shape),
    )


def stage_ends(plan: PricedPlan) -> list[int]:
    return [stage.end for stage in plan.stages]


@pytest.mark.full
@pytest.mark.parametrize("planner", Planner)
@pytest.mark.parametrize("rule", [None, MicroBatches.FOUR_STAGES])
@pytest.mark.parametrize(
    ("model", "params", "batch", "kind", "gpus"),
    [
        ("bert", "6.7B", 256, "a10", 16),
        ("bert", "1.3B", 128, "a100", 8),
        ("moe", "2.4B", 1024, "v100", 4),
        ("moe", "10B", 256, "a40", 32),
        ("wide_resnet", "4B", 1024, "a100", 8),
    ],
)
def test_a_plan_has_all_layers_and_gpus_fits_and_is_no_faster_than_the_exact_one(
    planner: Planner,
    rule: MicroBatches | None,
    model: str,
    params: str,
    batch: int,
    kind: str,
    gpus: int,
) -> None:
    setting = published_setting(model, params, batch, kind, gpus)
    exact, plans = plan_cells(setting, None, rule), plan_cells(setting, None, rule, planner)
    layers = len(setting.graph)
    assert plans
    assert plans.keys() <= exact.keys()
    for degree, plan in plans.items():
        assert len(plan.stages) == degree
        assert [s.start for s in plan.stages] == [0, *stage_ends(plan)[:-1]]
        assert stage_ends(plan)[-1] == layers
        assert plan.gpus == gpus
        assert max(plan.memory_bytes) <= limit_bytes(setting.hardware.memory_bytes)
        assert plan.iter_time_s >= exact[degree].iter_time_s * (1 - 1e-9)
        assert plan.micro_batches == exact[degree].micro_batches


@pytest.mark.parametrize("planner", Planner)
def test_the_same_setting_has_the_same_plans(planner: Planner) -> None:
    first, second = (
        plan_cells(published_setting("moe", "2.4B", 256, "a40", 16), planner=planner)
        for _ in range(2)
    )
    assert first == second


def test_the_exact_search_is_the_default_planner() -> None:
    setting = published_setting("wide_resnet", "2B", 256, "a100", 16)
    assert plan_cells(setting) == plan_cells(setting, planner=Planner.EXACT)
    for planner in PAPERS:
        other = plan_cells(setting, planner=planner)
        assert sum(plan.iter_time_s for plan in other.values()) > 1.1 * sum(
            plan.iter_time_s for plan in plan_cells(setting).values()
        )


def test_crius_cuts_at_the_least_traffic() -> None:
    little, much = 1e4, 1e7
    after_4_and_6 = a_setting_on_8_gpus(much, much, much, little, much, little, much, 0.0)
    after_2_and_6 = a_setting_on_8_gpus(much, little, much, much, much, little, much, 0.0)
    for setting, cuts in ((after_4_and_6, [4, 6, 8]), (after_2_and_6, [2, 6, 8])):
        assert stage_ends(plan_cells(setting, [3], planner=Planner.CRIUS)[3]) == cuts


def test_crius_stages_use_only_data_or_only_tensor_parallelism() -> None:
    plans = plan_cells(published_setting("bert", "6.7B", 256, "a10", 16), planner=Planner.CRIUS)
    every = [stage for plan in plans.values() for stage in plan.stages]
    assert all(1 in (stage.dp, stage.tp) for stage in every)
    assert any(stage.dp > 1 for stage in every)
    assert any(stage.tp > 1 for stage in every)


def test_arena_balances_load_whatever_the_traffic() -> None:
    much = 1e7
    flops = (5e12, *[1e12] * 3, *[2e12] * 4)  # 16e12 in all, half of it up to the fourth layer
    setting = a_setting_on_8_gpus(much, 1e4, much, much, much, much, much, 0.0, flops=flops)
    plan = plan_cells(setting, [2], planner=Planner.ARENA)[2]
    assert stage_ends(plan) == [4, 8]
    assert [stage.gpus for stage in plan.stages] == [4, 4]


def test_crius_cuts_without_regard_to_memory_and_arena_within_it() -> None:
    setting = published_setting("moe", "2.4B", 1024, "v100", 2)
    assert 2 in plan_cells(setting)
    assert 2 in plan_cells(setting, planner=Planner.ARENA)
    assert 2 not in plan_cells(setting, planner=Planner.CRIUS)
    roomy = replace(setting, hardware=replace(setting.hardware, memory_bytes=80 * 2**30))
    assert 2 in plan_cells(roomy, planner=Planner.CRIUS)


@pytest.mark.parametrize("planner", PAPERS)
def test_experts_are_divided_if_they_would_not_fit_otherwise(planner: Planner) -> None:
    plans = plan_cells(published_setting("moe", "27B", 512, "a40", 16), planner=planner)
    assert any(stage.ep > 1 for plan in plans.values() for stage in plan.stages)


def test_the_cheapest_expert_degree_is_chosen() -> None:
    degrees = np.array([1, 2, 4], dtype=np.int64)
    same = np.ones(3, dtype=np.int64)
    every = Candidates(
        start=0 * same, end=same, dp=4 * same, tp=same, ep=degrees, sp=np.zeros(3, dtype=np.bool_)
    )
    one = Stages(ends=(1,), gpus=(4,), bias=0.0)
    assert pure_candidates(every, one).tolist() == [[0, -1]]
    assert pure_candidates(every, one, np.array([[3.0, 1.0, 2.0]])).tolist() == [[1, -1]]
    assert pure_candidates(every, one, np.array([[3.0, np.inf, 2.0]])).tolist() == [[2, -1]]
    assert pure_candidates(every, one, np.full((1, 3), np.inf)).tolist() == [[-1, -1]]


@pytest.mark.parametrize("planner", Planner)
def test_more_stages_than_layers_or_gpus_have_no_plan(planner: Planner) -> None:
    assert list(plan_cells(a_setting_on_8_gpus(*[1e6] * 8), [2, 9], planner=planner)) == [2]


def test_a_planners_share_is_the_exact_time_divided_by_the_planners_time() -> None:
    def plan(seconds: float) -> PricedPlan:
        return PricedPlan(stages=(), micro_batches=1, iter_time_s=seconds, memory_bytes=())

    exact = {1: plan(3.0), 2: plan(2.0), 4: plan(5.0)}
    verdict = planners.judge_planner(exact, {1: plan(4.0), 4: plan(5.0)})
    assert (verdict.shares, verdict.missed, verdict.best) == ((0.75, 1.0), 1, 0.5)
    assert planners.judge_planner(exact, {}).best is None


def test_settings_are_drawn_by_the_seeds_without_duplicates() -> None:
    first = planners.draw_settings([0, 1])
    assert (
        len({(m.model, m.params, batch, kind.name, gpus) for m, batch, kind, gpus in first}) == 100
    )
    assert planners.draw_settings([0, 1]) == first
    assert planners.draw_settings([2]) != first


def test_the_benchmark_judges_the_planners_of_both_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [d for d in planners.draw_settings([0]) if d[3] <= 8][:4]
    monkeypatch.setattr(planners, "draw_settings", lambda seeds: settings)
    section = planners.run_planner_section(None, range(1))
    assert section.figures["planner_settings"] == len(section.rows) == 4
    for name in ("arena", "crius"):
        worst, mean = (section.figures[f"planner_share_{name}{x}"] for x in ("_worst", ""))
        assert 0 < worst <= mean <= 1 + 1e-9
