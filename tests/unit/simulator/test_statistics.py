"""Intervals over seeds: against SciPy, against their definition, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.simulator.statistics import (
    mean_interval,
    mean_intervals,
    ratio_interval,
    t_quantile,
    total_interval,
)

DRAWS = 4000


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 199])
def test_quantiles_of_t_match_scipy(freedom: int) -> None:
    from scipy import stats  # noqa: PLC0415 - it starts slowly

    for confidence in (0.5, 0.9, 0.95, 0.99):
        expected = stats.t.ppf(0.5 + confidence / 2, freedom)
        assert t_quantile(freedom, confidence) == pytest.approx(expected, rel=1e-10)


def test_the_interval_of_a_mean_matches_scipy() -> None:
    from scipy import stats  # noqa: PLC0415 - it starts slowly

    values = np.random.default_rng(3).exponential(size=6)
    interval = mean_interval(values)
    low, high = stats.t.interval(0.95, 5, values.mean(), stats.sem(values))
    assert (interval.value, interval.low, interval.high) == pytest.approx(
        (values.mean(), low, high)
    )


def test_one_run_has_a_value_but_no_interval() -> None:
    for found in (mean_interval([7.0]), ratio_interval([7.0], [1.0])):
        assert found.value == 7
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def test_equal_runs_have_an_interval_without_width() -> None:
    assert mean_interval([2.0, 2.0, 2.0]).low == mean_interval([2.0, 2.0, 2.0]).high == 2
    interval = ratio_interval([3.0, 6.0, 9.0], [2.0, 4.0, 6.0])
    assert (interval.value, interval.low, interval.high) == pytest.approx((1.5, 1.5, 1.5))


def test_an_interval_of_a_mean_contains_it_95_times_of_100() -> None:
    rng = np.random.default_rng(5)
    _, low, high = mean_intervals(rng.normal(10, 4, size=(5, DRAWS)))
    assert np.mean((low <= 10) & (high >= 10)) == pytest.approx(0.95, abs=0.012)


def test_an_interval_of_a_ratio_contains_it_95_times_of_100() -> None:
    rng = np.random.default_rng(6)
    covering = 0
    for _ in range(DRAWS):
        common = rng.normal(0, 2, 5)  # a seed affects both
        interval = ratio_interval(
            12 + common + rng.normal(0, 1, 5), 8 + common + rng.normal(0, 1, 5)
        )
        covering += interval.low <= 1.5 <= interval.high
    assert covering / DRAWS == pytest.approx(0.95, abs=0.012)


def test_pairing_narrows_the_interval_of_a_ratio() -> None:
    seeds = np.array([1.0, 5.0, 2.0, 9.0])
    paired = ratio_interval(1.2 * seeds + [0.1, -0.1, 0.1, -0.1], seeds + 0.5)
    crossed = ratio_interval((1.2 * seeds + [0.1, -0.1, 0.1, -0.1])[::-1], seeds + 0.5)
    assert paired.high - paired.low < (crossed.high - crossed.low) / 10


def test_a_ratio_with_a_zero_mean_is_not_a_number() -> None:
    interval = ratio_interval([1.0, 2.0], [1.0, -1.0])
    assert all(math.isnan(x) for x in (interval.value, interval.low, interval.high))


def test_a_total_lies_in_its_interval_and_the_interval_depends_on_the_seed() -> None:
    values = np.random.default_rng(7).integers(0, 3, 40)
    low, high = total_interval(values, 1)
    assert low < values.sum() < high
    assert total_interval(values, 1) == (low, high)
    spread = 1.96 * values.std() * math.sqrt(40)  # by the central limit theorem
    assert high - low == pytest.approx(2 * spread, rel=0.05)


def test_the_interval_of_a_total_matches_scipy() -> None:
    from scipy import stats  # noqa: PLC0415 - it starts slowly

    values = np.random.default_rng(8).exponential(size=25)
    found = stats.bootstrap(
        (values,), np.sum, n_resamples=10_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert total_interval(values, 2) == pytest.approx((found.low, found.high), rel=1e-12)


def test_unpaired_runs_and_empty_lists_are_refused() -> None:
    with pytest.raises(InvalidInput, match="2 and 3 runs"):
        ratio_interval([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(InvalidInput, match="at least one run"):
        mean_interval([])
