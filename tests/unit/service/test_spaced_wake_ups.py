"""Wake-ups by events: rounds are spaced, and no request for a round is lost."""

from __future__ import annotations

import math

from tessera.service.spaced_wakes import SpacedWakes


def test_a_wake_up_triggers_one_round_at_once() -> None:
    wakes = SpacedWakes(gap_s=3.0)
    wakes.wake("b", 10.0)
    wakes.wake("a", 10.0)
    wakes.wake("a", 10.0)
    assert wakes.next_s() == 10.0
    assert wakes.take_due(10.0) == ["a", "b"]
    assert (wakes.take_due(10.0), wakes.next_s()) == ([], math.inf)


def test_a_storm_of_events_triggers_one_round_per_gap() -> None:
    wakes, begun = SpacedWakes(gap_s=3.0), []
    for tick in range(200):  # one event every 0.1 s for 20 s
        now_s = tick / 10
        wakes.wake("c", now_s)
        for cluster in wakes.take_due(now_s):
            wakes.begin(cluster, now_s)
            begun.append(now_s)
    assert begun == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0]


def test_the_last_event_of_a_storm_triggers_a_round() -> None:
    wakes = SpacedWakes(gap_s=3.0)
    wakes.begin("c", 0.0)
    wakes.wake("c", 2.9)
    assert wakes.take_due(2.9) == []
    assert wakes.next_s() == 3.0
    assert wakes.take_due(3.0) == ["c"]


def test_a_periodic_round_answers_earlier_wake_ups() -> None:
    wakes = SpacedWakes(gap_s=3.0)
    wakes.wake("c", 5.0)
    wakes.begin("c", 5.0)
    assert wakes.next_s() == math.inf


def test_a_round_does_not_answer_wake_ups_scheduled_for_later() -> None:
    wakes = SpacedWakes(gap_s=3.0)
    wakes.wake("c", 60.0)
    wakes.begin("c", 5.0)
    assert wakes.next_s() == 60.0
    wakes.wake("c", 6.0)
    assert wakes.next_s() == 8.0


def test_clusters_do_not_wait_for_each_other() -> None:
    wakes = SpacedWakes(gap_s=3.0)
    wakes.begin("a", 0.0)
    wakes.wake("a", 1.0)
    wakes.wake("b", 1.0)
    assert wakes.take_due(1.0) == ["b"]
