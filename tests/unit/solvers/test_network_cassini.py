"""CASSINI's circles, its walk over the affinity graph, and the effect of time shifts on the fluid engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tessera.formulation.network.contention import LinkDemand
from tessera.formulation.tables import Floats
from tessera.solvers.network.baselines.cassini import align_shifts, waits_s
from tessera.solvers.network.baselines.circles import common_grid, fit_circles
from tessera.solvers.network.fluid import simulate_fluid
from tests.support.networks import FluidJob, a_demand


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


def peak_demand(
    demand: LinkDemand, offset_s: Floats, links: Mapping[int, tuple[int, ...]]
) -> float:
    """Return the largest total demand of a link's jobs if each runs as if alone."""
    at_s = np.linspace(0, 60, 6001) + 1e-3
    sends = np.stack(
        [
            ((at_s - offset_s[j]) % demand.alone_s[j]) >= demand.start_s[j]
            for j in range(demand.jobs)
        ]
    )
    return float(max(sends[list(jobs)].sum(axis=0).max() for jobs in links.values()))


def test_two_jobs_that_send_half_of_the_time_are_shifted_and_run_as_if_alone() -> None:
    demand = a_demand(a_job(2.0, 1.0), a_job(2.0, 1.0))
    shifts = align_shifts(demand)
    assert shifts.score == pytest.approx([1.0])
    assert shifts.offset_s == pytest.approx([0.0, 1.0])
    assert slowdown(demand, shifts.offset_s) == pytest.approx([1.0, 1.0])


def test_without_a_shift_equal_jobs_contend_for_ever() -> None:
    demand = a_demand(a_job(2.0, 1.0), a_job(2.0, 1.0))
    assert slowdown(demand, np.zeros(2)) == pytest.approx([1.5, 1.5])


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


def test_shifts_of_unequal_periods_go_along_the_graph() -> None:
    demand = a_demand(a_job(2.0, 1.0, 0), a_job(4.0, 1.0, 0, 1), a_job(8.0, 3.0, 1))
    shifts = align_shifts(demand)
    assert shifts.score == pytest.approx([1.0, 1.0])
    assert peak_demand(demand, shifts.offset_s, {0: (0, 1), 1: (1, 2)}) == 1.0


def test_links_with_the_same_jobs_are_merged_and_form_no_loop() -> None:
    demand = a_demand(a_job(2.0, 1.0, 0, 1, 2), a_job(2.0, 1.0, 0, 1, 2))
    shifts = align_shifts(demand)
    assert (len(shifts.link), shifts.loops) == (1, 0)
    assert shifts.offset_s == pytest.approx([0.0, 1.0])


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
