"""The plans that programs try at launch: those of the spaces of papers, best estimate first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tessera.estimator import tuning_plans
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.cells import Setting, execution_plan_of, plan_cells
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.models import known_models
from tessera.estimator.plan_search import PlanSearch
from tessera.estimator.plans import shape_of
from tessera.estimator.pricing.price import price_plan
from tessera.estimator.tuning_plans import list_tuning_plans, record_tunings
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, Schedule, join_chunks
from tessera.formulation.job.launch import TuningSpace
from tessera.formulation.job.runtimes import ALPA, COMMAND, MEGATRON, RUNTIMES, TORCHRUN
from tessera.formulation.job.techniques import PlanLimits

WORKLOADS = (
    Workload(model="bert", params="1.3B", global_batch=64),
    Workload(model="moe", params="1.3B", global_batch=64),
    Workload(model="wide_resnet", params="1B", global_batch=64),
)
EVERY = 10**6


@cache
def an_estimator() -> Estimator:
    return Estimator(catalogue_of(), known_models(WORKLOADS, ()))


@cache
def plans_of(workload: Workload, gpus: int) -> tuple[tuple[Setting, ExecutionPlan], ...]:
    """Return the plans of a workload on a40s without chunks, by pipeline degree."""
    estimator = an_estimator()
    shape = shape_of(gpus, estimator.hardware["a40"].gpus_per_node)
    setting = estimator.setting(workload, "a40", shape)
    plans = plan_cells(setting).values()
    return tuple((setting, execution_plan_of(setting, plan)) for plan in plans)


def every_plan() -> Iterator[tuple[Setting, ExecutionPlan]]:
    for workload, gpus in product(WORKLOADS, (4, 8)):
        yield from plans_of(workload, gpus)


@pytest.mark.full
@pytest.mark.parametrize("space", TuningSpace)
def test_plans_keep_all_but_the_division_fit_into_memory_and_are_ordered(
    space: TuningSpace,
) -> None:
    for setting, plan in every_plan():
        found = list_tuning_plans(setting, plan, COMMAND, space)
        assert found is not None
        assert found.plans
        assert all(replace(other, stages=plan.stages) == plan for other in found.plans)
        assert {other.pipeline_degree for other in found.plans} == {plan.pipeline_degree}
        prices = [price_plan(setting, other) for other in found.plans]
        assert all(price.overflow is None for price in prices)
        times = [price.iter_time_s for price in prices]
        assert times == sorted(times)
        assert found.space_plans <= found.whole_plans


@pytest.mark.full
def test_every_space_is_within_the_full_one_and_the_own_plan_is_in_halves() -> None:
    for setting, plan in every_plan():
        whole = list_tuning_plans(setting, plan, COMMAND, TuningSpace.FULL)
        assert whole is not None
        if whole.whole_plans > 400:
            continue
        whole = list_tuning_plans(setting, plan, COMMAND, TuningSpace.FULL, most=EVERY)
        assert whole is not None
        for space in (TuningSpace.HALVES, TuningSpace.ARENA):
            part = list_tuning_plans(setting, plan, COMMAND, space, most=EVERY)
            assert part is not None
            assert set(part.plans) <= set(whole.plans)
            assert part.whole_plans == whole.space_plans
            assert (space is TuningSpace.ARENA) or (plan in part.plans)


@pytest.mark.full
def test_the_list_is_the_start_of_the_whole_space_by_estimates() -> None:
    for setting, plan in every_plan():
        few = list_tuning_plans(setting, plan, COMMAND, TuningSpace.FULL, most=5)
        many = list_tuning_plans(setting, plan, COMMAND, TuningSpace.FULL, most=100)
        assert few is not None
        assert many is not None
        assert few.space_plans == many.space_plans
        best = price_plan(setting, many.plans[0]).iter_time_s
        assert price_plan(setting, few.plans[0]).iter_time_s == pytest.approx(best, rel=0.02)


def test_the_same_input_gives_the_same_list() -> None:
    setting, plan = plans_of(WORKLOADS[0], 4)[0]
    for space in TuningSpace:
        first, second = (list_tuning_plans(setting, plan, COMMAND, space) for _ in range(2))
        assert first == second


def test_plans_that_a_runtime_refuses_or_that_ran_out_of_memory_are_left_out() -> None:
    setting, plan = plans_of(WORKLOADS[0], 8)[1]
    all_of_them = list_tuning_plans(setting, plan, COMMAND, TuningSpace.FULL, most=EVERY)
    runs = list_tuning_plans(setting, plan, MEGATRON, TuningSpace.FULL, most=EVERY)
    assert all_of_them is not None
    assert runs is not None
    refuse_plan = RUNTIMES[MEGATRON].refuse_plan
    assert runs.plans == tuple(p for p in all_of_them.plans if not refuse_plan(p))
    gone = all_of_them.plans[0].digest
    left = list_tuning_plans(setting, plan, COMMAND, TuningSpace.FULL, {gone}, EVERY)
    assert left is not None
    assert left.plans == all_of_them.plans[1:]
    assert left.space_plans == all_of_them.space_plans


def test_a_plan_that_cuts_between_coarse_layers_has_a_space_with_its_own_cuts() -> None:
    setting, _ = plans_of(WORKLOADS[0], 8)[0]
    prices = PlanSearch(setting, PlanLimits(runtime=ALPA)).best_by_degree()
    assert {1, 2, 4, 8} <= set(prices)
    for plan in (price.plan for price in prices.values()):
        found = list_tuning_plans(setting, plan, COMMAND, TuningSpace.HALVES)
        assert found is not None
        assert plan in found.plans


def test_a_plan_without_a_space_has_none() -> None:
    setting, plan = plans_of(WORKLOADS[0], 8)[1]
    assert plan.pipeline_degree == 2
    context = replace(plan.stages[1], dp=1, tp=1, cp=plan.stages[1].gpus)
    wide = replace(plan, stages=(plan.stages[0], context))
    assert list_tuning_plans(setting, wide, COMMAND, TuningSpace.FULL) is None


@pytest.mark.parametrize("space", TuningSpace)
def test_around_a_plan_with_chunks_those_without_and_itself_are_tried(space: TuningSpace) -> None:
    setting, plan = plans_of(WORKLOADS[0], 8)[1]
    bounds = zip(plan.stages * 2, (0, 5, 10, 15), (5, 10, 15, plan.layers), strict=True)
    chunks = replace(
        plan,
        stages=tuple(replace(s, start=start, end=end) for s, start, end in bounds),
        chunks=2,
        schedule=Schedule.INTERLEAVED,
    )
    tuning = list_tuning_plans(setting, chunks, COMMAND, space, most=EVERY)
    bare = list_tuning_plans(setting, join_chunks(chunks), COMMAND, space, most=EVERY)
    assert tuning is not None
    assert bare is not None
    assert set(tuning.plans) == {*bare.plans, chunks}
    assert tuning.space_plans == bare.space_plans + 1
    times_s = [price_plan(setting, plan).iter_time_s for plan in tuning.plans]
    assert times_s == sorted(times_s)
    others_only = list_tuning_plans(setting, chunks, COMMAND, space, {chunks.digest}, EVERY)
    assert others_only is not None
    assert others_only.plans == bare.plans


def test_records_are_made_of_runtimes_that_run_the_plan_and_spaces_with_another_one() -> None:
    estimator = an_estimator()
    pairs = list(product((COMMAND, TORCHRUN), TuningSpace))
    for workload, gpus in product(WORKLOADS, (4, 8)):
        for cell in estimator.cells(workload, "a40", gpus, nodes=2):
            plan, records = cell.record.plan, record_tunings(estimator, cell.record, pairs)
            if plan is None:
                continue
            assert records or plan.chunks == 1
            assert all(set(record.plans) - {plan} for record in records)
            assert all(record.plan == plan for record in records)
            assert len({(record.runtime, record.space) for record in records}) == len(records)
            refused = RUNTIMES[TORCHRUN].refuse_plan(plan)
            assert not refused or {record.runtime for record in records} <= {COMMAND}


def test_a_space_far_larger_than_the_list_is_counted_as_it_is() -> None:
    setting, plan = plans_of(WORKLOADS[0], 8)[2]
    found = list_tuning_plans(setting, plan, COMMAND, TuningSpace.FULL)
    assert found is not None
    assert len(found.plans) == tuning_plans.MAX_TUNING_PLANS
    assert found.space_plans == found.whole_plans > 10_000
