"""What prices on the coupling rows prove: the Lagrangian bound, whatever computed the prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from formulation.problem import Problem
from formulation.snapshot import Prices
from formulation.tables import Floats, Ints
from solvers.kernels.pricing import margins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """A problem seen at prices p >= 0.

    ``margin[c] = value[c] - p . usage[c]``, float64[columns]; ``best[j]`` the largest margin of job j,
    at least 0 unless j must run, float64[jobs]; ``lead[j]`` by how much that beats the job's next best
    choice, float64[jobs]; ``choice[j]`` that column, -1: waiting, int64[jobs].
    ``total = sum of best + p . capacity`` bounds every answer, because (3) multiplied by p only adds
    what is not negative (weak duality), so any non-negative prices will do.
    ``slack`` covers the rounding of the floating-point sums.
    """

    prices: Floats
    margin: Floats
    best: Floats
    lead: Floats
    choice: Ints
    total: float
    slack: float

    @property
    def bound(self) -> float:
        """Return the bound, rounded down to an integer since every answer is worth one."""
        return float(math.floor(self.total + self.slack))


def known_prices(problem: Problem, prices: Prices) -> Floats:
    """Return what is known of the rows' prices, float64[rows] in the problem's integers; 0: nothing.

    Prices of another objective are of another size: they prove less, and that is all.
    """
    by_row = dict(zip(prices.name, prices.price.tolist(), strict=True))
    return np.array([by_row.get(row.name, 0.0) for row in problem.rows]) * problem.scale


def price(problem: Problem, prices: Floats) -> Priced:
    """Return ``problem`` at ``prices`` (float64[rows]; negative and non-finite ones count as 0)."""
    p = np.where(np.isfinite(prices) & (prices > 0), prices, 0.0)
    jobs = len(problem.jobs)
    margin, best, lead = np.empty(len(problem.cell)), np.empty(jobs), np.empty(jobs)
    choice = np.empty(jobs, dtype=np.int64)
    total, size = margins(
        problem.job_start, problem.value, problem.usage_start, problem.row, problem.amount,
        problem.must_run, p, margin, best, lead, choice,
    )  # fmt: skip
    sold = float((p * problem.capacity).sum())
    terms = jobs + 64 + int(np.diff(problem.usage_start).max(initial=0)) + len(problem.rows)
    slack = (size + sold) * float(np.finfo(np.float64).eps) * terms
    return Priced(
        prices=p,
        margin=margin,
        best=best,
        lead=lead,
        choice=choice,
        total=total + sold,
        slack=slack,
    )
