"""The fluid engine, on cases with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import LinkDemand
from tessera.solvers.network.fluid import flop_under_levels, simulate_fluid
from tests.support.networks import FluidJob, a_demand

FIRST, SECOND = np.array([1, 0]), np.array([0, 1])


def _example_1() -> LinkDemand:
    return a_demand(
        FluidJob(work=10, compute_s=2, busy_s={0: 2}), FluidJob(work=5, compute_s=1, busy_s={0: 1})
    )


def test_example_1_of_crux_has_its_long_run_utilisation_and_link_seconds() -> None:
    demand, peak_flop_per_s = _example_1(), 10.0  # 10 GPUs of 0.5 flop/s each
    for level, utilisation, link_s in ((FIRST, 3 / 8, (6, 3)), (SECOND, 5 / 12, (4, 6))):
        run = simulate_fluid(demand, level, horizon_s=1200.0, warm_s=120.0)
        assert run.work_per_s(demand) / peak_flop_per_s == pytest.approx(utilisation, rel=1e-12)
        assert run.comm * 12 == pytest.approx(link_s, rel=1e-12)


def test_example_1_has_periods_4_and_4_or_6_and_2() -> None:
    for level, period_s in ((FIRST, (4, 4)), (SECOND, (6, 2))):
        run = simulate_fluid(_example_1(), level, horizon_s=1200.0, warm_s=120.0)
        assert 1 / run.iterations == pytest.approx(period_s, rel=1e-12)


def test_example_1_does_not_depend_on_the_start_of_the_second_job() -> None:
    for offset_s in np.linspace(0, 4, 15):
        run = simulate_fluid(
            _example_1(), FIRST, horizon_s=1200.0, warm_s=120.0, offset_s=np.array([0, offset_s])
        )
        assert 1 / run.iterations == pytest.approx((4, 4), rel=1e-12)


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


def test_noise_is_reproducible_by_seed_and_keeps_the_mean() -> None:
    demand = a_demand(FluidJob(compute_s=1, busy_s={0: 1}), FluidJob(compute_s=2, busy_s={1: 1}))
    one, same, other = (
        simulate_fluid(demand, FIRST, horizon_s=20_000.0, noise=0.2, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one.iterations.tolist() == same.iterations.tolist() != other.iterations.tolist()
    assert 1 / one.iterations == pytest.approx(demand.alone_s, rel=0.01)


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


def test_empty_lists_of_jobs_or_assignments_are_accepted() -> None:
    nobody = a_demand()
    assert len(simulate_fluid(nobody, np.zeros(0, np.int64), horizon_s=1.0).iterations) == 0
    assert flop_under_levels(nobody, np.zeros((2, 0), np.int64), horizon_s=1.0).tolist() == [
        0.0,
        0.0,
    ]
    assert len(flop_under_levels(_example_1(), np.zeros((0, 2), np.int64), horizon_s=1.0)) == 0
