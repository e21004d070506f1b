"""The pricing solver: prices by the dual, an answer by inserting jobs at them, both in compiled passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.problem import Problem, restricted
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.answers import (
    answer,
    cannot_run,
    is_answer,
    objective_of,
    trivial_bound,
    usable_hint,
    without_answer,
)
from tessera.solvers.base import Budget
from tessera.solvers.greedy import improve, repaired
from tessera.solvers.kernels.pricing import inserted
from tessera.solvers.prices import Priced, Shown, price
from tessera.solvers.pricing.core import closed
from tessera.solvers.pricing.dual import descend, descend_near
from tessera.solvers.waiting import spells_out_waiting

CLOSE: Final = 0.05
"""The dual stops once its model promises less than this share of the wanted gap."""
SAMPLE: Final = 4096
"""Jobs whose dual gives the prices to begin with where there are many more: it takes some 40 passes, and
then few of the long ones are left to take."""

GENEROUS: Final = 0.3
"""Share of the gap to aim at where the prices are known and jobs are many: a pass near them costs less than
greedy, whose answer is the sooner known to be worth less."""
LEAST_SOLD: Final = 1e-3
"""What the whole capacity must cost at known prices, in the problem's integers, or they say nothing."""
FEW: Final = 512
"""Jobs that move first where an answer is mended, and a thirty-second of all."""


@dataclass(slots=True)
class _Found:
    """The best answer, the best bound and its prices so far."""

    choice: Ints | None = None
    worth: float = -math.inf
    bound: float = math.inf
    shown: Shown | None = None
    passes: int = 0
    infeasible: bool = False

    def prove(self, shown: Shown) -> None:
        """Take in what prices prove."""
        if self.shown is None or shown.bound <= self.bound:
            self.bound, self.shown = shown.bound, shown

    def prices(self) -> Floats | None:
        """Return the prices of the best bound."""
        return None if self.shown is None else self.shown.prices

    def offer(self, problem: Problem, choice: Ints | None) -> None:
        """Take in the answer ``choice`` if it is better."""
        if choice is not None and objective_of(problem, choice) > self.worth:
            self.choice, self.worth = choice, objective_of(problem, choice)

    def take(self, problem: Problem, priced: Priced, gap: float) -> None:
        """Take in what ``priced`` proves, and the answers near it, until one is within ``gap``."""
        self.prove(priced.shown())
        for way in (mended, inserted_by_lead):
            if not self.close(gap):
                self.offer(problem, way(problem, priced))

    def close(self, gap: float) -> bool:
        """Return whether the answer is within ``gap`` of the bound."""
        return self.bound - self.worth <= gap * max(abs(self.bound), 1.0)


class Pricing:
    """Bounds (1) to (3) by prices, and answers by them.

    Jobs are given their best column at the prices, those first that would lose most by another one; then
    every step that still gains is taken. Prices of the hint, e.g. the last round's, are tried as they
    are before any are looked for. Its work counts the evaluations of the whole dual.
    """

    name = "pricing"

    @spells_out_waiting
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Answer ``problem`` with prices and a bound; INFEASIBLE is proven."""
        return self.solve_and_show(problem, budget, hint)[0]

    def solve_and_show(
        self, problem: Problem, budget: Budget, hint: Solution | None = None
    ) -> tuple[Solution, Shown | None]:
        """Return the answer, and what its prices show; None: there are none."""
        found = _Found()
        if len(cannot_run(problem)):
            found.passes, found.infeasible = 1, True
            return self._said(problem, budget, found), None
        start, known = usable_hint(problem, hint), known_to(problem, hint)
        if start is not None:
            found.choice, found.worth = start, objective_of(problem, start)
        if not budget.expired() and not budget.skips(self.name):
            enough = False
            if known is not None:
                known, enough = self._near(problem, budget, known, found)
            if not enough:
                self._search(problem, budget, known, found)
            if found.shown is not None and not found.infeasible and not found.close(budget.gap):
                choice, bound = closed(
                    problem, price(problem, found.shown.prices), found.worth, budget.gap
                )
                found.offer(problem, choice)
                found.bound = min(found.bound, bound)
        return self._said(problem, budget, found), found.shown

    def _near(
        self, problem: Problem, budget: Budget, known: Floats, found: _Found
    ) -> tuple[Floats, bool]:
        """Take in what prices near the ``known`` ones tell; return where to search on, if that is needed."""
        aim = budget.gap * (GENEROUS if len(problem.jobs) > SAMPLE else 1.0)
        near = descend_near(problem, known, CLOSE * aim)
        found.passes = 1
        found.prove(near.shown)
        few, among = FEW + len(problem.jobs) // 32, near.jobs
        if len(problem.jobs) > SAMPLE:
            if len(among) > few:
                among = among[near.lead <= np.partition(near.lead, few)[few]]
            found.offer(problem, repaired(problem, near.shown.choice, near.shown.prices, among))
        if not found.close(budget.gap):
            found.offer(problem, repaired(problem, near.shown.choice, near.shown.prices))
        if not found.close(budget.gap) and near.inside:
            found.take(problem, price(problem, near.shown.prices), budget.gap)
        return near.shown.prices, found.close(budget.gap) or (
            near.inside and found.choice is not None
        )

    def _search(
        self, problem: Problem, budget: Budget, known: Floats | None, found: _Found
    ) -> None:
        most = budget.work.get(self.name, math.inf) - found.passes
        if found.passes and (most <= 0 or budget.expired()):
            return  # what is known is told already
        tolerance = CLOSE * budget.gap
        if known is None and len(problem.jobs) > 4 * SAMPLE:
            part = replace(budget, work={})
            known = descend(_sample(problem), part, None, most=math.inf, tolerance=tolerance).prices
        dual = descend(problem, budget, known, most=most, tolerance=tolerance, known=found.worth)
        found.passes += dual.passes
        found.infeasible = dual.infeasible and found.choice is None
        if not found.infeasible:
            found.take(problem, price(problem, dual.prices), budget.gap)

    def _said(self, problem: Problem, budget: Budget, found: _Found) -> Solution:
        work = ((self.name, float(found.passes)),)
        if found.infeasible or found.choice is None:
            status = SolveStatus.INFEASIBLE if found.infeasible else SolveStatus.UNKNOWN
            bound = None if found.shown is None else found.bound
            return without_answer(
                problem,
                status,
                bound=bound,
                solver=self.name,
                prices=found.prices(),
                seed=budget.seed,
                work=work,
            )
        bound = trivial_bound(problem) if found.shown is None else found.bound
        return answer(
            problem,
            found.choice,
            bound=bound,
            solver=self.name,
            prices=found.prices(),
            seed=budget.seed,
            work=work,
        )


def known_to(problem: Problem, hint: Solution | None) -> Floats | None:
    """Return the prices that ``hint`` brings for the rows, if the capacity costs anything at them."""
    if hint is None or len(hint.prices) != len(problem.rows):
        return None
    prices = np.where(np.isfinite(hint.prices) & (hint.prices > 0), hint.prices, 0.0)
    return prices if LEAST_SOLD < prices @ problem.capacity < math.inf else None


def mended(problem: Problem, priced: Priced) -> Ints | None:
    """Return what each job would choose at the prices, mended where rows are overfull; None: it cannot be."""
    return repaired(problem, priced.choice, priced.prices)


def inserted_by_lead(problem: Problem, priced: Priced) -> Ints | None:
    """Return an answer near the prices: jobs inserted by falling lead, then every step that gains.

    A job's lead is what its best choice is ahead of its next best one, so those that hardly care come
    last and fill what is left. None: the jobs that must run found no room this way.
    """
    choice = np.full(len(problem.jobs), -1, dtype=np.int64)
    lead = np.where(problem.must_run, np.inf, priced.lead)
    order = np.argsort(-lead, kind="stable")
    free = problem.capacity.copy()
    complete = inserted(
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
    return improve(problem, choice, priced.prices)


def _sample(problem: Problem) -> Problem:
    """Return the problem of about ``SAMPLE`` jobs, evenly picked, with their share of the capacity."""
    step = len(problem.jobs) // SAMPLE
    jobs = np.arange(0, len(problem.jobs), step)
    picked = np.zeros(len(problem.jobs), dtype=np.bool_)
    picked[jobs] = True
    columns = np.flatnonzero(picked[problem.column_job])
    share = len(jobs) / len(problem.jobs)
    capacity = np.ceil(problem.capacity * share).astype(np.int64)
    return restricted(problem, jobs, columns, capacity=capacity)
