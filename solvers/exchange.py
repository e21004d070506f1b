"""Improvement of an answer by one or two changes at a time, guided by shadow prices."""

from __future__ import annotations

from typing import Final

from tessera.formulation.problem import Problem
from tessera.formulation.tables import Ints
from tessera.solvers.kernels.exchange import exchange_pairs
from tessera.solvers.prices import PricedProblem

MOST_CHANGES: Final = 2_000
"""Changes of a scan, whose pairs take some 20 ms."""
MOST_STEPS: Final = 200


def exchange_choices(problem: Problem, priced: PricedProblem, choice: Ints) -> Ints:
    """Return ``choice`` (int64[jobs], feasible) after changes that gain, alone or in pairs."""
    better = choice.copy()
    exchange_pairs(
        problem.job_start,
        problem.value,
        problem.usage_start,
        problem.row,
        problem.amount,
        problem.must_run,
        priced.margin,
        priced.prices,
        better,
        problem.capacity - problem.used(choice),
        MOST_CHANGES,
        MOST_STEPS,
    )
    return better
