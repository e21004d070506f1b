"""Network baselines on cases worked out by hand, and the circles of CASSINI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import Contention, LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.baselines.cassini import align_shifts, waits_s
from tessera.solvers.network.baselines.circles import common_grid, fit_circles
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.baselines.levels import alone_then_rest, contended_first, equal_blocks
from tessera.solvers.network.baselines.sincronia import bssi_order
from tessera.solvers.network.baselines.varys import sebf_order
from tessera.solvers.network.fluid import simulate_fluid
from tessera.solvers.network.mechanisms import make_mechanism, mechanism_names
from tests.support.networks import FluidJob, a_demand


def a_contention(
    *,
    fixed: Sequence[Mapping[int, float]],
    bundles: Sequence[Sequence[Sequence[Sequence[int]]]] = (),
    links: int = 4,
    names: Sequence[str] | None = None,
    sent_bytes: float = 1.0,
) -> Contention:
    """Return jobs with ``fixed`` bytes by link.

    A bundle is a list of paths, and a path is a list of links.
    """
    jobs = len(fixed)
    bundles = bundles or [[] for _ in range(jobs)]
    paths = [path for job in bundles for bundle in job for path in bundle]
    flat = [bundle for job in bundles for bundle in job]
    return Contention(
        jobs=tuple(names or [f"job-{j}" for j in range(jobs)]),
        work_flop=np.ones(jobs),
        compute_s=np.ones(jobs),
        start_s=np.ones(jobs),
        gpus=np.full(jobs, 8),
        fixed_start=_starts([len(f) for f in fixed]),
        fixed_link=np.array([e for f in fixed for e in f], dtype=np.int64),
        fixed_bytes=np.array([b for f in fixed for b in f.values()], dtype=np.float64),
        fixed_delay_s=np.zeros(jobs),
        bundle_start=_starts([len(job) for job in bundles]),
        bundle_bytes=np.full(len(flat), sent_bytes),
        bundle_messages=np.ones(len(flat), np.int64),
        candidate_start=_starts([len(bundle) for bundle in flat]),
        candidate=np.arange(len(paths)),
        path_start=_starts([len(path) for path in paths]),
        path_link=np.array([e for path in paths for e in path], dtype=np.int64),
        path_delay_s=np.zeros(len(paths)),
        link_bytes_per_s=np.ones(links),
    )


def _starts(counts: Sequence[int]) -> Ints:
    return np.cumsum([0, *counts]).astype(np.int64)


def a_demand_of_two_pairs() -> LinkDemand:
    """Return Crux's figure 13, most urgent first: jobs 0 and 1 share a link, jobs 2 and 3 another."""
    return a_demand(*(FluidJob(busy_s={j // 2: 1.0 + j}) for j in range(4)))


def open_shop_cost(demand: LinkDemand, order: Sequence[int], weight: Floats) -> float:
    """Return the weighted sum of completion times if each link serves the order independently."""
    busy_s = np.zeros((demand.jobs, demand.links))
    busy_s[demand.job, demand.link] = demand.busy_s
    upto = np.cumsum(busy_s[list(order)], axis=0)
    done = np.where(busy_s[list(order)] > 0, upto, 0).max(axis=1)
    return float(weight[list(order)] @ done)


def test_on_one_link_bssi_with_weights_is_smiths_rule() -> None:
    busy_s, weight = np.array([3.0, 1.0, 2.0, 0.5]), np.array([9.0, 1.0, 3.0, 0.2])
    demand = a_demand(*(FluidJob(busy_s={0: t}) for t in busy_s))
    assert bssi_order(demand, weight).tolist() == np.argsort(busy_s / weight).tolist()


def test_bssi_scales_weights_by_the_last_jobs_weight_and_time() -> None:
    # Link 0 is busiest (2 + 4 + 0 = 6; link 1: 3 + 0 + 2 = 5). Weight / time is 1/2 for job 0 and 1/4
    # for job 1, so job 1 is last, and job 0's weight becomes 1 - 2/4 = 1/2. Then link 1 is busiest:
    # weight / time is 1/2 / 3 = 1/6 for job 0 and 1/2 for job 2, so job 0 is placed before job 1.
    demand = a_demand(
        FluidJob(busy_s={0: 2, 1: 3}), FluidJob(busy_s={0: 4}), FluidJob(busy_s={1: 2})
    )
    assert bssi_order(demand).tolist() == [2, 0, 1]


def test_bssi_rescales_weights_only_on_links_of_the_last_job() -> None:
    # Unscaled, job 0 (w/t = 1/3) would be placed after job 2 (0.9/2.9). Scaled to 1/4 by job 1, it is
    # last on that link.
    demand = a_demand(
        FluidJob(busy_s={0: 3, 1: 3}), FluidJob(busy_s={0: 4}), FluidJob(busy_s={1: 2.9})
    )
    assert bssi_order(demand, np.array([1.0, 1.0, 0.9])).tolist() == [2, 0, 1]
    alone = a_demand(FluidJob(busy_s={1: 3}), FluidJob(busy_s={0: 8}), FluidJob(busy_s={1: 2.9}))
    assert bssi_order(alone, np.array([1.0, 1.0, 0.9])).tolist()[:2] == [0, 2]


def test_bssi_is_within_twice_the_least_sum_of_completion_times_link_by_link() -> None:
    rng = np.random.default_rng(0)
    worst = 1.0
    for _ in range(40):
        busy_s = rng.exponential(1.0, (5, 3)) * (rng.random((5, 3)) < 0.6)
        demand = a_demand(
            *(FluidJob(busy_s={e: t for e, t in enumerate(row) if t > 0}) for row in busy_s),
            links=3,
        )
        weight = rng.uniform(0.1, 3.0, 5)
        least_cost = min(open_shop_cost(demand, order, weight) for order in permutations(range(5)))
        worst = max(
            worst, open_shop_cost(demand, bssi_order(demand, weight).tolist(), weight) / least_cost
        )
    assert 1.0 <= worst <= 2.0


def test_coflows_served_in_bssis_order_are_within_four_times_the_least() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        size = rng.exponential(1.0, (4, 3, 3)) * (rng.random((4, 3, 3)) < 0.4)
        size[:, 0, 0] += 0.1
        # 3 output ports, 3 input ports
        ports = np.concatenate([size.sum(axis=2), size.sum(axis=1)], axis=1)
        demand = a_demand(
            *(FluidJob(busy_s={e: t for e, t in enumerate(row) if t > 0}) for row in ports), links=6
        )
        weight = rng.uniform(0.1, 3.0, 4)
        least_cost = min(open_shop_cost(demand, order, weight) for order in permutations(range(4)))
        assert (
            weight @ completion_times(size, bssi_order(demand, weight).tolist()) <= 4 * least_cost
        )


def completion_times(size: Floats, order: Sequence[int]) -> Floats:
    """Return each coflow's completion time if flows of sizes (coflows, in, out) have strict priorities."""
    remaining, now, completion = size.copy(), 0.0, np.zeros(len(size))
    while (remaining > 0).any():
        sends, receives, rate = np.ones(3), np.ones(3), np.zeros_like(remaining)
        for k in order:
            for a, b in zip(*np.nonzero(remaining[k] > 0), strict=True):
                rate[k, a, b] = min(sends[a], receives[b])
                sends[a] -= rate[k, a, b]
                receives[b] -= rate[k, a, b]
        moving = rate > 0
        step = (remaining[moving] / rate[moving]).min()
        remaining = np.where(remaining - rate * step > 1e-12, remaining - rate * step, 0.0)
        now += step
        completion[(remaining.sum(axis=(1, 2)) == 0) & (completion == 0)] = now
    return completion


def test_varys_serves_the_smallest_bottleneck_first() -> None:
    demand = a_demand(
        FluidJob(busy_s={0: 2, 1: 2, 2: 2}),
        FluidJob(busy_s={0: 3}),
        FluidJob(busy_s={1: 1, 2: 1.5}),
    )
    # ordered by sums, the second job would precede the first
    assert sebf_order(demand).tolist() == [2, 0, 1]


def test_levels_match_figure_13_of_crux() -> None:
    demand, order = a_demand_of_two_pairs(), np.arange(4)
    assert contended_first(demand, order)[1] == 4
    assert alone_then_rest(order, 4, 2).tolist() == [1, 0, 0, 0]
    assert equal_blocks(order, 4, 2).tolist() == [1, 1, 0, 0]
    assert bssi_order(demand).tolist()[0] == 0
    assert sebf_order(demand).tolist() == [0, 1, 2, 3]


def test_blocks_keep_tied_jobs_together() -> None:
    tied = np.array([False, True, True, False, True])
    assert equal_blocks(np.arange(5), 5, 3, tied).tolist() == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("name", ["sincronia", "varys", "taccl*"])
def test_less_than_one_level_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="must be at least 1"):
        make_mechanism(name).plan(a_contention(fixed=[{0: 1.0}]), levels=0)


def test_a_flow_keeps_its_path_when_other_jobs_come() -> None:
    choice = [[[0], [1], [2]]] * 3
    alone = a_contention(fixed=[{}], bundles=[choice], names=["mine"])
    later = a_contention(fixed=[{}, {}], bundles=[choice, choice], names=["other", "mine"])
    assert hash_bundles(later, 3)[3:].tolist() == hash_bundles(alone, 3).tolist()


def test_hashes_spread_flows_evenly_and_change_with_the_seed() -> None:
    many = a_contention(fixed=[{}] * 200, bundles=[[[[0], [1], [2], [3]]] * 20] * 200)
    first, second = hash_bundles(many, 0), hash_bundles(many, 1)
    assert np.bincount(first) == pytest.approx([1000] * 4, rel=0.1)
    assert (first == second).mean() == pytest.approx(0.25, abs=0.05)
    assert np.bincount(4 * first[::2] + first[1::2]) == pytest.approx([125] * 16, rel=0.35)


def test_taccl_serves_the_traffic_with_the_longest_paths_first() -> None:
    far, near = [[0, 1, 2, 3]], [[0, 1]]
    jobs = a_contention(fixed=[{0: 1.0}, {}, {}, {}], bundles=[[], [near], [far], [far, near]])
    plan = make_mechanism("taccl*").plan(jobs, levels=4)
    assert plan.order.tolist() == [2, 3, 1, 0]
    assert plan.level.tolist() == [0, 1, 3, 2]


def test_taccl_lets_jobs_choose_paths_in_order_of_arrival_whatever_their_intensity() -> None:
    choice = [[[0], [1]]]
    jobs = a_contention(fixed=[{}, {}, {1: 0.01}], bundles=[choice, choice, []])
    jobs = replace(jobs, work_flop=np.array([1.0, 100.0, 1.0]))
    assert make_mechanism("taccl*").plan(jobs, levels=2).chosen.tolist() == [0, 1]


@pytest.mark.parametrize("name", mechanism_names())
@pytest.mark.parametrize("levels", [1, 3, 8])
def test_the_plan_of_every_mechanism_passes_the_checker(name: str, levels: int) -> None:
    rng = np.random.default_rng(5)
    jobs = a_contention(
        fixed=[{int(e): float(rng.exponential()) for e in rng.choice(12, 2)} for _ in range(30)],
        bundles=[
            [[rng.choice(12, 3, replace=False).tolist() for _ in range(4)] for _ in range(2)]
            for _ in range(30)
        ],
        links=12,
    )
    plan = make_mechanism(name).plan(jobs, levels=levels, seed=2)
    assert find_network_violations(jobs, plan) == []
    again = make_mechanism(name).plan(jobs, levels=levels, seed=2)
    assert (plan.level == again.level).all()
    assert (plan.chosen == again.chosen).all()
    assert (plan.offset_s is not None) == (name == "cassini")


def test_an_empty_job_list_has_an_empty_plan() -> None:
    for name in mechanism_names():
        plan = make_mechanism(name).plan(a_contention(fixed=[]), levels=8)
        assert len(plan.level) == len(plan.order) == 0


def test_an_unknown_mechanism_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"sincronia, varys, taccl\*"):
        make_mechanism("sincronya")


def a_job(period_s: float, sends_s: float, *links: int) -> FluidJob:
    """Return a job that computes and then fills its links for ``sends_s``."""
    return FluidJob(compute_s=period_s - sends_s, busy_s=dict.fromkeys(links or (0,), sends_s))


def slowdown(demand: LinkDemand, offset_s: Floats) -> Floats:
    """Return how much longer iterations take than alone, on one level over many common multiples."""
    run = simulate_fluid(
        demand, np.zeros(demand.jobs, np.int64), horizon_s=720.0, warm_s=72.0, offset_s=offset_s
    )
    found: Floats = 1 / (run.iterations * demand.alone_s)
    return found


def test_two_jobs_that_send_half_of_the_time_are_shifted_and_run_as_if_alone() -> None:
    demand = a_demand(a_job(2.0, 1.0), a_job(2.0, 1.0))
    shifts = align_shifts(demand)
    assert shifts.score == pytest.approx([1.0])
    assert shifts.offset_s == pytest.approx([0.0, 1.0])
    assert slowdown(demand, shifts.offset_s) == pytest.approx([1.0, 1.0])


def test_unequal_periods_share_the_circle_of_their_common_multiple() -> None:
    demand = a_demand(a_job(2.0, 0.5), a_job(3.0, 0.5))
    grid = common_grid(demand.alone_s)
    assert (grid.counts / grid.parts).tolist() == [1.0, 1.5]
    assert grid.around == 3 * grid.parts
    assert grid.error == pytest.approx(0.0, abs=1e-12)
    shifts = align_shifts(demand)
    assert shifts.score == pytest.approx([1.0])
    assert slowdown(demand, shifts.offset_s) == pytest.approx([1.0, 1.0])
    assert slowdown(demand, np.zeros(2)).max() < 1.2  # the most that shifts can gain


def test_lengths_without_a_common_multiple_are_rounded_to_one() -> None:
    grid = common_grid(np.array([1.0, 1.5003]))
    assert (grid.counts / grid.parts).tolist() == [1.0, 1.5]
    assert grid.error == pytest.approx(0.0002, rel=0.01)


def test_without_a_good_grid_the_circle_stays_small_and_the_error_is_reported() -> None:
    demand = a_demand(*(a_job(t, 0.4 * t) for t in (1.0, 7.3, 11.9, 13.7)))
    grid = common_grid(demand.alone_s)
    assert grid.around <= 128
    assert grid.error > 0.05
    assert "no common multiple" in str(align_shifts(demand))


def test_jobs_that_do_not_fit_are_scored_by_their_excess() -> None:
    demand = a_demand(a_job(4.0, 3.0), a_job(4.0, 3.0))  # at best, both jobs send for 2 of 4 s
    assert align_shifts(demand).score == pytest.approx([0.5])


def test_jobs_whose_shares_of_a_link_fit_together_need_no_shift() -> None:
    demand = a_demand(
        FluidJob(busy_s={0: 0.5, 1: 1.0}),
        FluidJob(busy_s={0: 0.5, 2: 1.0}),
        FluidJob(busy_s={1: 0.1}),
    )
    shifts = align_shifts(demand)
    assert shifts.link.tolist() == [1]  # jobs 0 and 2; half of link 0 each is not contention
    assert shifts.offset_s[1] == 0.0


def test_a_delay_does_not_count_as_sending_time() -> None:
    circles = fit_circles(
        np.array([2.0, 2.0]), np.array([1.5, 1.0]), np.array([0.5, 0.5]), np.ones(2)
    )
    assert circles.score == 1.0
    assert circles.shift_s.tolist() == [0.0, 0.0]
    demand = a_demand(
        FluidJob(compute_s=1.0, delay_s=0.5, busy_s={0: 0.5}),
        FluidJob(compute_s=2.0, start_s=0.5, delay_s=0.5, busy_s={0: 0.5}),
    )
    assert align_shifts(demand).score == pytest.approx([1.0])
    assert align_shifts(demand).offset_s.tolist() == [0.0, 0.0]


def test_shifts_go_along_the_graph_from_job_to_job() -> None:
    demand = a_demand(
        a_job(2.0, 1.0, 0), a_job(2.0, 1.0, 0, 1), a_job(2.0, 1.0, 1, 2), a_job(2.0, 1.0, 2)
    )
    shifts = align_shifts(demand)
    assert shifts.loops == 0
    assert np.abs(np.diff(shifts.offset_s)) == pytest.approx(np.ones(3))
    assert slowdown(demand, shifts.offset_s) == pytest.approx(np.ones(4))


def test_a_loop_is_cut_counted_and_reported() -> None:
    demand = a_demand(a_job(2.0, 1.0, 0, 2), a_job(2.0, 1.0, 0, 1), a_job(2.0, 1.0, 1, 2))
    shifts = align_shifts(demand)
    assert shifts.loops == 1
    assert "1 edges left out" in str(shifts)
    # two of the three are still apart
    assert np.abs(np.diff(shifts.offset_s)).max() == pytest.approx(1.0)
    assert slowdown(demand, shifts.offset_s).max() > 1.2


def test_a_link_that_would_close_a_loop_still_joins_its_other_jobs() -> None:
    demand = a_demand(
        FluidJob(busy_s={0: 1.0, 1: 0.5}), FluidJob(busy_s={0: 1.0, 1: 0.5}), a_job(2.0, 0.8, 1)
    )
    shifts = align_shifts(demand)
    assert (shifts.link.tolist(), shifts.loops) == ([0, 1], 1)


def test_only_jobs_that_drifted_are_aligned_again() -> None:
    began_s = np.array([10.0, 10.05, 10.2, 9.9, 10.0])
    offset_s, period_s = np.array([0.0, 0.0, 0.0, 0.0, 0.5]), np.full(5, 2.0)
    wait_s = waits_s(began_s, offset_s, period_s)
    assert wait_s == pytest.approx([0.0, 0.0, 1.8, 0.0, 0.5])
    assert waits_s(began_s, offset_s, period_s, tolerance=0.01)[1] == pytest.approx(1.95)
