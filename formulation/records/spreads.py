"""The spread of an event in sampled futures, and what was forecast and happened before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.formulation.records.forecasts import JobForecast, Submission

SMOOTHING_S: Final = 60.0
SMOOTHING_SHARE: Final = 0.1
"""The width of the kernel around each sampled time: seconds, and a share of the time. Futures that all
agree are not certain, since a round may take place a little earlier or later."""
GRID_POINTS: Final = 200
"""The times within the sampled ones, and before them, between which scores are interpolated."""
TAIL_DOUBLINGS: Final = 24
"""The doublings by which that grid goes on after the last sampled time. Later scores count as its end's."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The times of an event in sampled futures, in seconds from the forecast.

    Their distribution is smoothed by a Cauchy kernel around each. Its heavy tails leave room for
    what no future foretells.
    """

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse spreads without times, and times that are not finite."""
        if not self.times_s or not all(map(math.isfinite, self.times_s)):
            raise InvalidInput("times_s", "must be finite, and at least one")

    @property
    def latest_s(self) -> float:
        """Return the last of the times."""
        return max(self.times_s)

    def score(self, at_s: float) -> float:
        """Return the score of an event: the logit of its place in the distribution."""
        return float(self._scores(np.array([at_s]))[0])

    def times_of(self, scores: Sequence[float]) -> list[float]:
        """Return the times of scores, in seconds from the forecast, at least 0."""
        times = np.array(self.times_s)
        reach_s = 4.0 * (SMOOTHING_S + SMOOTHING_SHARE * max(self.latest_s, 0.0))
        first_s, last_s = max(0.0, times.min() - reach_s), times.max() + reach_s
        before = np.linspace(0.0, first_s, GRID_POINTS // 4, endpoint=False)
        within = np.linspace(first_s, last_s, GRID_POINTS)
        after = last_s + reach_s * 2.0 ** np.arange(TAIL_DOUBLINGS)
        grid = np.concatenate([before[before < first_s], within, after])
        return [float(at_s) for at_s in np.interp(np.array(scores), self._scores(grid), grid)]

    def _scores(self, at_s: Floats) -> Floats:
        """Return the scores of times (float64[n])."""
        times = np.array(self.times_s)
        width = SMOOTHING_S + SMOOTHING_SHARE * np.maximum(times, 0.0)
        angle = np.arctan2(width, at_s[:, None] - times)  # pi x the mass beyond, stably
        beyond = np.mean(angle, axis=1) / math.pi
        before = np.mean(math.pi - angle, axis=1) / math.pi
        scores: Floats = np.log(before) - np.log(beyond)
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSpread:
    """A past forecast of an event. ``after_s`` is when it happened, in seconds from the forecast.

    If it has not happened yet, ``happened`` is false, and ``after_s`` is the present.
    """

    spread: Spread
    after_s: float
    happened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterForecast:
    """The forecasts of a cluster's live jobs.

    ``spreads`` has the uncorrected spread of each (event, job), from which later ones learn.
    """

    created_s: float  # seconds since 1970
    futures: int
    jobs: tuple[JobForecast, ...]
    spreads: Mapping[tuple[str, str], Spread] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastHistory:
    """The past of a cluster: the submissions of the last days, and earlier spreads by event."""

    submissions: Sequence[Submission] = ()
    past: Mapping[str, Sequence[PastSpread]] = field(default_factory=dict)
