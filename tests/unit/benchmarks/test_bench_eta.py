"""The judgement of bands: what is known at each forecast, fixed offsets, and open bands."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.benchmarks.schedulers.bench_eta import (
    JudgedBands,
    band_ratio,
    judge_run,
    narrowest_offsets_s,
)
from tessera.benchmarks.schedulers.foretold import ForetoldEvent
from tessera.formulation.records.forecasts import FINISH, START
from tessera.formulation.records.spreads import Spread

HORIZON_S = 10_000.0


def an_event(made_s: float, after_s: float, *times_s: float, event: str = FINISH) -> ForetoldEvent:
    return ForetoldEvent(
        event=event, made_s=made_s, job="a", spread=Spread(times_s), after_s=after_s
    )


def test_the_narrowest_offsets_hold_the_share_and_no_less() -> None:
    times_s = np.array([0.0, 10.0, 11.0, 12.0, 50.0])
    assert narrowest_offsets_s(times_s, 0.6) == 2.0
    assert narrowest_offsets_s(times_s, 0.61) == 12.0
    assert narrowest_offsets_s(times_s, 1.0) == 50.0


def test_a_ratio_compares_with_offsets_from_the_forecast_or_from_its_medians() -> None:
    bands = JudgedBands.of([(90.0, 100.0, 110.0, 95.0), (990.0, 1_000.0, 1_010.0, 1_005.0)])
    assert band_ratio([bands], around_medians=False) == pytest.approx(20.0 / 910.0)
    assert band_ratio([bands], around_medians=True) == pytest.approx(20.0 / 10.0)


def test_later_events_do_not_change_earlier_bands() -> None:
    early = [an_event(0.0, 500.0, 400.0, 600.0), an_event(1_000.0, 700.0, 600.0, 800.0)]
    late = [an_event(2_000.0, 9_000.0, 100.0, 200.0)]
    alone = judge_run(early, HORIZON_S)[FINISH]
    together = judge_run(early + late, HORIZON_S)[FINISH]
    assert together.low_s[:2].tolist() == alone.low_s.tolist()
    assert together.high_s[:2].tolist() == alone.high_s.tolist()


def test_what_has_not_happened_by_a_forecast_is_not_known_to_it() -> None:
    """Whether the first event happens 3,000 s or 8,000 s on, the second forecast knows the same."""
    second = an_event(1_000.0, 700.0, 600.0, 800.0)
    bands = [
        judge_run([an_event(0.0, after_s, 400.0, 600.0), second], HORIZON_S)[FINISH]
        for after_s in (3_000.0, 8_000.0, math.inf)
    ]
    assert len({(band.low_s[1], band.high_s[1]) for band in bands}) == 1


def test_earlier_misses_make_bands_wider() -> None:
    second = an_event(9_000.0, 700.0, 600.0, 800.0)
    width_s = [
        judge_run([an_event(0.0, after_s, 400.0, 600.0)] * 300 + [second], HORIZON_S)[FINISH]
        .width_s[-1]
        .item()
        for after_s in (500.0, 1_500.0)
    ]
    assert width_s[1] > 2 * width_s[0]


def test_bands_that_end_beyond_the_horizon_are_not_judged() -> None:
    judged = judge_run([an_event(0.0, math.inf, HORIZON_S, HORIZON_S)], HORIZON_S)
    assert len(judged[FINISH]) == 0
    assert len(judged[START]) == 0
