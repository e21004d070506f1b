"""The branching stage: exact answers and certificates by branch and bound on joined cores."""

from __future__ import annotations

import math
from typing import Final

from tessera.formulation.answer.certificates import Certificate
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_within, make_result, objective_of, usable_hint
from tessera.solvers.exact.branching.search import SearchResult, search_core
from tessera.solvers.exact.exchange import exchange_choices
from tessera.solvers.exact.prices import PROVED_BY_PRICES, PricedProblem, price_at_hint
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns

LEAST_S: Final = 0.03
COLUMN_S: Final = 1e-6
"""Wall seconds for each column, to find the core and to check the leaves; a third was measured."""
FIRST_COLUMNS: Final = 120
"""Columns of the first core that are worse than their job's best."""
FIRST_NODES: Final = 200
"""Nodes for the first core; a core that takes more is widened instead."""
POLISHED_GAP: Final = 1e-6
"""The gap that the first nodes aim at, even if a larger one is wanted: they cost less than 0.1 s."""
POLISHING_NODES: Final = 400
MAX_CP_SAT_JOBS: Final = 1_000
"""Jobs up to which CP-SAT is given every round that is not yet proven to the last unit."""
GROWTH_FACTOR: Final = 2
MOST_COLUMNS: Final = 16_000
MOST_NODES: Final = 600
"""Nodes of all cores together if no work was recorded."""
EXCHANGE_WORK: Final = 1
"""Work of the exchanges before the first node. A recorded work of 0 says that nothing ran."""


def polished_gap(problem: Problem) -> float:
    """Return the gap that the first nodes aim at: none in small rounds, which CP-SAT would get next."""
    return 0.0 if len(problem.jobs) <= MAX_CP_SAT_JOBS else POLISHED_GAP


class Branching:
    """A solver that searches cores around the hint's shadow prices, the smallest first.

    A core is widened until what was left out cannot matter, the gap is met, or the nodes are spent.
    Its work is the number of nodes, plus 1 for the exchanges on the hint's answer, which may be all
    that is needed. So it repeats the run. The bound is that of a certificate.
    """

    name = "branching"

    def least_s(self, problem: Problem) -> float:
        """Return the wall seconds without which it should not begin: about those of its first steps."""
        return LEAST_S + COLUMN_S * len(problem.cell)

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem`` around the prices of ``hint``, or around no prices if it has none."""
        known = usable_hint(problem, hint)
        priced = price_at_hint(problem, hint)
        best = _Best(problem, priced)
        best.offer(known)
        if hint is not None:
            best.limit = hint.bound
        left = int(budget.work.get(self.name, MOST_NODES + EXCHANGE_WORK)) - EXCHANGE_WORK
        columns, nodes, most_columns = FIRST_COLUMNS, FIRST_NODES, MOST_COLUMNS
        while left > 0 and not budget.expired():
            polishing = best.nodes < POLISHING_NODES
            gap = min(budget.gap, polished_gap(problem)) if polishing else budget.gap
            if best.close(gap):
                break
            result = search_core(
                problem,
                priced,
                best.choice,
                budget,
                gap=gap,
                columns=columns,
                nodes=min(nodes, left),
                bound=best.bound,
            )
            if result is None and columns > FIRST_COLUMNS:
                most_columns = columns = columns // GROWTH_FACTOR
                continue
            if result is None:
                break
            best.take(result)
            left -= result.nodes
            if result.over and columns >= min(best.all_columns, most_columns):
                break
            columns, nodes = min(columns * GROWTH_FACTOR, most_columns), nodes * GROWTH_FACTOR
        return best.solution(self.name, budget)


class _Best:
    """The best choice, bound and certificate so far."""

    def __init__(self, problem: Problem, priced: PricedProblem) -> None:
        self._problem, self._priced = problem, priced
        self.choice: Ints | None = None
        self.value = -math.inf
        self.all_columns = len(problem.cell)
        self.bound, self.prices = priced.bound, priced.prices
        self.certificate: Certificate | None = None
        self.limit = math.inf
        self.nodes = 0

    def offer(self, choice: Ints | None) -> None:
        """Record ``choice``, after exchanges, if it is better."""
        if choice is None or objective_of(self._problem, choice) <= self.value:
            return
        choice = exchange_choices(self._problem, self._priced, choice)
        self.choice, self.value = choice, float(objective_of(self._problem, choice))

    def take(self, result: SearchResult) -> None:
        """Record what a search found."""
        self.nodes += result.nodes
        self.offer(result.choice)
        proof = result.certificate
        if proof is not None and proof.bound <= self.bound:
            self.bound, self.certificate = float(proof.bound), proof

    def close(self, gap: float) -> bool:
        return is_within(gap, min(self.bound, self.limit), self.value)

    def solution(self, name: str, budget: Budget) -> Solution:
        """Return the result. Without a better bound from a search, the bound is that of the prices."""
        return make_result(
            self._problem,
            self.choice,
            bound=self.bound,
            solver=name,
            prices=self.prices,
            seed=budget.seed,
            work=((name, float(self.nodes + EXCHANGE_WORK)),),
            certificate=self.certificate,
            proved_by="branching" if self.certificate else PROVED_BY_PRICES,
        )
