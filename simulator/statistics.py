"""Confidence intervals over seeds, for means, totals and ratios of paired runs.

Means and ratios use Student's t. There are often only three to ten seeds, for which the percentile
bootstrap is too narrow. The bootstrap serves totals over many loads, each of which is small and far
from normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import stdtrit

from tessera.formulation.base.errors import InvalidInput

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value and its confidence interval.

    One run gives no interval: ``low`` and ``high`` are NaN.
    """

    value: float
    low: float
    high: float


def mean_interval(values: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of independent runs and its t interval."""
    mean, low, high = mean_intervals(np.asarray(values, float)[:, None], confidence)
    return Interval(value=float(mean[0]), low=float(low[0]), high=float(high[0]))


def mean_intervals(
    runs: np.ndarray, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, low and high of each column of ``runs``, of shape (seeds, points)."""
    count = len(runs)
    if count == 0:
        raise InvalidInput("runs", "must not be empty: an interval needs at least one run")
    mean = runs.mean(axis=0)
    if count == 1:
        nothing = np.full_like(mean, math.nan)
        return mean, nothing, nothing
    half = t_quantile(count - 1, confidence) * runs.std(axis=0, ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def ratio_interval(
    ours: Sequence[float] | np.ndarray,
    theirs: Sequence[float] | np.ndarray,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Return mean(ours) / mean(theirs) of runs paired by seed. If mean(theirs) is 0, return NaN.

    The interval is that of the ratio estimator (Cochran, "Sampling Techniques", 3rd edition, 6.4):
    the t interval of the mean of ours - ratio * theirs, divided by the mean of theirs. A seed that
    is hard for both does not widen it. The approximation holds if the mean of ``theirs`` is well
    away from 0.
    """
    a, b = np.asarray(ours, float), np.asarray(theirs, float)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise InvalidInput(
            "ours, theirs", f"must be paired run by run; they have {a.size} and {b.size} runs"
        )
    over = float(b.mean())
    if over == 0:
        return Interval(value=math.nan, low=math.nan, high=math.nan)
    value = float(a.mean()) / over
    rest = mean_interval(a - value * b, confidence)  # its mean is 0
    half = (rest.high - rest.low) / 2 / abs(over)
    return Interval(value=value, low=value - half, high=value + half)


def total_interval(values: Sequence[float] | np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the total of ``values``, by percentile bootstrap."""
    rng = np.random.default_rng(seed)
    drawn = rng.choice(values, (RESAMPLES, len(values))).sum(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def t_quantile(freedom: int, confidence: float) -> float:
    """Return the two-sided t quantile of ``confidence`` for ``freedom`` degrees of freedom."""
    return float(stdtrit(freedom, (1 + confidence) / 2))
