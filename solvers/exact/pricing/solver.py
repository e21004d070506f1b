"""The pricing solver: shadow prices by the dual, and a choice made by inserting jobs at them.

Both run in compiled passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import Problem, restrict_problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import (
    find_unrunnable,
    is_answer,
    is_within,
    make_result,
    objective_of,
    trivial_bound,
    usable_hint,
)
from tessera.solvers.exact.greedy import improve_choice, repair_choice
from tessera.solvers.exact.prices import PROVED_BY_PRICES, PricedProblem, PriceResult, price_problem
from tessera.solvers.exact.pricing.dual import descend, descend_near
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns
from tessera.solvers.kernels.pricing import insert_jobs
from tessera.solvers.sums import dot

DUAL_GAP_SHARE: Final = 0.05
"""The dual stops once its model promises less than this share of the wanted gap."""
SAMPLE_JOBS: Final = 4096
"""Number of jobs whose dual gives the first prices if there are many more jobs.

That takes some 40 passes, and then only few of the long passes remain."""

KNOWN_PRICES_GAP_SHARE: Final = 0.3
"""Share of the gap to aim at if the prices are known and there are many jobs.

A pass near known prices costs less than greedy. The closer the bound, the sooner it is known that
greedy's answer has a lower value."""
LEAST_SOLD: Final = 1e-3
"""Least cost of the whole capacity at known prices, in the problem's integers.

Below it, the prices carry no information."""
FIRST_REPAIR_JOBS: Final = 512
"""Number of jobs that move first when a choice is repaired, plus a thirty-second of all."""


@dataclass(slots=True)
class _PricingBest:
    """The best choice, the best bound and its shadow prices so far."""

    choice: Ints | None = None
    value: float = -math.inf
    bound: float = math.inf
    shown: PriceResult | None = None
    passes: int = 0
    infeasible: bool = False

    def prove(self, shown: PriceResult) -> None:
        """Record the bound that prices prove."""
        if self.shown is None or shown.bound <= self.bound:
            self.bound, self.shown = shown.bound, shown

    def prices(self) -> Floats | None:
        """Return the shadow prices of the best bound."""
        return None if self.shown is None else self.shown.prices

    def offer(self, problem: Problem, choice: Ints | None) -> None:
        """Record ``choice`` if it is better."""
        if choice is not None and objective_of(problem, choice) > self.value:
            self.choice, self.value = choice, objective_of(problem, choice)

    def take(self, problem: Problem, priced: PricedProblem, gap: float) -> None:
        """Record the bound of ``priced``, and the choices near it, until one is within ``gap``."""
        self.prove(priced.shown())
        for way in (mend_choice, insert_by_lead):
            if not self.close(gap):
                self.offer(problem, way(problem, priced))

    def close(self, gap: float) -> bool:
        """Return whether the choice is within ``gap`` of the bound."""
        return is_within(gap, self.bound, self.value)


class Pricing:
    """A solver that bounds (1) to (3) by shadow prices and derives choices from them.

    Jobs get their best column at the prices, those first that would lose most by another one. Then
    every step that still gains is taken. The prices of the hint, e.g. of the last round, are tried
    unchanged before others are searched. The recorded work is the number of evaluations of the
    whole dual.
    """

    name = "pricing"

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``, with shadow prices and a bound; INFEASIBLE is proven."""
        return self.solve_and_show(problem, budget, hint)[0]

    def solve_and_show(
        self, problem: Problem, budget: Budget, hint: Solution | None = None
    ) -> tuple[Solution, PriceResult | None]:
        """Return the solution, and the result of its shadow prices, or None without prices."""
        best = _PricingBest()
        if len(find_unrunnable(problem)):
            best.passes, best.infeasible = 1, True
            return self._solution(problem, budget, best), None
        start, known = usable_hint(problem, hint), usable_prices(problem, hint)
        if start is not None:
            best.choice, best.value = start, objective_of(problem, start)
        if not budget.expired() and not budget.skips(self.name):
            enough = False
            if known is not None:
                known, enough = self._near(problem, budget, known, best)
            if not enough:
                self._search(problem, budget, known, best)
        return self._solution(problem, budget, best), best.shown

    def _near(
        self, problem: Problem, budget: Budget, known: Floats, best: _PricingBest
    ) -> tuple[Floats, bool]:
        """Record the result of prices near ``known``.

        Return the prices from which to search on, and whether no search is needed.
        """
        aim = budget.gap * (KNOWN_PRICES_GAP_SHARE if len(problem.jobs) > SAMPLE_JOBS else 1.0)
        near = descend_near(problem, known, DUAL_GAP_SHARE * aim)
        best.passes = 1
        best.prove(near.shown)
        few, among = FIRST_REPAIR_JOBS + len(problem.jobs) // 32, near.jobs
        if len(problem.jobs) > SAMPLE_JOBS:
            if len(among) > few:
                among = among[near.lead <= np.partition(near.lead, few)[few]]
            best.offer(problem, repair_choice(problem, near.shown.choice, near.shown.prices, among))
        if not best.close(budget.gap):
            best.offer(problem, repair_choice(problem, near.shown.choice, near.shown.prices))
        if not best.close(budget.gap) and near.inside:
            best.take(problem, price_problem(problem, near.shown.prices), budget.gap)
        return near.shown.prices, best.close(budget.gap) or (
            near.inside and best.choice is not None
        )

    def _search(
        self, problem: Problem, budget: Budget, known: Floats | None, best: _PricingBest
    ) -> None:
        most = budget.work.get(self.name, math.inf) - best.passes
        if best.passes and (most <= 0 or budget.expired()):
            return  # the known results have already been recorded
        tolerance = DUAL_GAP_SHARE * budget.gap
        if known is None and len(problem.jobs) > 4 * SAMPLE_JOBS:
            part = replace(budget, work={})
            known = descend(_sample(problem), part, None, most=math.inf, tolerance=tolerance).prices
        dual = descend(problem, budget, known, most=most, tolerance=tolerance, known=best.value)
        best.passes += dual.passes
        best.infeasible = dual.infeasible and best.choice is None
        if not best.infeasible:
            best.take(problem, price_problem(problem, dual.prices), budget.gap)

    def _solution(self, problem: Problem, budget: Budget, best: _PricingBest) -> Solution:
        work = ((self.name, float(best.passes)),)
        return make_result(
            problem,
            None if best.infeasible else best.choice,
            status=SolveStatus.INFEASIBLE if best.infeasible else SolveStatus.UNKNOWN,
            bound=trivial_bound(problem) if best.shown is None else best.bound,
            solver=self.name,
            prices=best.prices(),
            seed=budget.seed,
            work=work,
            proved_by="" if best.shown is None else PROVED_BY_PRICES,
        )


def usable_prices(problem: Problem, hint: Solution | None) -> Floats | None:
    """Return the shadow prices of ``hint``, or None if the capacity costs nothing at them."""
    if hint is None or len(hint.prices) != len(problem.rows):
        return None
    prices = np.where(np.isfinite(hint.prices) & (hint.prices > 0), hint.prices, 0.0)
    return prices if LEAST_SOLD < dot(prices, problem.capacity) < math.inf else None


def mend_choice(problem: Problem, priced: PricedProblem) -> Ints | None:
    """Return the jobs' best choices at the prices, repaired where rows are overfull, or None."""
    return repair_choice(problem, priced.choice, priced.prices)


def insert_by_lead(problem: Problem, priced: PricedProblem) -> Ints | None:
    """Return a feasible choice near the prices, or None if the must-run jobs find no room this way.

    Jobs are inserted by falling lead, and then every step that gains is taken. A job's lead is the
    margin by which its best choice beats its next best one. So jobs to which it hardly matters come
    last and fill the rest.
    """
    choice = np.full(len(problem.jobs), -1, dtype=np.int64)
    lead = np.where(problem.must_run, np.inf, priced.lead)
    order = np.argsort(-lead, kind="stable")
    free = problem.capacity.copy()
    complete = insert_jobs(
        problem.job_start,
        problem.usage_start,
        problem.row,
        problem.amount,
        problem.must_run,
        priced.margin,
        order,
        free,
        choice,
    )
    if not complete or not is_answer(problem, choice):
        return None
    return improve_choice(problem, choice, priced.prices)


def _sample(problem: Problem) -> Problem:
    """Return the problem of about ``SAMPLE_JOBS`` evenly picked jobs with their share of capacity."""
    step = len(problem.jobs) // SAMPLE_JOBS
    jobs = np.arange(0, len(problem.jobs), step)
    picked = np.zeros(len(problem.jobs), dtype=np.bool_)
    picked[jobs] = True
    columns = np.flatnonzero(picked[problem.column_job])
    share = len(jobs) / len(problem.jobs)
    capacity = np.ceil(problem.capacity * share).astype(np.int64)
    return restrict_problem(problem, jobs, columns, capacity=capacity)
