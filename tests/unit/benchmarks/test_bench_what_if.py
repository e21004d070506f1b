"""The judgement of foretold changes: noise has no direction, and no change is never right."""

from __future__ import annotations

import pytest

from tessera.benchmarks.schedulers.bench_what_if import JudgedChange, describe_changes


def a_change(
    foretold: float,
    *changes: float,
    measure: str = "work",
    before: float = 100.0,
    **more: float,
) -> JudgedChange:
    values = {"low": foretold - 1.0, "high": foretold + 1.0} | more
    happened = tuple((before, before + change) for change in changes)
    return JudgedChange(
        kind="weight", measure=measure, foretold=foretold, happened=happened, **values
    )


def test_a_change_within_noise_is_not_judged_but_counted() -> None:
    figures = describe_changes([a_change(10.0, 11.0), a_change(9.0, 1.9), a_change(-1.0, -1.9)])
    assert figures["noise_share"] == pytest.approx(2 / 3)
    assert figures["calm_share"] == 0.5
    assert figures["sign_right"] == 1.0
    assert figures["median_error_of_change"] == pytest.approx(1 / 11)
    assert figures["median_error"] == pytest.approx(1 / 111)
    assert figures["median_error_of_no_change"] == pytest.approx(11 / 111)


def test_the_truth_is_the_mean_of_the_realisations_and_unknown_within_two_standard_errors() -> None:
    known = a_change(10.0, 10.0, 12.0, 14.0)
    assert known.true == 12.0
    assert not known.is_noise
    assert known.once().true == 10.0
    assert a_change(10.0, -20.0, 12.0, 44.0).is_noise


def test_waiting_has_at_least_a_minute_of_noise() -> None:
    assert a_change(0.0, 59.0, measure="wait").is_noise
    assert not a_change(0.0, 61.0, measure="wait").is_noise
    assert a_change(0.0, 61.0, measure="wait", before=10_000.0).is_noise


def test_a_foretold_change_of_nothing_is_wrong_where_something_changed() -> None:
    figures = describe_changes([a_change(0.0, 10.0), a_change(-5.0, 10.0), a_change(5.0, 10.0)])
    assert figures["sign_right"] == pytest.approx(1 / 3)
    assert figures["clear_share"] == pytest.approx(2 / 3)
    assert figures["sign_right_clear"] == 0.5


def test_intervals_cover_a_share_of_the_realisations() -> None:
    figures = describe_changes([a_change(10.0, 9.5, 10.5, 12.0, 13.0)])
    assert figures["covered"] == 0.5
