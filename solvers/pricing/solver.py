"""The pricing solver: prices by the dual, an answer by inserting jobs at them, both in compiled passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from formulation.problem import Problem, restricted
from formulation.solution import Solution, SolveStatus
from formulation.tables import Floats, Ints
from solvers.answers import (
    answer,
    cannot_run,
    is_answer,
    objective_of,
    trivial_bound,
    usable_hint,
    without_answer,
)
from solvers.base import Budget
from solvers.greedy import improve, repaired
from solvers.kernels.pricing import inserted
from solvers.prices import Priced, price
from solvers.pricing.dual import descend

CLOSE: Final = 0.05
"""The dual stops once its model promises less than this share of the wanted gap."""
SAMPLE: Final = 4096
"""Jobs whose dual gives the prices to begin with where there are many more: it takes some 40 passes, and
then few of the long ones are left to take."""


@dataclass(slots=True)
class _Found:
    """The best answer, the best bound and its prices so far."""

    choice: Ints | None
    bound: float
    prices: Floats | None = None
    passes: int = 0
    infeasible: bool = False

    def take(self, problem: Problem, priced: Priced, gap: float) -> None:
        """Take in what ``priced`` proves, and the answers near it, until one is within ``gap``."""
        if priced.bound <= self.bound or self.prices is None:
            self.bound, self.prices = min(self.bound, priced.bound), priced.prices
        for near in (mended, inserted_by_lead):
            if self.close(problem, gap):
                return
            choice = near(problem, priced)
            if choice is not None and (
                self.choice is None
                or objective_of(problem, choice) > objective_of(problem, self.choice)
            ):
                self.choice = choice

    def close(self, problem: Problem, gap: float) -> bool:
        """Return whether the answer is within ``gap`` of the bound."""
        if self.choice is None:
            return False
        return self.bound - objective_of(problem, self.choice) <= gap * max(abs(self.bound), 1.0)


class Pricing:
    """Bounds (1) to (3) by prices, and answers by them.

    Jobs are given their best column at the prices, those first that would lose most by another one; then
    every step that still gains is taken. Prices of the hint, e.g. the last round's, are tried as they
    are before any are looked for. Its work counts the evaluations of the whole dual.
    """

    name = "pricing"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Answer ``problem`` with prices and a bound; INFEASIBLE is proven."""
        start = usable_hint(problem, hint)
        if len(cannot_run(problem)):
            return self._said(problem, budget, _Found(None, 0.0, passes=1, infeasible=True))
        found = _Found(start, trivial_bound(problem))
        known = None
        if hint is not None and len(hint.prices) == len(problem.rows) and hint.prices.any():
            known = hint.prices
        if not budget.expired() and not budget.skips(self.name):
            if known is not None:
                found.take(problem, price(problem, known), budget.gap)
                found.passes = 1
            if known is None or not found.close(problem, budget.gap):
                self._search(problem, budget, known, found)
        return self._said(problem, budget, found)

    def _search(
        self, problem: Problem, budget: Budget, known: Floats | None, found: _Found
    ) -> None:
        most = budget.work.get(self.name, math.inf) - found.passes
        tolerance = CLOSE * budget.gap
        if known is None and len(problem.jobs) > 4 * SAMPLE:
            part = replace(budget, work={})
            known = descend(_sample(problem), part, None, most=math.inf, tolerance=tolerance).prices
        worth = -math.inf if found.choice is None else objective_of(problem, found.choice)
        dual = descend(problem, budget, known, most=most, tolerance=tolerance, known=worth)
        found.passes += dual.passes
        found.infeasible = dual.infeasible and found.choice is None
        if not found.infeasible:
            found.take(problem, price(problem, dual.prices), budget.gap)

    def _said(self, problem: Problem, budget: Budget, found: _Found) -> Solution:
        work = ((self.name, float(found.passes)),)
        if found.infeasible or found.choice is None:
            status = SolveStatus.INFEASIBLE if found.infeasible else SolveStatus.UNKNOWN
            bound = None if found.infeasible else found.bound
            return without_answer(
                problem, status, bound=bound, solver=self.name, prices=found.prices,
                seed=budget.seed, work=work,
            )  # fmt: skip
        return answer(
            problem, found.choice, bound=found.bound, solver=self.name, prices=found.prices,
            seed=budget.seed, work=work,
        )  # fmt: skip


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
        problem.job_start, problem.usage_start, problem.row, problem.amount, problem.must_run,
        priced.margin, order, free, choice,
    )  # fmt: skip
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
