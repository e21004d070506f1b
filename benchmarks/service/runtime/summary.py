"""The figures of the benchmark as functions of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile_50(values: Sequence[float]) -> float:
    """Return the median, or NaN of no values."""
    return statistics.median(values) if values else math.nan


def percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile, between the nearest values, or NaN of no values."""
    if len(values) < 2:
        return values[0] if values else math.nan
    return statistics.quantiles(values, n=20, method="inclusive")[-1]
