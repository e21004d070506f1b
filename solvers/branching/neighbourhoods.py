"""Improvement of an answer by solving parts of it again: large neighbourhood search (Shaw, 1998).

Most jobs keep their columns. Some jobs to which other columns are almost as good are decided again
together, with all that is free, by branch and bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.problem import Problem, restrict_problem
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.base import Budget, unlimited_time
from tessera.solvers.branching.search import search_core
from tessera.solvers.prices import PricedProblem, price_problem

JOBS_OF_STEP: Final = 60
"""Jobs that are decided again together."""
POOL_FACTOR: Final = 4
"""From this many times as many jobs, those of a step are drawn."""
NODES_OF_STEP: Final = 100
COLUMNS_OF_STEP: Final = 600


def improve_part(
    problem: Problem,
    priced: PricedProblem,
    choice: Ints,
    budget: Budget,
    draw: np.random.Generator,
) -> Ints:
    """Return ``choice`` (int64[jobs], feasible), or a better one that differs in a few jobs.

    No clock ends it, since its nodes are counted as a whole.
    """
    regret = _regrets(problem, priced, choice)
    pool = np.argsort(regret, kind="stable")[: POOL_FACTOR * JOBS_OF_STEP]
    jobs = np.sort(draw.permutation(pool)[:JOBS_OF_STEP])
    columns = np.flatnonzero(np.isin(problem.column_job, jobs))
    others = choice.copy()
    others[jobs] = -1
    room = problem.capacity - problem.used(others)
    part = restrict_problem(problem, jobs, columns, capacity=room)
    own = np.where(choice[jobs] >= 0, np.searchsorted(columns, choice[jobs]), -1)
    result = search_core(
        part,
        price_problem(part, priced.prices),
        own,
        replace(budget, remaining_s=unlimited_time),
        gap=0.0,
        columns=COLUMNS_OF_STEP,
        nodes=NODES_OF_STEP,
    )
    if result is None or result.choice is None:
        return choice
    others[jobs] = np.where(result.choice >= 0, columns[result.choice], -1)
    return others


def _regrets(problem: Problem, priced: PricedProblem, choice: Ints) -> Floats:
    """Return how much less than its column each job's next best choice is worth, float64[jobs].

    It is negative if another choice has a larger margin.
    """
    margin = priced.margin.copy()
    runs = np.flatnonzero(choice >= 0)
    now = np.zeros(len(problem.jobs))
    now[runs] = margin[choice[runs]]
    margin[choice[runs]] = -np.inf
    other = np.where((choice >= 0) & ~problem.must_run, 0.0, -np.inf)
    np.maximum.at(other, problem.column_job, margin)
    return now - other
