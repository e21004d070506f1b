"""Estimates corrected by runs: the iteration time of a Cell is known once a job trains on it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools
from tessera.formulation.base.values import CellKey, EstimateSource
from tessera.formulation.state.snapshot import Estimates

MEASURED_ITERATIONS: Final = 7
"""Iterations of a run after which its iteration time is known. The service ignores a run's first two
reports, and takes the median of five.
"""
TOLERANCE: Final = 1e-9
"""The relative difference of times that is rounding."""


def find_shapes(estimates: Estimates, workload: int, cell: CellKey) -> Bools:
    """Return which estimates are those of a Cell, bool[estimates]."""
    same: Bools = estimates.workload == workload
    for name, value in cell._asdict().items():
        same &= getattr(estimates, name) == value
    return same


def with_measured_time(
    estimates: Estimates, workload: int, cell: CellKey, nodes: int, iter_time_s: float
) -> Estimates:
    """Return ``estimates`` in which a Cell's time on ``nodes`` nodes is measured; inf: it does not run.

    One model has predicted all shapes of a Cell. If the time is not as predicted, the Cell's other
    shapes are therefore corrected by the same factor, and count as measured, too, unless they were
    measured before. A shape that was not expected to run, or does not, says nothing about the others.
    Estimates without the shape are returned as they are, and so are those that know the time.
    """
    e, same = estimates, find_shapes(estimates, workload, cell)
    shape = same & (e.nodes == nodes)
    if not shape.any():
        return estimates
    row = int(np.argmax(shape))
    factor, measured = iter_time_s / float(e.iter_time_s[row]), e.source == EstimateSource.MEASURED
    if abs(factor - 1.0) <= TOLERANCE and (measured[row] or e.sd[row] == 0):
        return estimates
    news, time_s = shape, e.iter_time_s
    if 0 < factor < math.inf:
        news = shape | (same & ~measured)
        time_s = np.where(news, time_s * factor, time_s)
    return replace(
        e,
        iter_time_s=np.where(shape, iter_time_s, time_s),
        source=np.where(news, int(EstimateSource.MEASURED), e.source),
        sd=np.where(news, np.nan, e.sd),
    )
