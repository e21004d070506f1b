"""Limits on how often somebody may call."""

from __future__ import annotations

import pytest

from tessera.formulation.errors import TooBusy
from tessera.service.security import limits
from tessera.service.security.limits import CallRate
from tests.support.hand_clock import HandClock


def taken(rate: CallRate, name: str) -> int:
    """Take until the rate refuses; return how many calls it allowed."""
    for count in range(10_000):
        try:
            rate.take(name)
        except TooBusy:
            return count
    raise AssertionError("there is no limit")


def test_a_sixth_of_the_calls_may_come_at_once_and_the_rest_over_a_minute() -> None:
    clock = HandClock()
    rate = CallRate(600, "calls", clock)
    assert taken(rate, "a") == 100
    clock.now_s += 2.0
    assert taken(rate, "a") == 20
    clock.now_s += 3600.0
    assert taken(rate, "a") == 100


def test_callers_are_counted_apart() -> None:
    rate = CallRate(60, "calls", HandClock())
    assert taken(rate, "a") == 10
    assert taken(rate, "b") == 10


def test_the_refusal_says_who_may_call_how_often_and_when_to_call_again() -> None:
    rate = CallRate(6, "enrolments", HandClock())
    rate.take("10.0.0.1")
    with pytest.raises(
        TooBusy, match=r"enrolments of 10\.0\.0\.1 may not exceed 6 a minute; .* 10\.0 s"
    ):
        rate.take("10.0.0.1")


def test_a_call_that_does_not_count_is_put_back() -> None:
    rate = CallRate(60, "calls", HandClock())
    for _ in range(100):
        rate.take("a")
        rate.put_back("a")
    assert taken(rate, "a") == 10
    rate.put_back("nobody")
    assert taken(rate, "nobody") == 10


def test_zero_is_no_limit() -> None:
    rate = CallRate(0, "calls", HandClock())
    for _ in range(1000):
        rate.take("a")


def test_a_flood_of_names_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMEMBERED", 3)
    rate = CallRate(60, "calls", HandClock())
    for number in range(100):
        rate.take(str(number))
    assert len(rate._left) == 3
    assert taken(rate, "99") == 9
