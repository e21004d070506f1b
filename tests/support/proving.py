"""Solvers that leave proofs: certificates of their prices, or only their word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tessera.formulation.answer.certificates import Certificate, PriceLeaf
from tessera.formulation.answer.solution import RecordedAnswer, Solution
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.prices import certificate_of_prices
from tessera.solvers.registry import make_solver


class ProvingSolver:
    """The default solver, whose bound has a proof as ``prove`` makes it."""

    def __init__(self, prove: Callable[[Problem, Solution], Solution]) -> None:
        self._inner, self._prove = make_solver(), prove

    @property
    def name(self) -> str:
        return self._inner.name

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        solution = self._inner.solve(problem, budget, hint)
        return self._prove(problem, solution) if solution.has_answer else solution


def certify_prices(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with the bound and the certificate of its prices."""
    certificate = certificate_of_prices(problem, solution.prices)
    return replace(
        solution, bound=float(certificate.bound), proved_by="prices", certificate=certificate
    )


def only_say(problem: Problem, solution: Solution) -> Solution:
    """Return the solution as if CP-SAT had proved it."""
    return replace(solution, proved_by="cp-sat", certificate=None)


def certify_falsely(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with a certificate that proves less than it says."""
    certified = certify_prices(problem, solution)
    assert certified.certificate is not None
    false = Certificate(
        bound=solution.objective,
        denominator=certified.certificate.denominator,
        root=PriceLeaf(prices=()),
    )
    return replace(certified, certificate=false)


class RecordingSolver:
    """A solver whose first stage a clock ends each time, and which repeats what was recorded.

    ``given`` has the recorded answers of each call.
    """

    def __init__(self) -> None:
        self._inner: Solver = make_solver()
        self.given: list[tuple[RecordedAnswer, ...]] = []

    @property
    def name(self) -> str:
        return self._inner.name

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        self.given.append(budget.recorded)
        solution = self._inner.solve(problem, budget, hint)
        best = tuple(enumerate(solution.choice.tolist()))
        answer = RecordedAnswer(stage="cut", changes=best, bound=solution.bound)
        return replace(solution, recorded=(answer,))
