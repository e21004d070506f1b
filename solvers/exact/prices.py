"""The Lagrangian bound that shadow prices prove, whatever computed the prices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.certificates import Certificate, PriceLeaf
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.problem import MAX_TOTAL, Problem, reduce_by_job
from tessera.formulation.state.last_round import Prices
from tessera.solvers.kernels.pricing import price_columns

PROVED_BY_PRICES: Final = "prices"
"""The label of a bound that a certificate of one leaf proves."""
SUM_BITS: Final = 53
"""Bits of the largest sum of values over the denominator of exact prices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedProblem:
    """A problem evaluated at shadow prices p >= 0.

    ``margin[c] = value[c] - p . usage[c]``, float64[columns]. ``best[j]`` is the largest margin of
    job j, float64[jobs]; it is at least 0 unless the job must run. ``choice[j]`` is the column with
    that margin, int64[jobs]; -1 means that the job waits. ``lead[j]`` is the margin by which it
    beats the job's next best choice, float64[jobs].

    ``total = sum of best + p . capacity`` bounds every answer. The reason is that (3) multiplied by
    p only adds something non-negative (weak duality), so any non-negative prices will do. ``slack``
    covers the rounding of the floating-point sums.
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
        """Return the bound, rounded down to an integer since values are integers."""
        return float(math.floor(self.total + self.slack))

    def shown(self) -> PriceResult:
        """Return the part that is enough if margins are not needed."""
        return PriceResult(prices=self.prices, bound=self.bound, choice=self.choice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriceResult:
    """The result of shadow prices, float64[rows].

    It has the bound and each job's best choice, int64[jobs]; -1 means that the job waits.
    """

    prices: Floats
    bound: float
    choice: Ints


def known_prices(problem: Problem, prices: Prices) -> Floats:
    """Return the known shadow prices of the rows, float64[rows] in the problem's integers.

    A row has 0 if nothing is known. Prices from another objective have another magnitude: they
    prove less, and do no other harm.
    """
    by_row = dict(zip(prices.name, prices.price.tolist(), strict=True))
    return np.array([by_row.get(row.name, 0.0) for row in problem.rows]) * problem.scale


def price_problem(problem: Problem, prices: Floats) -> PricedProblem:
    """Return ``problem`` at ``prices`` (float64[rows]; negative and non-finite ones count as 0)."""
    return price_near(problem, prices, np.zeros(0))[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenPart:
    """The part of a problem that stays open at all prices within ``drift`` of given ones.

    ``drift`` is float64[rows]. ``columns`` are those that may be best, int64, rising. ``count`` is
    the number of these that each job has, int64[jobs]. ``must_take`` is true where waiting cannot
    be best, bool[jobs].
    """

    drift: Floats
    columns: Ints
    count: Ints
    must_take: Bools


def price_near(problem: Problem, prices: Floats, drift: Floats) -> tuple[PricedProblem, OpenPart]:
    """Return ``problem`` at ``prices``, and what stays open within ``drift`` of them.

    If ``drift`` is empty, the open part is not computed.
    """
    p = np.where(np.isfinite(prices) & (prices > 0), prices, 0.0)
    jobs = len(problem.jobs)
    margin, best, lead = np.empty(len(problem.cell)), np.empty(jobs), np.empty(jobs)
    choice, count = np.empty(jobs, np.int64), np.empty(jobs, np.int64)
    columns, must_take = np.empty(len(problem.cell), np.int64), np.empty(jobs, np.bool_)
    total, size, opened = price_columns(
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
    priced = PricedProblem(
        prices=p,
        margin=margin,
        best=best,
        lead=lead,
        choice=choice,
        total=total + sold,
        slack=rounding_bound(size + sold, problem),
    )
    open_part = OpenPart(drift=drift, columns=columns[:opened], count=count, must_take=must_take)
    return priced, open_part


def rounding_bound(size: float, problem: Problem) -> float:
    """Return an upper bound on the rounding of a sum over jobs whose terms add up to ``size``."""
    terms = len(problem.jobs) + 64 + 2 * len(problem.rows)  # a column uses each row at most once
    return size * float(np.finfo(np.float64).eps) * terms


def price_at_hint(problem: Problem, hint: Solution | None) -> PricedProblem:
    """Return ``problem`` at the shadow prices of ``hint``, or at prices of 0 if it has none."""
    known = hint is not None and len(hint.prices) == len(problem.rows)
    return price_problem(problem, hint.prices if hint and known else np.zeros(len(problem.rows)))


def whole_prices(problem: Problem, prices: Floats, scale: int) -> Floats:
    """Return ``prices`` times ``scale``, rounded up. Rows of no capacity are not used, and free."""
    return np.where(problem.capacity > 0, np.ceil(prices * scale), 0.0)


def leaf_prices(whole: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the integer prices of rows as a certificate's leaf lists them: those that are not 0."""
    return tuple((row, price) for row, price in enumerate(whole) if price)


def price_scale(problem: Problem) -> int:
    """Return the denominator of the problem's exact prices, a power of two.

    Sums of values over it fit into 64 bits.
    """
    top = reduce_by_job(np.maximum, np.abs(problem.value).astype(np.float64), problem.job_start)
    size = max(float(top.sum()), 1.0)
    return 1 << max(0, min(PRICE_BITS, SUM_BITS - math.ceil(math.log2(size))))


PRICE_BITS: Final = 20
"""Bits behind the binary point of a price in a certificate, unless sums would be too large."""

CAPACITY_BITS: Final = 7
"""Bits of a price behind those of the largest capacity, so that rounding costs 1 / 128 of a unit."""

MAX_EXACT: Final = 2**62
"""Limit below which sums of 64-bit integers are exact."""


def certificate_of_prices(problem: Problem, prices: Floats) -> Certificate:
    """Return the certificate of one leaf that shadow prices of the rows, float64[rows], prove.

    If ``prices`` are empty, because they are not known, all rows are free.
    Prices are rounded to a multiple of a power of two. Negative and non-finite ones count as 0, and
    those above 2^53 as 2^53. The bound is exact for the rounded prices, so it holds in any case.
    """
    known = prices if len(prices) else np.zeros(len(problem.rows))
    use = np.zeros(len(problem.rows))
    np.maximum.at(use, problem.row, problem.amount)
    np.maximum.at(use, problem.idle_row, problem.idle_amount)
    sold = np.isfinite(known) & (known > 0) & (use > 0)  # a row that nothing uses is free
    p = np.minimum(np.where(sold, known, 0.0), MAX_TOTAL)
    bits, dtype = _price_bits(problem, p, use)
    scale = 1 << bits
    whole = [round(price * scale) for price in p.tolist()]
    price = np.array(whole, dtype)
    margin = problem.value.astype(dtype) * scale
    margin -= _sums(problem.usage_start, price[problem.row] * problem.amount)
    waiting = -_sums(problem.idle_start, price[problem.idle_row] * problem.idle_amount)
    some = np.diff(problem.job_start) > 0
    best = np.zeros(len(problem.jobs), dtype)
    if some.any():
        best[some] = np.maximum.reduceat(margin, problem.job_start[:-1][some])
    best = np.where(problem.must_run & some, best, np.maximum(best, waiting))
    total = sum(best.tolist()) + sum(
        price * row.capacity for price, row in zip(whole, problem.rows, strict=True)
    )
    step = int(np.gcd.reduce(problem.value, initial=0)) or 1
    bound = total // scale
    return Certificate(
        bound=bound - bound % step,
        denominator=scale,
        root=PriceLeaf(prices=leaf_prices(whole)),
    )


def _price_bits(problem: Problem, prices: Floats, use: Floats) -> tuple[int, type[np.generic]]:
    """Return the bits of prices with which 64-bit sums are exact; 0 and Python's integers if none.

    ``use`` is float64[rows], the largest use of each row.
    """
    top = float(np.abs(problem.value).max(initial=0))

    def bits_with(rounding: float) -> int:
        size = top + float(((prices + rounding) * use).sum())
        room = MAX_EXACT / (max(size, 1.0) * (len(problem.jobs) + 1))
        return math.floor(math.log2(room)) - 1

    bits = bits_with(2.0**-PRICE_BITS)
    if bits < PRICE_BITS:
        bits = bits_with(1.0)
    # Rounded prices of a row must not cost much in all: those of large amounts are small.
    most = max(PRICE_BITS, int(problem.capacity.max(initial=0)).bit_length() + CAPACITY_BITS)
    return (min(bits, most), np.int64) if bits >= 0 else (0, np.object_)


def _sums(start: Ints, entries: Ints) -> Ints:
    """Return the sum of each span of ``start`` over ``entries``."""
    sums = np.zeros(len(start) - 1, entries.dtype)
    some = np.diff(start) > 0
    if some.any():
        sums[some] = np.add.reduceat(entries, start[:-1][some])
    return sums
