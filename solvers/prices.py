"""What prices on the coupling rows prove: the Lagrangian bound, whatever computed the prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Prices
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.kernels.pricing import margins


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

    def shown(self) -> Shown:
        """Return the part of it that is left where margins are not needed."""
        return Shown(prices=self.prices, bound=self.bound, choice=self.choice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """What prices, float64[rows], show: the bound, and each job's best choice, int64[jobs], -1: to wait."""

    prices: Floats
    bound: float
    choice: Ints


def known_prices(problem: Problem, prices: Prices) -> Floats:
    """Return what is known of the rows' prices, float64[rows] in the problem's integers; 0: nothing.

    Prices of another objective are of another size: they prove less, and that is all.
    """
    by_row = dict(zip(prices.name, prices.price.tolist(), strict=True))
    return np.array([by_row.get(row.name, 0.0) for row in problem.rows]) * problem.scale


def price(problem: Problem, prices: Floats) -> Priced:
    """Return ``problem`` at ``prices`` (float64[rows]; negative and non-finite ones count as 0)."""
    return price_near(problem, prices, np.zeros(0))[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Open:
    """What prices no further than ``drift`` (float64[rows]) from some leave open.

    ``columns`` are those that may be best, int64, rising; ``count`` is how many each job has of them,
    int64[jobs]; ``must_take`` where waiting cannot be best, bool[jobs].
    """

    drift: Floats
    columns: Ints
    count: Ints
    must_take: Bools


def price_near(problem: Problem, prices: Floats, drift: Floats) -> tuple[Priced, Open]:
    """Return ``problem`` at ``prices``, and what is open within ``drift`` of them (empty: not asked)."""
    p = np.where(np.isfinite(prices) & (prices > 0), prices, 0.0)
    jobs = len(problem.jobs)
    margin, best, lead = np.empty(len(problem.cell)), np.empty(jobs), np.empty(jobs)
    choice, count = np.empty(jobs, np.int64), np.empty(jobs, np.int64)
    columns, must_take = np.empty(len(problem.cell), np.int64), np.empty(jobs, np.bool_)
    total, size, opened = margins(
        problem.job_start,
        problem.value,
        problem.usage_start,
        problem.row,
        problem.amount,
        problem.must_run,
        p,
        margin,
        best,
        lead,
        choice,
        drift,
        count,
        columns,
        must_take,
    )
    sold = float((p * problem.capacity).sum())
    priced = Priced(
        prices=p,
        margin=margin,
        best=best,
        lead=lead,
        choice=choice,
        total=total + sold,
        slack=rounding(size + sold, problem),
    )
    found = Open(drift=drift, columns=columns[:opened], count=count, must_take=must_take)
    return priced, found


def rounding(size: float, problem: Problem) -> float:
    """Return more than what a sum over all jobs is rounded by, where the terms come to ``size``."""
    terms = len(problem.jobs) + 64 + 2 * len(problem.rows)  # a column names each row once at most
    return size * float(np.finfo(np.float64).eps) * terms
