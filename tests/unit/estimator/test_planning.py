"""Worked examples of the papers' planning rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tessera.estimator.planning.assembly import (
    DATA,
    TENSOR,
    ProfiledStages,
    assemble_plan,
    assembled_plan,
    joint_seconds,
    pure_candidates,
)
from tessera.estimator.planning.options import NoPlan, options_of, stage_depths
from tessera.estimator.planning.pareto import find_frontier, proxy_of, thin_plans
from tessera.estimator.planning.search import (
    PlanSearchResult,
    best_plan,
    best_plans,
    latency_of,
    plan_of,
)
from tessera.estimator.planning.stages import (
    Stages,
    layer_shares,
    least_cut,
)
from tessera.estimator.planning.tuning import (
    Mismatch,
    SearchSpace,
    arena_rules,
    crius_halves,
    proxy_alone,
    whole_space,
)
from tessera.estimator.plans import Training
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import Schedule
from tests.support.estimates import FlatNetwork
from tests.support.planning import every_candidate, random_costs

FIGURE_7 = np.array([1.0, 3.0, 4.0, 2.0, 2.0, 4.0])
"""FLOPs in sixteenths: of 8 GPUs the first operator gets 0.5, the second 1.5 (Crius, section 4.2)."""


def row_of(space: SearchSpace, start: int, end: int, dp: int, tp: int) -> int:
    c = space.candidates
    at = (c.start == start) & (c.end == end) & (c.dp == dp) & (c.tp == tp)
    return int(np.flatnonzero(at)[0])


def rows_of(space: SearchSpace, *stages: tuple[int, int, int, int]) -> list[int]:
    return [row_of(space, *stage) for stage in stages]


def shapes_of_stage(space: SearchSpace, start: int, end: int) -> set[tuple[int, int]]:
    c, at = space.candidates, space.options.source
    here = at[(c.start[at] == start) & (c.end[at] == end)]
    return {(int(c.dp[i]), int(c.tp[i])) for i in here}


def a_space(layers: int = 4, gpus: int = 8, stages: int = 2) -> SearchSpace:
    return whole_space(every_candidate(layers, gpus), gpus, stages)


def test_layers_get_gpus_in_proportion_to_their_load() -> None:
    assert layer_shares(FIGURE_7, 8).tolist() == [0.5, 1.5, 2.0, 1.0, 1.0, 2.0]


def test_a_model_is_cut_at_the_least_traffic() -> None:
    boundary = np.array([9.0, 2.0, 1.0, 8.0, 3.0, 0.0])
    cut = least_cut(FIGURE_7, boundary, gpus=8, stages=4)
    assert cut.ends == (2, 3, 5, 6)
    assert cut.gpus == (2, 2, 2, 2)
    assert cut.bias == 0.0


def test_a_cheap_cut_far_from_powers_of_two_is_not_made() -> None:
    # a cut after layer 4 gives 5 and 3 of 8 GPUs
    boundary = np.array([9.0, 9.0, 9.0, 1.0, 9.0, 0.0])
    assert least_cut(FIGURE_7, boundary, gpus=8, stages=2).ends == (4, 6)  # nearly 4 and 4
    uneven = np.array([1.0, 1.0, 1.0, 5.0])
    assert least_cut(uneven, np.array([1.0, 9.0, 9.0, 0.0]), gpus=8, stages=2).ends == (3, 4)


def test_sums_never_near_powers_of_two_are_taken_as_near_as_possible() -> None:
    flops = np.array([7.0, 1.0])  # 5.25 and 0.75 of 6 GPUs; possible: 4 and 2, 2 and 4
    cut = least_cut(flops, np.ones(2), gpus=6, stages=2)
    assert cut.gpus == (4, 2)


def test_equally_cheap_cuts_are_decided_by_the_least_bias() -> None:
    cut = least_cut(np.ones(8), np.ones(8), gpus=4, stages=2)
    assert cut.ends == (4, 8)


@pytest.mark.parametrize(("gpus", "stages"), [(2, 3), (8, 5)])
def test_more_stages_than_gpus_or_layers_are_refused(gpus: int, stages: int) -> None:
    with pytest.raises(NoPlan, match=r"no plan (has|with)"):
        least_cut(np.ones(4), np.ones(4), gpus, stages)


@pytest.mark.parametrize("load", [np.zeros(3), np.array([1.0, np.nan])])
def test_a_load_of_zero_is_refused(load: Floats) -> None:
    with pytest.raises(NoPlan, match="load"):
        least_cut(load, np.ones(3), 2, 1)


def test_the_proxy_has_the_least_bias_and_then_the_least_load() -> None:
    assert proxy_of(np.array([0.5, 0.1, 0.1, 0.3]), np.array([1.0, 9.0, 8.0, 1.0])) == 2


def test_the_more_loaded_of_the_two_most_similar_partitions_is_dropped() -> None:
    ends = np.array([[2, 8], [3, 8], [7, 8]])
    assert thin_plans(ends, np.array([5.0, 6.0, 9.0]), limit=2, kept=2).tolist() == [0, 2]
    assert thin_plans(ends, np.array([6.0, 5.0, 9.0]), limit=2, kept=2).tolist() == [1, 2]


def test_the_proxy_is_kept_although_its_load_is_the_highest() -> None:
    ends = np.array([[2, 8], [3, 8], [7, 8]])
    assert thin_plans(ends, np.array([9.0, 6.0, 5.0]), limit=2, kept=0).tolist() == [0, 2]


def test_a_long_frontier_is_cut_to_the_limit_and_keeps_its_proxy() -> None:
    rng = np.random.default_rng(5)
    candidates = every_candidate(8, 8)
    comm, load = rng.uniform(0, 1, len(candidates)), rng.uniform(0.5, 2, 8)
    whole = find_frontier(options_of(candidates), load, comm, 8, 4, 16, limit=1000)
    few = find_frontier(options_of(candidates), load, comm, 8, 4, 16, limit=3)
    assert len(few.plans) == 3 < whole.found == few.found
    assert few.proxy == whole.proxy == few.plans[0]
    assert set(few.plans) < set(whole.plans)


def test_a_shape_with_more_communication_is_used_only_if_the_cheapest_does_not_fit() -> None:
    candidates = every_candidate(1, 2)  # 1x1, 1x2 and 2x1
    comm = np.where(candidates.dp == 2, 5.0, 1.0)
    fits = np.full(len(candidates), 9, dtype=np.int64)
    free = find_frontier(options_of(candidates, fits), np.ones(1), comm, 2, 1, 16)
    assert candidates.tp[free.proxy.rows[0]] == 2
    tight = np.where(candidates.tp == 2, 0, fits)
    assert (
        candidates.dp[
            find_frontier(options_of(candidates, tight), np.ones(1), comm, 2, 1, 16).proxy.rows[0]
        ]
        == 2
    )


def test_the_best_plans_of_several_degrees_are_the_best_of_each_and_omit_impossible_ones() -> None:
    costs = random_costs(every_candidate(4, 8), np.random.default_rng(3))
    option, latency = options_of(costs.candidates), latency_of(costs, 16)
    plans = best_plans(option, latency, 8, [1, 2, 3, 4, 5, 8])
    assert sorted(plans) == [1, 2, 3, 4]
    for stages, plan in plans.items():
        assert plan == best_plan(option, latency, 8, stages)


def test_a_plan_names_its_stages_time_and_memory() -> None:
    costs = random_costs(every_candidate(3, 4), np.random.default_rng(3))
    training = Training(global_batch=32, micro_batches=8)
    found = best_plan(options_of(costs.candidates), latency_of(costs, 8), 4, 2)
    plan = plan_of(found, costs, training)
    assert plan.gpus == 4
    assert plan.stages[0].end == plan.stages[1].start
    assert plan.iter_time_s == found.latency_s
    fullest = costs.flight_bytes[found.rows[0]] * 2 + costs.state_bytes[found.rows[0]]
    assert plan.memory_bytes[0] > fullest


def test_1f1b_allows_late_stages_that_do_not_fit_under_gpipe() -> None:
    costs = random_costs(every_candidate(2, 2), np.random.default_rng(1))
    one_by_one = stage_depths(costs, 14e9, 8, Schedule.ONE_F_ONE_B)
    at_once = stage_depths(costs, 14e9, 8, Schedule.GPIPE)
    assert ((one_by_one > 0) & (at_once == 0)).any()
    assert (one_by_one >= at_once).all()


def join_seconds(first: Sequence[int], second: Sequence[int]) -> float:
    degrees = np.array([[first, first], [second, second]])
    network = FlatNetwork(inside_bytes_per_s=1e9, across_bytes_per_s=1e9)
    return float(joint_seconds(np.array([8e9]), degrees, network, gpus_per_node=16)[0, 0, 0])


def test_data_parallel_stages_are_joined_by_sends_and_tensor_parallel_ones_gather_too() -> None:
    assert join_seconds((4, 1), (4, 1)) == pytest.approx(2 * 2.0)  # a quarter each way
    gather = 8.0 * 3 / 4
    assert join_seconds((1, 4), (1, 4)) == pytest.approx(2 * (2.0 + gather))
    assert join_seconds((4, 1), (1, 4)) == pytest.approx(2 * 2.0 + gather)
    assert join_seconds((2, 2), (2, 2)) == pytest.approx(2 * (2.0 + 4.0 / 2))


def test_assembly_rejects_a_faster_stage_if_joining_it_costs_more() -> None:
    join = np.zeros((1, 2, 2))
    join[0, DATA, TENSOR] = join[0, TENSOR, DATA] = 10.0
    busy = np.array([[1.0, 5.0], [2.0, 1.9]])
    profiled = ProfiledStages(busy_s=busy, join_s=join, once_s=np.zeros((2, 2)))
    plan = assemble_plan(profiled, micro_batches=4)
    assert plan.ways == (DATA, DATA)
    assert plan.latency_s == pytest.approx(3.0 + 3 * 2.0)
    free = ProfiledStages(busy_s=busy, join_s=np.zeros((1, 2, 2)), once_s=np.zeros((2, 2)))
    assert assemble_plan(free, micro_batches=4).ways == (DATA, TENSOR)


def test_crius_estimate_mixes_data_and_tensor_parallel_stages_that_fit() -> None:
    costs = random_costs(every_candidate(4, 8), np.random.default_rng(4))
    stages = Stages(ends=(2, 4), gpus=(4, 4), bias=0.0)
    fits = np.full(len(costs.candidates), 9, dtype=np.int64)
    network = FlatNetwork(inside_bytes_per_s=1e9)

    def estimated(depth: Ints) -> PlanSearchResult:
        return assembled_plan(costs, depth, stages, np.full(4, 1e8), network, 8, 16)

    rows = pure_candidates(costs.candidates, stages)
    assert costs.candidates.dp[rows].tolist() == [[4, 1], [4, 1]]
    free = estimated(fits)
    assert [r in rows[s] for s, r in enumerate(free.rows)] == [True, True]
    tight = fits.copy()
    tight[free.rows[0]] = 1  # fits only as a last stage, but is the first of two
    other = estimated(tight)
    assert other.rows[0] == rows[0].sum() - free.rows[0]
    assert other.latency_s >= free.latency_s
    tight[other.rows[0]] = 0
    with pytest.raises(NoPlan, match="stage 0"):
        estimated(tight)


def test_crius_tunes_the_half_of_the_shapes_up_to_the_half_hybrid() -> None:
    space = a_space(layers=2, gpus=8)
    halved = crius_halves(space, rows_of(space, (0, 1, 4, 1), (1, 2, 1, 4)))
    assert shapes_of_stage(halved, 0, 1) == {(4, 1), (2, 2)}
    assert shapes_of_stage(halved, 1, 2) == {(1, 4), (2, 2)}
    assert halved.count == 4


def test_odd_powers_have_a_half_hybrid_on_both_sides() -> None:
    space = a_space(layers=2, gpus=8, stages=1)
    assert shapes_of_stage(crius_halves(space, rows_of(space, (0, 2, 8, 1))), 0, 2) == {
        (8, 1),
        (4, 2),
    }
    assert shapes_of_stage(crius_halves(space, rows_of(space, (0, 2, 1, 8))), 0, 2) == {
        (1, 8),
        (2, 4),
    }


def test_stages_of_the_frontier_keep_their_shapes_and_others_their_choice() -> None:
    space, load = a_space(), np.array([1.0, 1.0, 1.0, 1.1])
    front = [rows_of(space, (0, 2, 4, 1), (2, 4, 2, 2)), rows_of(space, (0, 3, 2, 2), (3, 4, 4, 1))]
    left = arena_rules(space, front, load)
    assert shapes_of_stage(left, 0, 2) == {(4, 1)}
    assert shapes_of_stage(left, 2, 4) == {(2, 2)}
    assert len(shapes_of_stage(left, 1, 3)) > 1
    assert all(left.holds(rows) for rows in front)
    assert left.count < space.count


def test_plans_more_imbalanced_than_the_whole_frontier_are_pruned() -> None:
    space, load = a_space(), np.ones(4)
    front = [rows_of(space, (0, 2, 4, 1), (2, 4, 4, 1))]
    worse = rows_of(space, (0, 1, 4, 1), (1, 4, 4, 1))
    assert not arena_rules(space, front, load).holds(worse)
    assert arena_rules(space, front, load, slack=1.5).holds(worse)


def test_a_space_of_only_the_proxy_has_one_plan() -> None:
    space = a_space()
    proxy = rows_of(space, (0, 2, 4, 1), (2, 4, 4, 1))
    alone = proxy_alone(space, proxy)
    assert list(alone.rows()) == [tuple(proxy)]
    assert alone.count == 1


def test_a_plan_of_other_stages_cannot_guide_a_space() -> None:
    space = a_space()
    alone = proxy_alone(space, rows_of(space, (0, 2, 4, 1), (2, 4, 4, 1)))
    with pytest.raises(Mismatch, match="not in the space"):
        crius_halves(alone, rows_of(space, (0, 1, 4, 1), (1, 4, 4, 1)))


def test_a_space_contains_no_plan_that_skips_layers_or_leaves_gpus_unused() -> None:
    space = a_space()
    assert not space.holds(rows_of(space, (0, 2, 4, 1), (3, 4, 4, 1)))
    assert not space.holds(rows_of(space, (0, 2, 2, 1), (2, 4, 4, 1)))
    assert not space.holds(rows_of(space, (0, 4, 8, 1)))
