"""The candidates of a round: answers that are best by other measures than its objective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.policy import DEFAULT_OBJECTIVE
from tessera.formulation.problem import MAX_TOTAL_VALUE, Problem, reduce_by_job
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.base import Budget
from tessera.solvers.foresight.world import value_columns
from tessera.solvers.greedy import improve_choice, unit_shares
from tessera.solvers.kernels.foresight import ForesightProblem
from tessera.solvers.pricing import Pricing

POWERS: Final = {
    "throughput": 0.0,
    DEFAULT_OBJECTIVE: 0.25,
    "balanced": 0.5,
    "jct": 1.0,
    "shortest first": 2.0,
}
"""The power of 1 / (remaining time) in the weight of each measure (Eq. 10a)."""
RESTART_CHARGES: Final = (2.0, 4.0)
"""The factors on restart costs of answers that change fewer jobs."""
PRICE_POWER: Final = 0.5
"""The power of 1 / (the price of what is left to do) in the weights from prices."""
CANDIDATE_GAP: Final = 1e-3
"""The gap to which a candidate is solved. It need not be proven."""
LARGEST_VALUE: Final = 1e9
"""The largest value of a column, as an integer."""


def other_answers(
    problem: Problem, future: ForesightProblem, known: Floats | None, budget: Budget
) -> Iterator[tuple[str, Ints]]:
    """Yield answers with the measures' names. Each is computed when it is asked for.

    They are the best by the default objective with restarts charged several times; the best by each
    of ``POWERS``; the best by weights from the shadow prices ``known``
    (float64[rows]) of the last round, if there are any; the answer that shares GPUs most evenly;
    and what runs now, with the GPUs that are left given out. All of them keep the rows of
    ``problem``. No clock ends them, so they can be repeated.
    """
    usual = factors(future, POWERS[DEFAULT_OBJECTIVE])
    for charged in RESTART_CHARGES:
        values = value_columns(future, problem, usual, charged)
        yield from _solved(f"restarts {charged:g} times", problem, values, budget)
    for name, power in POWERS.items():
        yield from _solved(
            name, problem, value_columns(future, problem, factors(future, power)), budget
        )
    priced = None if known is None else _price_factors(problem, future, known)
    if priced is not None:
        yield from _solved("prices", problem, value_columns(future, problem, priced), budget)
    even = value_columns(future, problem, 1.0 / np.maximum(future.expected_rate, 1e-300))
    weight = future.weight[problem.column_job]
    yield from _solved("even shares", problem, weight * np.sqrt(np.maximum(even, 0.0)), budget)
    stays = np.array(problem.current, dtype=np.int64)
    if not (problem.used(stays) > problem.capacity).any():
        values = value_columns(future, problem, usual)
        yield "keep", improve_choice(with_values(problem, values), stays, unit_shares(problem))


def factors(future: ForesightProblem, power: float) -> Floats:
    """Return the factor of each job on its rates, float64[jobs]: that of ``balanced:power``."""
    remaining_s = np.maximum(future.work / future.unit_rate, future.round_s)
    each = future.weight / future.unit_rate * (future.horizon_s / remaining_s) ** power
    return np.where(future.counts, each, 0.0)


def with_values(problem: Problem, values: Floats) -> Problem:
    """Return ``problem`` with ``values`` (float64[columns]) as integers, restarts included."""
    top = float(values.max(initial=0.0))
    best = float(reduce_by_job(np.maximum, values, problem.job_start).sum())
    scale = min(LARGEST_VALUE / top, MAX_TOTAL_VALUE / best) if top > 0 else 1.0
    value = np.where(values > 0, np.maximum(np.rint(values * scale), 1.0), 0.0).astype(np.int64)
    return replace(problem, value=value, restart_price=np.zeros_like(value), scale=scale)


def _solved(
    name: str, problem: Problem, values: Floats, budget: Budget
) -> Iterator[tuple[str, Ints]]:
    endless = replace(
        budget, remaining_s=lambda: math.inf, work={}, recorded=(), gap=CANDIDATE_GAP, workers=1
    )
    solution = Pricing().solve(with_values(problem, values), endless)
    if solution.has_answer:
        yield name, solution.choice


def _price_factors(problem: Problem, future: ForesightProblem, known: Floats) -> Floats | None:
    """Return the factors of weights from prices, or None if no job would pay anything.

    A job that pays much for what is left to do, on the Cell on which that is cheapest, weighs less.
    """
    hour = problem.cost(known)  # what an hour on each column costs, up to a constant
    cheapest = np.full(len(problem.jobs), np.inf)
    np.minimum.at(cheapest, problem.column_job, hour / future.rate)
    cost = cheapest * future.work
    paid = future.counts & np.isfinite(cost) & (cost > 0)
    if not paid.any():
        return None
    least = float(cost[paid].min())
    relative = np.where(paid, least / np.where(paid, cost, 1.0), 1.0)
    return np.where(future.counts, future.weight / future.unit_rate * relative**PRICE_POWER, 0.0)
