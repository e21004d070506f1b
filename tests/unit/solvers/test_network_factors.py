"""The fluid engine, correction factors and priorities, on cases with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.solvers.network.factors import (
    NARROW_BOUNDS,
    WIDE_BOUNDS,
    AloneTimes,
    Clip,
    correction_factors,
    factors_against,
    reference_of,
)
from tessera.solvers.network.fluid import flop_under_levels, simulate_fluid
from tessera.solvers.network.priorities import assign_priorities, order_of, stable_order
from tests.support.network_periods import low_periods_s
from tests.support.networks import FluidJob, a_demand


def _example_1() -> LinkDemand:
    return a_demand(
        FluidJob(work=10, compute_s=2, busy_s={0: 2}), FluidJob(work=5, compute_s=1, busy_s={0: 1})
    )


def _timing(compute_s: float, start_s: float, comm_s: float) -> AloneTimes:
    one = np.ones(1)
    return AloneTimes(
        compute_s=one * compute_s, start_s=one * start_s, delay_s=one * 0, comm_s=one * comm_s
    )


def _low_s(high: AloneTimes, low: AloneTimes, speed: float = 0.0) -> float:
    found, slack = low_periods_s(high, low, np.array([speed]))
    assert slack[0] == 0
    return float(found[0])


def test_example_1_of_crux_ties_at_exactly_three_halves() -> None:
    demand = _example_1()
    assert reference_of(demand) == 0
    assert correction_factors(demand, clip=Clip.NONE).tolist() == [1.0, 1.5]
    assert assign_priorities(demand, correction_factors(demand)).tolist() == [5.0, 7.5]
    assert order_of(assign_priorities(demand, correction_factors(demand))).tolist() == [1, 0]


def test_example_1_has_the_same_factor_in_tenths_and_thirds_of_its_times() -> None:
    for scale in (0.1, 1 / 3, 1e-5):
        demand = a_demand(
            FluidJob(work=10, compute_s=2 * scale, busy_s={0: 2 * scale}),
            FluidJob(work=5, compute_s=scale, busy_s={0: scale}),
        )
        assert correction_factors(demand, clip=Clip.NONE).tolist() == [1.0, 1.5]


def test_in_example_2_the_order_does_not_matter_and_k_is_1() -> None:
    demand = a_demand(
        FluidJob(work=10, compute_s=4, start_s=2, busy_s={0: 1}),
        FluidJob(work=30, compute_s=2, start_s=1, busy_s={0: 3}),
    )
    assert correction_factors(demand, clip=Clip.NONE).tolist() == [1.0, 1.0]


def test_the_job_served_last_starves_if_the_other_one_fills_the_link() -> None:
    assert _low_s(_timing(1, 0, 2), _timing(1, 1, 1)) == math.inf
    assert _low_s(_timing(1, 0, 2), _timing(1, 1, 1), speed=0.5) == pytest.approx(3.0)


def test_before_clipping_k_is_infinite_for_a_job_that_only_gains_and_0_for_one_that_only_loses() -> (
    None
):
    # the reference always sends, even when served last: the part of its traffic that remains is
    # hidden behind its compute
    eager = FluidJob(work=1, compute_s=4, start_s=0, busy_s={0: 1.5})
    small = FluidJob(work=1, compute_s=1, busy_s={0: 1})
    demand = a_demand(eager, small)
    against_eager = factors_against(demand, np.array([1]), np.array([0]))
    against_small = factors_against(demand, np.array([0]), np.array([1]))
    assert against_eager.tolist() == [math.inf]
    assert against_small.tolist() == [0.0]
    assert correction_factors(demand, clip=Clip.NARROW).max() <= NARROW_BOUNDS[1]


def test_k_is_clipped_narrowly_on_a_saturated_shared_link_and_widely_otherwise() -> None:
    free = a_demand(
        FluidJob(compute_s=4, start_s=0, busy_s={0: 1.5}), FluidJob(compute_s=2, busy_s={0: 1})
    )
    assert free.offered[0] < 1
    assert reference_of(free) == 0
    assert correction_factors(free).tolist() == [1.0, WIDE_BOUNDS[1]]
    full = a_demand(
        FluidJob(compute_s=4, start_s=0, busy_s={0: 2.5}), FluidJob(compute_s=1, busy_s={0: 1})
    )
    assert full.offered[0] >= 1
    assert set(correction_factors(full).tolist()) <= {1.0, *NARROW_BOUNDS}
    assert correction_factors(full)[1] == NARROW_BOUNDS[1]


def test_jobs_that_cannot_fill_a_link_together_are_compared_on_one_as_in_the_paper() -> None:
    # both need all of their own link and half of the shared one
    demand = a_demand(
        FluidJob(work=10, compute_s=2, busy_s={0: 1, 1: 2}),
        FluidJob(work=5, compute_s=1, busy_s={0: 0.5, 2: 1}),
    )
    assert correction_factors(demand, clip=Clip.NONE).tolist() == [1.0, 1.5]


def test_a_pair_is_simulated_at_the_speed_left_by_its_fullest_link() -> None:
    # while the other job sends, link 0 leaves a speed of (1 - 0.8) / 0.8 = 1/4, link 3 one of 2/3
    demand = a_demand(
        FluidJob(work=10, compute_s=2, busy_s={0: 1.6, 1: 2.0, 3: 1.2}),
        FluidJob(work=5, compute_s=1, busy_s={0: 0.8, 2: 1.0, 3: 0.6}),
    )
    first, second = _timing(2, 2, 2), _timing(1, 1, 1)
    low_s = _low_s(second, first, 0.25), _low_s(first, second, 0.25)
    for last, level in enumerate(([0, 1], [1, 0])):
        run = simulate_fluid(demand, np.array(level), horizon_s=6000.0, warm_s=600.0)
        assert 1 / run.iterations[last] == pytest.approx(low_s[last], rel=1e-3)
    wanted = 1 * (1 / 2 - 1 / low_s[1]) / (2 * (1 / 4 - 1 / low_s[0]))
    assert correction_factors(demand, clip=Clip.NONE) == pytest.approx([1.0, wanted])


def test_the_reference_is_the_job_with_the_most_traffic_per_second_not_per_iteration() -> None:
    demand = a_demand(
        FluidJob(compute_s=100, busy_s={0: 20}), FluidJob(compute_s=2, busy_s={0: 1, 1: 1})
    )
    assert reference_of(demand) == 1


def test_jobs_without_traffic_have_k_1_and_come_before_all_others() -> None:
    demand = a_demand(FluidJob(), FluidJob(busy_s={0: 1}), FluidJob(work=0))
    assert correction_factors(demand).tolist() == [1, 1, 1]
    priority = assign_priorities(demand, correction_factors(demand))
    assert priority.tolist() == [math.inf, 1, math.inf]
    assert order_of(priority).tolist() == [0, 2, 1]


def test_nan_priorities_and_zero_references_are_refused() -> None:
    with pytest.raises(InvalidInput, match="job 1 is NaN"):
        order_of(np.array([1.0, math.nan]))
    with pytest.raises(InvalidInput, match="job 0 is NaN"):
        assign_priorities(_example_1(), np.array([math.nan, 1.0]))
    with pytest.raises(InvalidInput, match="references"):
        correction_factors(_example_1(), references=0)


def test_an_invalid_earlier_order_is_refused() -> None:
    for earlier, margin in (([0, 0], 0.1), ([2], 0.1), ([0], -1.0), ([0], math.nan)):
        with pytest.raises(InvalidInput):
            stable_order(np.ones(2), np.array(earlier), margin=margin)


FIRST, SECOND = np.array([1, 0]), np.array([0, 1])


def test_example_1_of_crux_has_its_long_run_utilisation_and_link_seconds() -> None:
    demand, peak_flop_per_s = _example_1(), 10.0  # 10 GPUs of 0.5 flop/s each
    for level, utilisation, link_s in ((FIRST, 3 / 8, (6, 3)), (SECOND, 5 / 12, (4, 6))):
        run = simulate_fluid(demand, level, horizon_s=1200.0, warm_s=120.0)
        assert run.work_per_s(demand) / peak_flop_per_s == pytest.approx(utilisation, rel=1e-12)
        assert run.comm * 12 == pytest.approx(link_s, rel=1e-12)


def test_in_example_2_the_phases_lock_so_that_both_jobs_run_at_full_speed() -> None:
    demand = a_demand(
        FluidJob(work=10, compute_s=4, start_s=2, busy_s={0: 1}),
        FluidJob(work=30, compute_s=2, start_s=1, busy_s={0: 3}),
    )
    for level in (FIRST, SECOND):
        run = simulate_fluid(demand, level, horizon_s=400.0, warm_s=100.0)
        assert 1 / run.iterations == pytest.approx((4, 4), rel=1e-12)


def test_rates_do_not_drift_over_a_million_iterations() -> None:
    demand = a_demand(
        FluidJob(compute_s=0.1, busy_s={0: 0.2}), FluidJob(compute_s=0.1, busy_s={0: 0.1})
    )
    run = simulate_fluid(demand, FIRST, horizon_s=0.3 * 10**6)
    assert run.iterations * 0.3 == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(("noise", "factor"), [(0.01, 1.5), (0.05, 1.486), (0.1, 1.453)])
def test_the_factor_of_example_1_stays_near_3_2_when_compute_is_noisy(
    noise: float, factor: float
) -> None:
    """The expected factors were measured separately (notes on Crux, 1.4)."""
    demand = _example_1()
    first, second = (
        simulate_fluid(demand, level, horizon_s=400_000.0, noise=noise) for level in (FIRST, SECOND)
    )
    gain, loss = second.comm[1] - first.comm[1], first.comm[0] - second.comm[0]
    assert gain / loss == pytest.approx(factor, abs=0.01)


def test_meaningless_numbers_are_refused() -> None:
    demand = _example_1()
    with pytest.raises(InvalidInput, match="level"):
        simulate_fluid(demand, np.zeros(3, np.int64), horizon_s=1.0)
    with pytest.raises(InvalidInput, match="levels"):
        flop_under_levels(demand, np.zeros((2, 3), np.int64), horizon_s=1.0)
    for horizon_s, warm_s in ((0.0, 0.0), (np.inf, 0.0), (np.nan, 0.0), (1.0, -1.0)):
        with pytest.raises(InvalidInput, match="horizon_s"):
            simulate_fluid(demand, FIRST, horizon_s=horizon_s, warm_s=warm_s)
    with pytest.raises(InvalidInput, match="offset_s"):
        simulate_fluid(demand, FIRST, horizon_s=1.0, offset_s=np.array([0.0, np.nan]))
    with pytest.raises(InvalidInput, match="noise"):
        simulate_fluid(demand, FIRST, horizon_s=1.0, noise=np.nan)
