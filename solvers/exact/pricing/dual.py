"""The Lagrangian dual by cutting planes in a trust region (a box).

    minimize over p >= 0
        L(p) = p . b + sum over jobs of max(0 unless it must run, max_c v_c - p . u_c)

L is convex and piecewise linear. b less what the best columns use is a subgradient, so each
evaluation gives L and a plane below it. The next prices minimize the highest plane inside a box
around the best prices so far. The box grows if the model was right and the minimum was at the box's
edge, and shrinks if the model was wrong. There are as many unknowns as rows, a handful. So nearly
all time is spent on evaluations, and one evaluation is one compiled pass over the columns
(``tessera.solvers.kernels.pricing``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import Problem, reduce_by_job
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import fits_alone
from tessera.solvers.exact.prices import PriceResult, price_near, rounding_bound
from tessera.solvers.exact.pricing.surface import Surface, surface_near, whole_surface
from tessera.solvers.kernels.planes import lowest_point
from tessera.solvers.kernels.pricing import price_best_columns, price_columns
from tessera.solvers.sums import dot, dot_rows

MOST_PASSES: Final = 400
"""Maximum number of evaluations: 30 to 60 are usual with up to 10 rows."""
GOOD_STEP: Final = 0.1
"""Share of the promised decrease that a step must achieve; otherwise the box shrinks."""
SHRINK_FACTOR: Final = 0.5
GROW_FACTOR: Final = 2.0
LEAP_FACTOR: Final = 4.0
MAX_BOX_SIZE: Final = 1e6
"""Size of the largest box, in typical prices.

It is far more than is needed to find that some jobs cannot all run."""
WARM_BOX: Final = 0.05
"""Size of the first box around known prices, as a share of these.

Around a guess, the box is as large as the typical prices."""
MIN_PRICE_SHARE: Final = 0.1
"""Least value of a price when a box is drawn around it, as a share of a typical price."""
DRIFT_SHARE: Final = 0.02
"""The distance to which prices near known ones may go, as a share of these.

It is ``DRIFT_OF_SMALL_ROUNDS / sqrt(jobs)`` if that is more. As measured at 2 % churn, prices move by 0.02
with 10,000 jobs and more, and by 0.045 with 2,000."""
DRIFT_OF_SMALL_ROUNDS: Final = 3.0
PLANES_A_ROW: Final = 4
"""Planes kept for each row, the highest at the best prices, in addition to the newest ones."""

_NO_DRIFT: Final = (
    np.zeros(0),
    np.zeros(0, np.int64),
    np.zeros(0, np.int64),
    np.zeros(0, np.bool_),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dual:
    """The result of the descent: float64[rows] prices, L there, and the number of evaluations.

    ``infeasible`` means that L fell below the value of any answer, which proves that the must-run
    jobs do not fit together.
    """

    prices: Floats
    total: float
    passes: int
    infeasible: bool


def descend(
    problem: Problem,
    budget: Budget,
    start: Floats | None,
    *,
    most: float,
    tolerance: float,
    known: float = -math.inf,
) -> Dual:
    """Minimize L until no model can promise a decrease of more than the share ``tolerance`` of it.

    It also ends once L proves that an answer of value ``known`` is within the budget's gap.
    ``start`` are prices to begin with, e.g. of the last round; if it is None, prices are guessed.
    It stops after ``most`` evaluations, when the budget is spent, or when a model cannot be solved.
    L is a true bound wherever it stops.
    """
    surface, size = whole_surface(problem), _size(problem)
    unit = size / np.maximum(surface.capacity, 1.0)
    if start is not None and len(start) == len(unit) and bool(np.any(start > 0)):
        first = np.where(np.isfinite(start) & (start > 0), start, 0.0)
        box = WARM_BOX * np.maximum(first, MIN_PRICE_SHARE * unit)
    else:
        first, box = _guess(problem, unit), unit.copy()
    descent = _Descent(surface, first, box, unit, size, _least_worth(problem))
    return descent.run(budget, min(most, MOST_PASSES), tolerance, known)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NearDual:
    """The result near some prices: better prices, and what they show.

    ``jobs`` (rising) are those whose choice was not clear before. ``lead`` is by how much their
    choice beats the next best. ``inside`` means that no price is held back by the limits around its
    start.
    """

    shown: PriceResult
    jobs: Ints
    lead: Floats
    inside: bool


def descend_near(problem: Problem, prices: Floats, tolerance: float) -> NearDual:
    """Minimize L near ``prices`` in one pass over all columns.

    At these prices the capacity must cost something. Most jobs have the same choice at all nearby
    prices (``price_columns`` proves it), so few columns are evaluated again. No clock is read. The
    resulting bound is as true as any other.
    """
    capacity = problem.capacity.astype(np.float64)
    typical_cost = dot(prices, capacity) / max(int(np.count_nonzero(prices)), 1)  # of a row
    unit = typical_cost / np.maximum(capacity, 1.0)
    share = max(DRIFT_SHARE, DRIFT_OF_SMALL_ROUNDS / math.sqrt(len(problem.jobs) + 1))
    drift = share * np.maximum(prices, MIN_PRICE_SHARE * unit)
    priced, open_part = price_near(problem, prices, drift)
    left = surface_near(problem, priced, open_part)
    surface, size = left.surface, max(abs(priced.total), 1.0)
    typical = np.maximum(unit, size / np.maximum(capacity, 1.0))
    descent = _Descent(surface, priced.prices, drift / LEAP_FACTOR, typical, size, -math.inf)
    endless = Budget(remaining_s=lambda: math.inf, gap=0.0)
    best = descent.run(endless, MOST_PASSES, tolerance, -math.inf).prices
    jobs, columns = len(left.jobs), len(left.columns)
    lead, chosen = np.empty(jobs), np.empty(jobs, np.int64)
    total, size, _ = price_columns(
        surface.job_start,
        surface.value,
        surface.usage_start,
        surface.row,
        surface.amount,
        surface.must_run,
        best,
        np.empty(columns),
        np.empty(jobs),
        lead,
        chosen,
        *_NO_DRIFT,
    )
    choice, runs = left.settled.copy(), chosen >= 0
    choice[left.jobs[runs]] = left.columns[chosen[runs]]
    sold = dot(best, surface.capacity)
    size += abs(surface.offset) + dot(best, np.abs(surface.capacity))
    bound = math.floor(surface.offset + sold + total + rounding_bound(size, problem))
    return NearDual(
        shown=PriceResult(prices=best, bound=float(bound), choice=choice),
        jobs=left.jobs,
        lead=lead,
        inside=not descent.limited,
    )


class _Descent:
    """The model so far.

    ``unit`` has typical prices, float64[rows]. ``size`` is about the value of all jobs. ``worth``
    is the least value of any answer, without the jobs that need not run.
    """

    def __init__(
        self, surface: Surface, start: Floats, box: Floats, unit: Floats, size: float, worth: float
    ) -> None:
        self._surface, self._size, self._worth = surface, size, worth
        self._capacity = surface.capacity
        self._best, self._box = start, box
        self._largest_box = MAX_BOX_SIZE * unit
        self._usage = np.zeros(len(start))
        self._slopes = np.empty((0, len(start)))
        self._levels = np.empty(0)  # of each plane at p = 0
        self._total = math.inf
        self._passes = 0
        self.limited = False  # whether the surface's limits were met in the last step

    def run(self, budget: Budget, most: float, tolerance: float, known: float) -> Dual:
        """Take steps until the model promises too little."""
        self._evaluate(self._best)
        while self._passes < most and not budget.expired() and not self._infeasible():
            budget.check()
            if self._total - known <= budget.gap * max(abs(self._total), 1.0):
                break
            step = self._step()
            if step is None:
                break
            prices, promise, inside = step
            enough = tolerance * max(abs(self._total), 1.0)
            if promise <= enough and inside:
                break
            before = self._total
            self._evaluate(prices)
            if promise <= enough:  # there is nothing more to gain in this box, so look beyond it
                self._box *= LEAP_FACTOR
            elif before - self._total < GOOD_STEP * promise:
                self._box *= SHRINK_FACTOR
            elif not inside:
                self._box *= GROW_FACTOR
            self._box = np.minimum(self._box, self._largest_box)
            self._forget()
        return Dual(
            prices=self._best,
            total=self._total,
            passes=self._passes,
            infeasible=self._infeasible(),
        )

    def _infeasible(self) -> bool:
        # it may be far above the difference in which it cancels
        sold = dot(self._best, self._capacity)
        slack = 1e-9 * (abs(self._worth) + self._size + sold) + 1.0
        return self._total < self._worth - slack

    def _evaluate(self, prices: Floats) -> None:
        s = self._surface
        sold = dot(prices, self._capacity)
        total = (
            s.offset
            + sold
            + price_best_columns(
                s.job_start,
                s.value,
                s.usage_start,
                s.row,
                s.amount,
                s.must_run,
                prices,
                self._usage,
            )
        )
        self._passes += 1
        slope = self._capacity - self._usage
        self._slopes = np.vstack([self._slopes, slope])
        self._levels = np.append(self._levels, total - dot(slope, prices))
        if total < self._total:
            self._total, self._best = total, prices

    def _step(self) -> tuple[Floats, float, bool] | None:
        """Return the model's best prices in the box, the promised decrease, and whether it is inside.

        The last is false if an edge of the box was met. Return None if rounding keeps the model
        from being solved, for example because planes are almost the same. The program is in units
        of the box and of the value of all jobs, so it is well scaled whatever the rows count.
        """
        scale = max(abs(self._total), self._size)
        low = np.maximum(-1.0, (self._surface.low - self._best) / self._box)
        high = np.minimum(1.0, (self._surface.high - self._best) / self._box)
        height = (self._levels + dot_rows(self._slopes, self._best) - self._total) / scale
        slopes = self._slopes * self._box / scale
        z = np.empty(len(self._box))
        lowest = lowest_point(height, slopes, low, high, z)
        if not math.isfinite(lowest):
            return None
        at_edge = (z >= 1.0 - 1e-9) | (z <= -1.0 + 1e-9)
        at_edge &= self._box < self._largest_box
        at_high, at_low = (high < 1.0) & (z >= high - 1e-9), (low > -1.0) & (z <= low + 1e-9)
        self.limited = bool(np.any(at_high | (at_low & (self._surface.low > 0.0))))
        prices = np.clip(self._best + z * self._box, self._surface.low, self._surface.high)
        return prices, max(0.0, -lowest * scale), not bool(at_edge.any())

    def _forget(self) -> None:
        """Keep only the planes that are highest at the best prices."""
        most = PLANES_A_ROW * len(self._capacity) + 10
        if len(self._levels) > 2 * most:
            height = self._levels + dot_rows(self._slopes, self._best)
            keep = np.sort(np.argsort(-height, kind="stable")[:most])
            self._levels, self._slopes = self._levels[keep], self._slopes[keep]


def _size(problem: Problem) -> float:
    """Return the value of all jobs together.

    A price is typical if the whole capacity of the row costs that much.
    """
    top = reduce_by_job(np.maximum, np.abs(problem.value).astype(np.float64), problem.job_start)
    return max(float(top.sum()), 1.0)


def _guess(problem: Problem, unit: Floats) -> Floats:
    """Return prices to begin with: rows that all jobs together would overfill have a price."""
    use = np.bincount(problem.row, weights=problem.amount, minlength=len(unit))
    columns = np.maximum(np.bincount(problem.row, minlength=len(unit)), 1)
    wanted = use / columns * len(problem.jobs)
    return np.where(wanted > problem.capacity, 0.5 * unit, 0.0)


def _least_worth(problem: Problem) -> float:
    """Return the least value of any answer, without the jobs that need not run."""
    value = np.where(fits_alone(problem), problem.value.astype(np.float64), np.inf)
    least = reduce_by_job(np.minimum, value, problem.job_start)
    return float(least[problem.must_run].sum()) if problem.must_run.any() else 0.0
