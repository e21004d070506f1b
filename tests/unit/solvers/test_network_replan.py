"""Whole network plans, swaps and the fairness floor: small cases, compared with enumeration if possible."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network import trials
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.floor import apply_floor
from tessera.solvers.network.fluid import contending_groups, flop_under_levels, simulate_fluid
from tessera.solvers.network.paths import select_paths
from tessera.solvers.network.replan import (
    PlanningOptions,
    Variant,
    replan,
)
from tessera.solvers.network.swaps import (
    MAX_PLAYED_ITERATIONS,
    Moves,
    PlayWindow,
    by_level,
    change_levels,
    swap_orders,
)
from tessera.solvers.network.trials import contention_among, possible_groups, try_paths
from tests.support.contentions import a_contention
from tests.support.demands import a_contention as fixed_contention
from tests.support.networks import FluidJob, a_demand

WINDOW = PlayWindow(horizon_s=200.0)
PAPER = PlanningOptions(swap_jobs=0, margin=0.0)


def _distinct(order: Ints) -> Ints:
    level = np.empty(len(order), dtype=np.int64)
    level[order] = np.arange(len(order) - 1, -1, -1)
    return level


def _work(demand: LinkDemand, level: Ints) -> float:
    return float(flop_under_levels(demand, level[None], horizon_s=200.0)[0])


def _crowd() -> LinkDemand:
    """Return four jobs whose load on one link is 1.4."""
    return a_demand(
        FluidJob(work=40, compute_s=2, busy_s={0: 1.5}),
        FluidJob(work=30, compute_s=1, busy_s={0: 0.5}),
        FluidJob(work=20, compute_s=3, start_s=1, busy_s={0: 1}),
        FluidJob(work=1, compute_s=1, busy_s={0: 0.7}),
    )


def _shares(demand: LinkDemand, level: Ints) -> Floats:
    run = simulate_fluid(demand, level, horizon_s=400.0, warm_s=40.0)
    shares: Floats = run.iterations * demand.alone_s
    return shares


def test_jobs_form_a_group_only_through_links_they_can_saturate() -> None:
    demand = a_demand(
        FluidJob(busy_s={0: 1}),
        FluidJob(busy_s={1: 1, 2: 0.4}),
        FluidJob(busy_s={0: 2, 3: 1}),
        FluidJob(busy_s={2: 0.5, 4: 1}),
        FluidJob(),
    )
    assert [group.tolist() for group in contending_groups(demand)] == [[0, 2]]


def test_moves_lead_to_a_local_optimum() -> None:
    demand = _crowd()
    every = [np.array(p) for p in permutations(range(4))]
    worst = min(every, key=lambda p: _work(demand, _distinct(p)))
    found = {m: swap_orders(demand, worst, moves=m, window=WINDOW) for m in Moves}
    assert _work(demand, _distinct(found[Moves.INSERTION])) > _work(demand, _distinct(worst)) * 1.2
    now = found[Moves.ADJACENT]
    for at in range(3):
        other = now.copy()
        other[[at, at + 1]] = now[[at + 1, at]]
        assert _work(demand, _distinct(other)) <= _work(demand, _distinct(now)) * (1 + 1e-5)


def test_groups_that_are_too_large_and_jobs_of_other_groups_keep_their_places() -> None:
    demand = _crowd()
    worst = np.array([3, 2, 0, 1])
    assert swap_orders(demand, worst, most_jobs=3).tolist() == worst.tolist()
    more = a_demand(
        FluidJob(busy_s={1: 1}), FluidJob(work=1, busy_s={0: 2}), FluidJob(work=9, busy_s={0: 2})
    )
    assert swap_orders(more, np.array([1, 0, 2])).tolist() == [2, 0, 1]


def test_with_too_few_levels_the_engine_chooses_which_jobs_share_one() -> None:
    demand = _crowd()
    best = max(_work(demand, np.array(row)) for row in product(range(2), repeat=4))
    level = change_levels(demand, np.zeros(4, dtype=np.int64), 2, window=WINDOW)
    assert _work(demand, level) == pytest.approx(best, rel=1e-4)
    assert by_level(np.array([0, 1, 0, 1]), np.array([2, 3, 0, 1])).tolist() == [3, 1, 2, 0]


def test_jobs_that_could_contend_on_other_paths_belong_together() -> None:
    case = a_contention(3, jobs=4, idle=1)
    groups = possible_groups(case)
    assert sorted(np.concatenate(groups).tolist()) == [0, 1, 2, 3]
    assert [3] in [group.tolist() for group in groups] or case.fixed_start[-1] > case.fixed_start[
        -2
    ]
    part, bundles = contention_among(case, np.array([2, 0]))
    chosen = hash_bundles(case)
    whole, alone = demand_of(case, chosen), demand_of(part, chosen[bundles])
    assert alone.comm_s.tolist() == whole.comm_s[[2, 0]].tolist()
    assert alone.link.tolist() == whole.among(np.array([2, 0])).link.tolist()


def test_paths_tried_on_the_engine_do_at_least_as_much_work_as_the_selected_ones() -> None:
    gains = []
    for seed in range(6):
        case = a_contention(seed, load=1.5)
        order = np.arange(5)
        chosen = select_paths(case, order)
        paths, turned = try_paths(case, chosen, order, window=WINDOW)
        before = _work(demand_of(case, chosen), _distinct(order))
        gains.append(_work(demand_of(case, paths), _distinct(turned)) / before)
    assert min(gains) >= 1 - 1e-9
    assert max(gains) > 1.01


def test_a_floor_raises_the_starved_at_a_price_that_grows_with_it() -> None:
    demand = _crowd()
    order = np.array([1, 0, 2, 3])
    level = _distinct(order)
    assert _shares(demand, level).min() < 0.3
    prices = []
    for floor in (0.3, 0.5):
        result = apply_floor(
            demand, level, order, 8, floor, window=PlayWindow(horizon_s=400.0, warm_s=40.0)
        )
        assert result.met
        assert _shares(demand, result.level).min() >= floor - 0.006
        assert (np.diff(result.level[result.order]) <= 0).all()
        prices.append(result.price)
    assert 0 < prices[0] <= prices[1]
    lost = 1 - _work(demand, result.level) / _work(demand, level)
    assert result.price == pytest.approx(lost, abs=0.02)


def test_an_unreachable_floor_is_reported_as_missed() -> None:
    demand = _crowd()
    order = np.array([1, 0, 2, 3])
    result = apply_floor(demand, _distinct(order), order, 4, 1.0)
    assert not result.met
    assert result.share.min() < 1
    assert result.share.min() >= _shares(demand, _distinct(order)).min()
    with pytest.raises(InvalidInput):
        apply_floor(demand, _distinct(order), order, 4, 1.01)


def test_variants_optimise_the_paths_and_levels_they_are_named_for() -> None:
    case = a_contention(1, jobs=12)
    pa, ps_pa, full = (
        replan(case, options=PlanningOptions(variant=variant, swap_jobs=0, seed=4)).plan
        for variant in Variant
    )
    assert pa.chosen.tolist() == hash_bundles(case, 4).tolist()
    assert ps_pa.chosen.tolist() == full.chosen.tolist() != pa.chosen.tolist()
    assert sorted(pa.level.tolist()) == sorted(ps_pa.level.tolist()) == list(range(12))
    assert ps_pa.order.tolist() == full.order.tolist()
    assert full.levels == 8
    for plan in (pa, ps_pa, full):
        assert find_network_violations(case, plan) == []


def test_a_plan_does_more_work_than_no_plan_and_trials_do_still_more() -> None:
    none: list[float] = []
    plain: list[float] = []
    best: list[float] = []
    for seed in range(8):
        case = a_contention(seed, load=1.2)
        unplanned = demand_of(case, hash_bundles(case))
        none.append(_work(unplanned, np.zeros(5, dtype=np.int64)))
        for found, options in ((plain, PAPER), (best, PlanningOptions(window=WINDOW))):
            result = replan(case, levels=3, options=options)
            assert find_network_violations(case, result.plan) == []
            found.append(_work(result.demand, result.plan.level))
    assert np.sum(plain) > 1.05 * np.sum(none)
    assert np.sum(best) > np.sum(plain)


def test_levels_that_the_fabric_lacks_are_refused() -> None:
    case = a_contention(0)
    for levels, fabric in ((0, 8), (-1, 8), (9, 8), (4, 3)):
        with pytest.raises(InvalidInput, match="levels"):
            replan(case, levels=levels, fabric_levels=fabric)
    for options in (
        PlanningOptions(floor=-0.1),
        PlanningOptions(references=0),
        PlanningOptions(margin=-1.0),
    ):
        with pytest.raises(InvalidInput):
            replan(case, options=options, earlier=case.jobs)


def test_an_unmeasured_job_has_the_highest_level_to_itself() -> None:
    case = a_contention(4, jobs=6, load=2.0)
    for variant in Variant:
        last = case.jobs[replan(case, options=PAPER).plan.order[-1]]
        result = replan(
            case,
            levels=2,
            options=PlanningOptions(variant=variant),
            unmeasured=[last, "nobody", last],
        )
        plan, job = result.plan, case.jobs.index(last)
        assert result.holding.tolist() == [job]
        assert plan.order[0] == job
        assert plan.level[job] == plan.levels - 1
        assert (np.delete(plan.level, job) < plan.levels - 1).all()
        assert find_network_violations(case, plan) == []


def test_of_contending_unmeasured_jobs_only_the_first_has_the_highest_level() -> None:
    case = a_contention(4, jobs=6, load=2.0)
    result = replan(case, unmeasured=case.jobs[::-1])
    demand, held = result.demand, set(result.holding.tolist())
    assert 5 in held
    links = [set(demand.link[slice(*demand.link_start[j : j + 2])].tolist()) for j in range(6)]
    for job in range(6):
        others = held - {job}
        assert (job in held) == all(not links[job] & links[o] for o in others if o > job)
    assert find_network_violations(case, result.plan) == []


def test_a_floor_takes_jobs_with_measuring_precedence_into_account() -> None:
    jobs = a_demand(
        FluidJob(work=5, compute_s=3, busy_s={0: 3}),
        FluidJob(work=4, compute_s=1, busy_s={0: 1}),
        FluidJob(work=3, compute_s=1, busy_s={0: 1}),
    )
    case, options = fixed_contention(jobs), PlanningOptions(floor=0.2)
    result = replan(case, levels=4, options=options, unmeasured=case.jobs[:1])
    share = _shares(result.demand, result.plan.level)
    assert result.holding.tolist() == [0]
    assert result.plan.level[0] == 3
    assert max(result.plan.level[1:]) < 3
    assert result.floored is not None
    assert result.floored.share.tolist() == pytest.approx(share.tolist(), abs=0.02)
    assert result.floored.met == (share.min() >= 0.2)
    assert find_network_violations(case, result.plan) == []


def test_trials_stay_within_their_budget_even_if_other_paths_make_jobs_far_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, played = _slow_or_fast(), list[float]()

    def counted(demand: LinkDemand, levels: Ints, *, horizon_s: float, warm_s: float) -> Floats:
        each = ((horizon_s + warm_s) / demand.alone_s).sum()
        played.append(float(each) * len(levels))
        return np.zeros(len(levels))

    monkeypatch.setattr(trials, "flop_under_levels", counted)
    try_paths(case, np.zeros(3, np.int64), np.arange(3))
    assert 0 < sum(played) <= MAX_PLAYED_ITERATIONS


def _slow_or_fast() -> Contention:
    """Return three jobs that may all take a very slow link or a very fast one."""
    step, ones = np.arange(4), np.ones(3)
    return Contention(
        jobs=("a", "b", "c"),
        work_flop=ones,
        compute_s=1e-6 * ones,
        start_s=np.zeros(3),
        gpus=np.ones(3, np.int64),
        fixed_start=0 * step,
        fixed_link=step[:0],
        fixed_bytes=np.zeros(0),
        fixed_delay_s=np.zeros(3),
        bundle_start=step,
        bundle_bytes=ones,
        bundle_messages=step[:3],
        candidate_start=2 * step,
        candidate=np.array([0, 1] * 3),
        path_start=step[:3],
        path_link=step[:2],
        path_delay_s=np.zeros(2),
        link_bytes_per_s=np.array([1e-4, 1e6]),
    )
