"""One problem whose values speak for all goals at once, for greedy and for placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.goals import Goal, Levels
from tessera.formulation.problem import MAX_TOTAL, Problem, scaled
from tessera.formulation.statement import Statement
from tessera.formulation.tables import Floats
from tessera.solvers.goals.rows import counted

LATER: Final = 1e-3
"""What a goal weighs beside the one before it, which is exact; a tolerance above it takes its place."""
STEEPNESS: Final = 14.0
"""The worst of all levels weighs exp(this), a million times the best."""
SCALE: Final = 1e9
"""Integers in the largest value of the first goal: three goals of weights 1, 1e-3 and 1e-6 are told apart."""


def surrogate(statement: Statement) -> Problem:
    """Return the problem whose values speak for all goals; that of a single goal is its own.

    Each goal is brought to values of at most 1 and weighs ``LATER`` of the one before, or the tolerance
    of that one where it is larger. It is a guide: ``solve_goals`` reaches the goals themselves.
    """
    problem = statement.problem
    if len(statement.goals) == 1:
        return problem
    worth, price, weight = np.zeros(len(problem.cell)), np.zeros(len(problem.cell)), 1.0
    for goal in statement.goals:
        mine, its_price = _normalised(problem, goal)
        worth += weight * mine
        price += weight * its_price
        weight *= max(goal.tolerance, LATER)
    scale = min(SCALE, MAX_TOTAL / 8 / max(1, len(problem.jobs)))
    restart_price = scaled(price, scale)
    return replace(
        problem,
        value=scaled(worth + price, scale) - restart_price,
        restart_price=restart_price,
        scale=scale,
        unit="goals in order",
    )


def _normalised(problem: Problem, goal: Goal) -> tuple[Floats, Floats]:
    """Return (value, restart price) of each column, the largest value 1."""
    if isinstance(goal, Levels):
        return _relief(problem, goal), np.zeros(len(goal.level))
    top = max(1.0, float(np.abs(goal.value + goal.restart_price).max(initial=0)))
    return goal.value / top, goal.restart_price / top


def _relief(problem: Problem, goal: Levels) -> Floats:
    """Return how much each column spares its job, where the worst levels weigh most.

    Only the order of levels matters to the goal, so they are judged by rank; the sum of a steep function
    of them is smallest, roughly, where the worst are best. The restart is in the levels already.
    """
    who = counted(problem)
    ranks = np.unique(np.append(goal.level, goal.waiting[who]), return_inverse=True)[1]
    height = np.exp(STEEPNESS * (ranks / max(1, ranks.max(initial=0)) - 1.0))
    waiting = np.zeros(len(problem.jobs))
    waiting[who] = height[len(goal.level) :]
    return np.asarray(waiting[problem.column_job] - height[: len(goal.level)])
