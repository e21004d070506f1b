"""Intervals over seeds, and the calibration of bands."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.records.forecasts import EVENTS, Band, Submission
from tessera.formulation.records.spreads import SMOOTHING_S, SMOOTHING_SHARE, PastSpread, Spread
from tessera.simulator.forecasts.calibration import (
    censored_quantiles,
    learn_correction,
    learn_corrections,
)
from tessera.simulator.statistics import (
    mean_interval,
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


def test_a_ratio_with_a_zero_mean_is_not_a_number() -> None:
    interval = ratio_interval([1.0, 2.0], [1.0, -1.0])
    assert all(math.isnan(x) for x in (interval.value, interval.low, interval.high))


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


WIDE = Spread((5_000.0, 8_000.0, 10_000.0, 14_000.0, 30_000.0))


def test_a_score_says_where_in_the_distribution_an_event_lies() -> None:
    assert WIDE.score(0.0) < WIDE.score(10_000.0) < WIDE.score(30_000.0) < WIDE.score(90_000.0)
    one = Spread((1_000.0,))
    width_s = SMOOTHING_S + SMOOTHING_SHARE * 1_000.0
    assert one.score(1_000.0) == pytest.approx(0.0)
    assert one.score(1_000.0 + width_s) == pytest.approx(math.log(3.0))  # a quartile of Cauchy's
    assert one.score(1_000.0 - width_s) == pytest.approx(-math.log(3.0))


def test_times_are_those_of_their_scores_but_never_in_the_past() -> None:
    scores = [WIDE.score(at_s) for at_s in (4_000.0, 12_000.0, 50_000.0)]
    assert WIDE.times_of(scores) == pytest.approx([4_000.0, 12_000.0, 50_000.0], rel=0.03)
    assert WIDE.times_of([-25.0]) == [0.0]


@pytest.mark.parametrize("times_s", [(), (1.0, math.inf), (math.nan,)])
def test_a_spread_needs_finite_times(times_s: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput, match="must be finite"):
        Spread(times_s)


def test_quantiles_without_censoring_are_those_of_the_values() -> None:
    values = np.arange(1.0, 11.0)
    every = np.ones(10, dtype=np.bool_)
    assert censored_quantiles(values, every, np.ones(10), (0.1, 0.5, 0.95)) == [1.0, 5.0, 10.0]


def test_values_known_only_to_be_larger_raise_the_quantiles_above_them() -> None:
    """By hand: 1 happens (of 4), 2 is cut, so each of the two left weighs 3/8."""
    values, happened = np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, True])
    shares = (0.25, 0.26, 0.62, 0.63)
    assert censored_quantiles(values, happened, np.ones(4), shares) == [1.0, 3.0, 3.0, 4.0]


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("cut_s", [np.inf, 20_000.0])
def test_bands_cover_what_they_state_though_futures_are_wrong(shift: float, cut_s: float) -> None:
    """Events are later than all futures say, and those after ``cut_s`` have not happened yet."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[tuple[Spread, float]]:
        rows = []
        for scale in rng.lognormal(7.0, 1.0, count).tolist():
            spread = Spread(tuple(scale * rng.uniform(1.0, 3.0, 16)))
            rows.append((spread, 2.0 * scale + shift * scale * float(rng.gamma(2.0))))
        return rows

    past = [
        PastSpread(spread=spread, after_s=min(after_s, cut_s), happened=after_s <= cut_s)
        for spread, after_s in draw(1_000)
    ]
    correction = learn_correction(past, 0.8, (), 0.0)
    fresh = [(correction.times(spread), after_s) for spread, after_s in draw(1_000)]
    covered = np.mean([low <= after_s <= high for (low, _, high), after_s in fresh])
    assert covered == pytest.approx(0.8, abs=0.04)


def test_without_history_bands_follow_the_training_traces() -> None:
    corrections = learn_corrections({}, 0.8)
    for event in EVENTS:
        low, median, high = corrections[event].times(WIDE)
        assert low < median < high


def test_a_long_history_outweighs_the_training_traces() -> None:
    past = [PastSpread(spread=WIDE, after_s=10_000.0, happened=True)] * 1_000
    band = learn_correction(past, 0.8, (-5.0, 5.0), 20.0).times(WIDE)
    assert band == pytest.approx((10_000.0, 10_000.0, 10_000.0), rel=0.01)


def test_a_coverage_must_be_a_share() -> None:
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        learn_correction([], 1.0, (0.0,), 1.0)


def test_bands_and_submissions_refuse_what_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="between low and high"):
        Band(low_s=2.0, median_s=1.0, high_s=3.0)
    with pytest.raises(InvalidInput, match="trained_share"):
        Submission(
            submit_s=0.0,
            workload=Workload(model="bert", params="1B", global_batch=1),
            iterations=1,
            requested_gpus=1,
            trained_share=1.5,
        )
