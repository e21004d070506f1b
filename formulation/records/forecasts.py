"""Forecasts of jobs' starts and finishes, and the submissions that they are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.tables import Floats
from tessera.formulation.values import Workload

START: Final = "start"
FINISH: Final = "finish"
EVENTS: Final = (START, FINISH)
"""The events of a job that are forecast."""
SPREAD_QUANTILES: Final = (0.1, 0.9)
"""The quantiles of sampled times that measure the spread below and above the median."""
LEAST_SPREAD_S: Final = 60.0
LEAST_SPREAD_SHARE: Final = 0.05
"""The least spread: seconds, and a share of the time until the median. Futures that all agree are not
certain, since a round may take place a little earlier or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job of the last days, as far as forecasts learn from it.

    ``trained_share`` is the share of its iterations that it had trained when it ended: 1 if it
    succeeded, less if it failed or was cancelled. It is NaN if the job has not ended.
    """

    submit_s: float  # seconds since 1970
    workload: Workload
    iterations: int
    requested_gpus: int
    requested_type: str = ""  # "" for any type
    tenant: str = ""
    queue: int = 1
    weight: float = 1.0
    guaranteed: bool = False
    trained_share: float = math.nan

    def __post_init__(self) -> None:
        """Refuse shares that no job can have."""
        if not (math.isnan(self.trained_share) or 0 <= self.trained_share <= 1):
            raise InvalidInput("trained_share", "must lie in [0, 1], or be NaN for a live job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """An interval of time, in seconds since 1970, and its middle.

    The event lies in it with the coverage of its forecast. ``high_s`` is inf if the futures were
    not followed for long enough to say.
    """

    low_s: float
    median_s: float
    high_s: float

    def __post_init__(self) -> None:
        """Refuse bands whose times are out of order."""
        if not self.low_s <= self.median_s <= self.high_s:
            raise InvalidInput("band", "must have its median between low and high")

    def covers(self, at_s: float) -> bool:
        """Return whether a time lies in the band."""
        return self.low_s <= at_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForecast:
    """The forecast of a job, with bands that hold their event with probability ``coverage``.

    ``position`` is its place among waiting jobs by expected start, from 1; 0 if it does not wait.
    ``start`` is None if the job runs. ``why_not`` says why there are no bands, or is empty.
    """

    job: str
    made_s: float  # seconds since 1970
    coverage: float
    position: int = 0
    start: Band | None = None
    finish: Band | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The times of an event in sampled futures, in seconds from the forecast."""

    low_s: float
    median_s: float
    high_s: float

    @classmethod
    def of(cls, sampled_s: Floats) -> Spread:
        """Return the spread of ``sampled_s`` (float64[futures]), which must be finite."""
        low_s, high_s = np.quantile(sampled_s, SPREAD_QUANTILES)
        return cls(low_s=float(low_s), median_s=float(np.median(sampled_s)), high_s=float(high_s))

    @property
    def below_s(self) -> float:
        """Return the unit of scores below the median."""
        return max(self.median_s - self.low_s, self._least_s)

    @property
    def above_s(self) -> float:
        """Return the unit of scores above the median."""
        return max(self.high_s - self.median_s, self._least_s)

    @property
    def _least_s(self) -> float:
        return LEAST_SPREAD_S + LEAST_SPREAD_SHARE * max(self.median_s, 0.0)

    def score(self, at_s: float) -> float:
        """Return the signed score of an event, or of the present, ``at_s`` after the forecast."""
        away_s = at_s - self.median_s
        return away_s / (self.above_s if away_s > 0 else self.below_s)

    def time_of(self, score: float) -> float:
        """Return the time of a score, in seconds from the forecast, at least 0."""
        return max(0.0, self.median_s + score * (self.above_s if score > 0 else self.below_s))


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

    made_s: float  # seconds since 1970
    futures: int
    jobs: tuple[JobForecast, ...]
    spreads: Mapping[tuple[str, str], Spread] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastHistory:
    """What a forecast learns from: the submissions of the last days, and past spreads by event."""

    submissions: Sequence[Submission] = ()
    past: Mapping[str, Sequence[PastSpread]] = field(default_factory=dict)
