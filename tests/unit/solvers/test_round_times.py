"""The rule for when rounds are due: events share rounds, which are spaced, and a period bounds them."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tessera.solvers.rounds.times import RoundTimes
from tests.support.laws import examples


def begin_due_rounds(times: RoundTimes, events_s: list[float], until_s: float) -> list[float]:
    """Return the times of the rounds until ``until_s``, if each begins when it is due."""
    begun, events, now_s = list[float](), sorted(events_s), 0.0
    while True:
        event_s = events[0] if events else math.inf
        now_s = max(now_s, min(event_s, times.due_s()))
        if now_s > until_s:
            return begun
        while events and events[0] <= now_s:
            times.ask(events.pop(0))
        if times.due_s() <= now_s:
            times.begin(now_s)
            begun.append(now_s)


def test_an_event_after_a_quiet_time_has_its_round_at_once() -> None:
    assert begin_due_rounds(RoundTimes(spacing_s=3.0), [10.0, 20.0], 60.0) == [10.0, 20.0]


def test_the_first_round_is_due_at_once_and_then_one_in_each_period() -> None:
    times = RoundTimes(spacing_s=3.0, period_s=20.0)
    assert begin_due_rounds(times, [], 60.0) == [0.0, 20.0, 40.0, 60.0]


def test_a_round_for_an_event_restarts_the_period() -> None:
    times = RoundTimes(spacing_s=3.0, period_s=20.0)
    assert begin_due_rounds(times, [15.0], 60.0) == [0.0, 15.0, 35.0, 55.0]


def test_a_round_does_not_answer_an_event_that_is_yet_to_come() -> None:
    times = RoundTimes(spacing_s=3.0)
    times.ask(60.0)
    assert not times.begin(5.0)
    assert times.due_s() == 60.0
    times.ask(6.0)
    assert times.due_s() == 8.0
    assert times.begin(8.0)


def test_a_round_that_promises_need_does_not_wait_for_the_gap() -> None:
    times = RoundTimes(spacing_s=300.0)
    times.begin(0.0)
    times.ask(10.0)
    times.need(20.0)
    assert times.due_s() == 20.0
    assert times.begin(20.0)
    assert times.due_s() == math.inf
    times.need(30.0)
    times.need(math.inf)  # the schedule has changed
    assert times.due_s() == math.inf


def test_an_event_that_is_known_to_come_counts_without_being_asked_for() -> None:
    times = RoundTimes(spacing_s=3.0)
    times.begin(0.0)
    assert (times.due_s(1.0), times.due_s(7.0), times.due_s()) == (3.0, 7.0, math.inf)


def test_somebody_elses_round_restarts_the_period_and_answers_no_event() -> None:
    times = RoundTimes(spacing_s=3.0, period_s=20.0)
    times.begin(0.0)
    times.restart_period(15.0)
    assert times.due_s() == 35.0
    times.ask(16.0)
    times.restart_period(17.0)
    assert times.due_s() == 16.0
    times.drop()
    assert times.due_s() == 37.0


@given(
    st.lists(st.floats(0.0, 200.0), max_size=40),
    st.floats(0.1, 30.0),
    st.just(math.inf) | st.floats(1.0, 60.0),
)
@examples(60)
def test_rounds_are_spaced_and_no_event_waits_longer_than_the_gap(
    events_s: list[float], spacing_s: float, period_s: float
) -> None:
    begun = begin_due_rounds(RoundTimes(spacing_s, period_s), events_s, 300.0)
    for before_s, after_s in pairwise(begun):
        assert after_s - before_s >= min(spacing_s, period_s) - 1e-9
        assert after_s - before_s <= period_s + 1e-9
    for event_s in events_s:
        assert any(event_s <= at_s <= event_s + spacing_s + 1e-9 for at_s in begun)
