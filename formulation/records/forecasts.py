"""Forecasts of jobs' starts and finishes, and the submissions that they are drawn from.

Agents import this module, so it stays light.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload

START: Final = "start"
FINISH: Final = "finish"
EVENTS: Final = (START, FINISH)
"""The events of a job that are forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job of the last days, as far as forecasts learn from it.

    ``trained_share`` is the share of its iterations that it had trained when it ended: 1 if it
    succeeded, less if it failed or was cancelled. A program that decides its end may succeed with
    less. It is NaN if the job has not ended, or such a program reported no iterations.
    """

    submit_s: float  # seconds since 1970
    workload: Workload
    iterations: int
    requested_gpus: int
    requested_gpu_type: str = ""  # "" for any type
    tenant: str = ""
    priority: int = 1
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
    created_s: float  # seconds since 1970
    coverage: float
    position: int = 0
    start: Band | None = None
    finish: Band | None = None
    why_not: str = ""
