"""Improvement of an answer by one or two changes at a time, guided by shadow prices."""

from __future__ import annotations

from typing import Final

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.exact.prices import PricedProblem
from tessera.solvers.kernels.exchange import ExchangeColumns, exchange_pairs

MOST_CHANGES: Final = 1_000
"""Changes of a scan, whose pairs take some 5 ms."""
MOST_STEPS: Final = 100


def exchange_choices(problem: Problem, priced: PricedProblem, choice: Ints) -> Ints:
    """Return ``choice`` (int64[jobs], feasible) after changes that gain, alone or in pairs."""
    better = choice.copy()
    columns = ExchangeColumns(
        job_start=problem.job_start,
        value=problem.value,
        usage_start=problem.usage_start,
        row=problem.row,
        amount=problem.amount,
        must_run=problem.must_run,
        margin=priced.margin,
        prices=priced.prices,
    )
    room = problem.capacity - problem.used(choice)
    exchange_pairs(columns, better, room, MOST_CHANGES, MOST_STEPS)
    return better
