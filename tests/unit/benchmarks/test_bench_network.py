"""The judge of network plans: small cases in which every plan is tried, and what it reports."""

from __future__ import annotations

from functools import cache
from itertools import permutations, product

import numpy as np
import pytest

from tessera.benchmarks.network import micro, small
from tessera.benchmarks.network.optimum import (
    JudgedSpan,
    PlanSpace,
    dense_levels,
    space_of,
    weak_orders,
    without_inversion,
    works_of,
)
from tessera.formulation.answer.network.contention import Contention, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.solvers.network.fluid import flop_under_levels
from tests.support.laws import scaled


def jobs_on_two_links(*jobs: tuple[float, float, float, float]) -> Contention:
    """Return jobs (work, compute_s, start_s, comm_s) that each use one of two links of 1 byte a second."""
    count = len(jobs)
    work, compute_s, start_s, comm_s = map(np.array, zip(*jobs, strict=True))
    zero = np.zeros(count + 1, np.int64)
    return Contention(
        jobs=tuple(f"job-{i}" for i in range(count)),
        work_flop=work.astype(float),
        compute_s=compute_s.astype(float),
        start_s=start_s.astype(float),
        gpus=np.ones(count, np.int64),
        fixed_start=zero,
        fixed_link=np.zeros(0, np.int64),
        fixed_bytes=np.zeros(0),
        fixed_delay_s=np.zeros(count),
        bundle_start=np.arange(count + 1),
        bundle_bytes=comm_s.astype(float),
        bundle_messages=np.ones(count, np.int64),
        candidate_start=2 * np.arange(count + 1),
        candidate=np.tile([0, 1], count),
        path_start=np.arange(3),
        path_link=np.arange(2),
        path_delay_s=np.zeros(2),
        link_bytes_per_s=np.ones(2),
    )


@cache
def drawn_space(seed: int, number: int) -> PlanSpace:
    """Return all plans of a drawn case on a Clos network, which many tests only read."""
    return space_of(small.on_clos(small.draw_case(seed, number)))


def plan_of(chosen: Ints, level: Ints) -> NetworkPlan:
    order = np.argsort(-level, kind="stable")
    return NetworkPlan(
        chosen=chosen, priority=np.zeros(len(level)), order=order, level=level, levels=3
    )


EXAMPLE_1 = (10.0, 2.0, 2.0, 2.0), (5.0, 1.0, 1.0, 1.0)
"""Crux, example 1: 37.5 % of 10 flop a second if the first job is first, 41.7 % if the second is."""


def test_two_jobs_on_two_links_are_best_apart_and_on_one_link_match_example_1() -> None:
    space = space_of(jobs_on_two_links(*EXAMPLE_1))
    path, at = space.best(space.within(3))
    assert sorted(space.chosen[path].tolist()) == [0, 1]
    assert space.work[path, at] == pytest.approx(10 / 4 + 5 / 2, rel=1e-3)
    together = space.path(np.array([1, 1]))
    first, second = (space.assignment(np.array(level)) for level in ([1, 0], [0, 1]))
    assert space.work[together, first] == pytest.approx(10 / 4 + 5 / 4, rel=2e-3)
    assert space.work[together, second] == pytest.approx(10 / 6 + 5 / 2, rel=2e-3)


def test_jobs_with_equal_traffic_but_different_work_are_distinguished() -> None:
    space = space_of(jobs_on_two_links((10.0, 2.0, 2.0, 1.0), (50.0, 1.0, 1.0, 1.0)))
    apart = space.path(np.array([1, 0]))
    assert np.allclose(space.work[apart], 10 / 3 + 50 / 2, rtol=2e-3)


def test_of_three_jobs_on_two_links_the_one_that_gains_most_runs_alone() -> None:
    # the third job sends all the time, so it never shares its link with the other two
    c = jobs_on_two_links(*EXAMPLE_1, (100.0, 1.0, 0.5, 1.0))
    space = space_of(c)
    path, _ = space.best(space.within(3))
    one, other, third = space.chosen[path].tolist()
    assert one == other != third


def test_results_of_separate_parts_match_a_joint_run_of_all_jobs() -> None:
    space = drawn_space(7, 3)
    c, rng = space.contention, np.random.default_rng(0)
    for path in rng.choice(len(space.chosen), 6, replace=False).tolist():
        demand = demand_of(c, space.chosen[path])
        whole = flop_under_levels(
            demand, space.level, horizon_s=space.span.horizon_s, warm_s=space.span.warm_s
        )
        assert np.allclose(space.work[path], whole, rtol=1e-9)


def test_no_randomly_tried_plan_does_more_work_than_the_best() -> None:
    space = drawn_space(7, 3)
    c = space.contention
    most = space.work[space.best(space.within(3))]
    rng = np.random.default_rng(1)
    found = []
    for _ in range(20):
        plan = plan_of(rng.integers(2, size=5), rng.integers(3, size=5))
        demand = demand_of(c, plan.chosen)
        span = space.span
        played = flop_under_levels(
            demand, plan.level[None], horizon_s=span.horizon_s, warm_s=span.warm_s
        )
        assert space.of(plan) == pytest.approx(float(played[0]), rel=1e-9)
        found.append(space.of(plan) / most)
    assert max(found) <= 1.0
    assert min(found) < 0.95


def test_the_judge_gives_a_planted_optimum_1_and_every_other_plan_less() -> None:
    judge = micro.CaseJudge(drawn_space(7, 3), 3)
    space = judge.space
    best = plan_of(space.chosen[judge.path], space.level[judge.assignment])
    # the same plan with the switches exchanged
    mirrored = plan_of(1 - best.chosen, 2 * best.level + 1)
    worst_path = int(space.work[:, judge.few].max(axis=1).argmin())
    bad = plan_of(space.chosen[worst_path], np.zeros(5, np.int64))
    shares = judge.whole({"best": best, "mirrored": mirrored, "bad": bad})
    assert shares["best"] == 1.0
    assert shares["mirrored"] == pytest.approx(1.0, abs=1e-9)
    assert shares["bad"] < 0.97
    everything = [*judge.priorities().values(), *judge.orders().values()]
    assert max([*everything, *judge.compression().values()]) <= 1 + 1e-9


def test_with_one_level_only_paths_can_be_chosen() -> None:
    judge = micro.CaseJudge(drawn_space(7, 3), 1)
    for shares in (judge.priorities(), judge.compression(), judge.compression_on(0)):
        assert set(shares.values()) == {1.0}


def test_a_network_plan_outside_the_enumerated_ones_is_refused() -> None:
    space = space_of(jobs_on_two_links(*EXAMPLE_1))
    with pytest.raises(InvalidInput, match="not among those"):
        space.of(plan_of(np.array([0, 2]), np.array([1, 0])))
    with pytest.raises(InvalidInput, match="can be tried"):
        space_of(jobs_on_two_links(*[EXAMPLE_1[0]] * 7))


def test_all_541_weak_orders_of_five_jobs_are_tried_once() -> None:
    rows = weak_orders(5)
    assert len(rows) == len(np.unique(rows, axis=0)) == 541
    assert {tuple(row) for row in permutations(range(5))} <= {tuple(row) for row in rows.tolist()}
    every = np.array(list(product(range(3), repeat=5)))
    assert {tuple(row) for row in dense_levels(every).tolist()} == {
        tuple(row) for row in rows[rows.max(axis=1) < 3].tolist()
    }
    assert dense_levels(np.array([[7, -2, 7, 30]])).tolist() == [[1, 0, 1, 2]]


def test_levels_may_invert_an_order_only_for_jobs_that_share_no_link() -> None:
    c = jobs_on_two_links(*EXAMPLE_1, EXAMPLE_1[0])
    demand = demand_of(c, np.array([0, 0, 1]))
    level = np.array([[1, 0, 2], [0, 1, 2], [0, 0, 0]])
    assert without_inversion(demand, np.array([0, 1, 2]), level).tolist() == [True, False, True]


def test_the_best_order_can_become_the_best_levels() -> None:
    for number in range(scaled(4)):
        judge = micro.CaseJudge(drawn_space(8, number), 3)
        order = judge.best_order(judge.path)
        allowed = judge.few & without_inversion(judge.demand, order, judge.space.level)
        work = judge.space.work[judge.path]
        assert work[allowed].max() == pytest.approx(judge.most, rel=1e-9)


def test_the_best_order_is_chosen_for_the_available_levels_not_for_one_level_per_job() -> None:
    c = jobs_on_two_links(*[EXAMPLE_1[0]] * 3)
    level = weak_orders(3)
    work = np.ones((1, len(level)))
    work[0, (level == [1, 0, 0]).all(axis=1)] = 5.0  # this order has only two levels
    work[0, (level == [0, 1, 2]).all(axis=1)] = 9.0
    work[0, (level == [2, 0, 1]).all(axis=1)] = 4.0
    space = PlanSpace(
        contention=c,
        chosen=np.zeros((1, 3), np.int64),
        level=level,
        work=work,
        span=JudgedSpan(horizon_s=1.0, warm_s=0.0),
        drift=0.0,
    )
    assert micro.CaseJudge(space, 2).best_order(0).tolist() == [0, 2, 1]


def test_doubling_the_window_hardly_changes_the_result() -> None:
    space = drawn_space(7, 3)
    c = space.contention
    assert space.drift <= 2e-3
    for path in (0, 5, 11):
        demand = demand_of(c, space.chosen[path])
        twice = JudgedSpan(horizon_s=2 * space.span.horizon_s, warm_s=2 * space.span.warm_s)
        changed = np.abs(works_of(demand, twice) / space.work[path] - 1)
        assert np.quantile(changed, 0.95) < 5e-3


def test_one_path_choice_loads_a_link_like_all_flows_over_one_switch() -> None:
    case = small.draw_case(3, 6)
    c = small.on_clos(case, 1)
    demand = demand_of(c, np.ones(5, np.int64))
    sent = demand.busy_s * c.link_bytes_per_s[demand.link]
    for job, what in enumerate(case.jobs):
        tors = {host * case.tors // case.hosts for host in case.placements[1][job]}
        crossing = sent[slice(*demand.link_start[job : job + 2])].max()
        assert crossing == pytest.approx(what.comm_s * case.cable_bytes_per_s)
        on_cables = c.path_link[
            slice(*c.path_start[c.candidate[2 * job] : c.candidate[2 * job] + 2])
        ]
        assert len(on_cables) == 2 * len(tors)
