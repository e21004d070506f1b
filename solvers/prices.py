"""What prices on the coupling rows prove: the Lagrangian bound, whatever computed the prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from formulation.problem import Problem, jobwise
from formulation.tables import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """A problem seen at prices p >= 0.

    ``margin[c] = value[c] - p . usage[c]``, float64[columns]; ``best[j]`` the largest margin of job j,
    at least 0 unless j must run, float64[jobs]. ``total = sum of best + p . capacity`` bounds every
    answer, because (3) multiplied by p only adds what is not negative (weak duality), so any
    non-negative prices will do. ``slack`` covers the rounding of the floating-point sums.
    """

    prices: Floats
    margin: Floats
    best: Floats
    total: float
    slack: float

    @property
    def bound(self) -> float:
        """Return the bound, rounded down to an integer since every answer is worth one."""
        return float(math.floor(self.total + self.slack))


def price(problem: Problem, prices: Floats) -> Priced:
    """Return ``problem`` at ``prices`` (float64[rows]; negative and non-finite ones count as 0)."""
    p = np.where(np.isfinite(prices) & (prices > 0), prices, 0.0)
    cost = problem.cost(p)
    value = problem.value.astype(np.float64)
    margin = value - cost
    best = jobwise(np.maximum, margin, problem.job_start)
    best = np.where(problem.must_run, best, np.maximum(best, 0.0))
    sold = float((p * problem.capacity).sum())
    size = float(jobwise(np.maximum, np.abs(value) + cost, problem.job_start).sum()) + sold
    terms = 64 + int(np.diff(problem.usage_start).max(initial=0)) + len(problem.rows)
    slack = size * float(np.finfo(np.float64).eps) * terms
    return Priced(prices=p, margin=margin, best=best, total=float(best.sum()) + sold, slack=slack)
