"""The figures of the benchmark as functions of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence


def percentile_50(values: Sequence[float]) -> float:
    """Return the median, or NaN of no values."""
    return statistics.median(values) if values else math.nan


def percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile, between the nearest values, or NaN of no values."""
    if len(values) < 2:
        return values[0] if values else math.nan
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def relative_error(estimates: Mapping[str, float], measured: Mapping[str, float]) -> float:
    """Return the mean of |estimate / measured - 1| over everything that was measured.

    Raises:
        KeyError: something measured has no estimate.
    """
    return statistics.fmean(abs(estimates[key] / time - 1) for key, time in measured.items())


def factor_error(estimates: Mapping[str, float], measured: Mapping[str, float]) -> float:
    """Return the geometric mean of the factors by which estimates are too high or too low.

    Unlike the relative error, it does not hide how much too low an estimate is. 1 is no error.
    """
    logs = [abs(math.log(estimates[key] / time)) for key, time in measured.items()]
    return math.exp(statistics.fmean(logs))


def choice_quality(measured: Mapping[str, float], chosen_s: float) -> float:
    """Return the best measured time over that of the chosen plan. It is above 1 for a better plan."""
    return min(measured.values()) / chosen_s
