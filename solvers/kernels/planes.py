"""The minimum of the upper envelope of some planes inside a box.

It is found by a dense simplex method, for a handful of unknowns.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Floats
from tessera.solvers.kernels.jit import compile_lazily

MOST_PIVOTS = 2000
_TINY = 1e-11


@compile_lazily
def lowest_point(height: Floats, slopes: Floats, low: Floats, high: Floats, point: Floats) -> float:
    """Fill ``point`` with the z in [low, high] that minimizes max_k height[k] + slopes[k] . z.

    Return the minimum, or NaN if it was not reached within ``MOST_PIVOTS`` pivots. The shapes are:
    ``height`` (planes,), ``slopes`` (planes, unknowns), and (unknowns,) for the others. It is the
    simplex method on the dual,

        max  sum_k l_k height_k + sum_r (m_r low_r - n_r high_r)
        with sum_k l_k slopes_kr - m_r + n_r = 0 for each r,  sum_k l_k = 1,  l, m, n >= 0,

    whose basis has one column more than there are unknowns. It begins at the first plane.
    """
    planes, unknowns = slopes.shape
    size = unknowns + 1
    basis = np.empty(
        size, dtype=np.int64
    )  # column k: plane; planes + r: m_r; planes + unknowns + r: n_r
    inverse = np.zeros((size, size))
    level = np.empty(size)  # the value of each basic column
    for r in range(unknowns):
        slope = slopes[0, r]
        sign = -1.0 if slope >= 0.0 else 1.0
        basis[r] = planes + r if slope >= 0.0 else planes + unknowns + r
        inverse[r, r] = sign
        inverse[r, unknowns] = -sign * slope
        level[r] = abs(slope)
    basis[unknowns] = 0
    inverse[unknowns, unknowns] = 1.0
    level[unknowns] = 1.0
    multiplier = np.empty(size)
    column = np.empty(size)
    largest = 0.0
    for k in range(planes):
        largest = max(largest, abs(height[k]))
    for pivot in range(MOST_PIVOTS):
        # Compute the multipliers of the present basis.
        for i in range(size):
            total = 0.0
            for j in range(size):
                total += _profit(basis[j], height, low, high, planes, unknowns) * inverse[j, i]
            multiplier[i] = total
        entering, gain = -1, _TINY * (1.0 + largest)
        # After that many pivots, taking the first column that gains (Bland) ends every cycle.
        bland = pivot > MOST_PIVOTS // 2
        # Find the column that enters: the one with the largest reduced profit.
        for k in range(planes + 2 * unknowns):
            reduced = _profit(k, height, low, high, planes, unknowns)
            if k < planes:
                reduced -= float(multiplier[unknowns])
                for r in range(unknowns):
                    reduced -= multiplier[r] * slopes[k, r]
            elif k < planes + unknowns:
                reduced += multiplier[k - planes]
            else:
                reduced -= multiplier[k - planes - unknowns]
            if reduced > gain:
                entering, gain = k, reduced
                if bland:
                    break
        if entering < 0:
            # No column gains, so the multipliers are the minimum.
            for r in range(unknowns):
                point[r] = min(max(-multiplier[r], low[r]), high[r])
            return float(multiplier[unknowns])
        _solve(inverse, entering, slopes, planes, unknowns, column)
        # Find the column that leaves, by the ratio test.
        leaving, step = -1, np.inf
        for i in range(size):
            if column[i] > _TINY:
                ratio = level[i] / column[i]
                if ratio < step - _TINY or (ratio < step + _TINY and basis[i] < basis[leaving]):
                    leaving, step = i, min(ratio, step)
        if leaving < 0:
            return np.nan
        _pivot(inverse, level, column, leaving)
        basis[leaving] = entering
    return np.nan


@compile_lazily
def _profit(k: int, height: Floats, low: Floats, high: Floats, planes: int, unknowns: int) -> float:
    if k < planes:
        return float(height[k])
    if k < planes + unknowns:
        return float(low[k - planes])
    return -float(high[k - planes - unknowns])


@compile_lazily
def _solve(
    inverse: Floats, k: int, slopes: Floats, planes: int, unknowns: int, column: Floats
) -> None:
    """Fill ``column`` with column k of the program in terms of the basis."""
    size = unknowns + 1
    for i in range(size):
        if k < planes:
            total = inverse[i, unknowns]
            for r in range(unknowns):
                total += inverse[i, r] * slopes[k, r]
            column[i] = total
        elif k < planes + unknowns:
            column[i] = -inverse[i, k - planes]
        else:
            column[i] = inverse[i, k - planes - unknowns]


@compile_lazily
def _pivot(inverse: Floats, level: Floats, column: Floats, leaving: int) -> None:
    """Update the basis inverse and the values of the basic columns after a pivot."""
    size = level.size
    scale = 1.0 / column[leaving]
    for j in range(size):
        inverse[leaving, j] *= scale
    level[leaving] *= scale
    for i in range(size):
        if i != leaving and column[i] != 0.0:
            factor = column[i]
            for j in range(size):
                inverse[i, j] -= factor * inverse[leaving, j]
            level[i] = max(level[i] - factor * level[leaving], 0.0)
