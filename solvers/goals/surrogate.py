"""The surrogate: one problem whose values stand for all goals, for greedy and for placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats
from tessera.formulation.round.goals import Goal, Levels
from tessera.formulation.round.problem import MAX_TOTAL, Problem, scale_values
from tessera.formulation.round.statement import Statement
from tessera.solvers.goals.rows import jobs_that_count

LATER_GOAL_WEIGHT: Final = 1e-3
"""Weight of a goal relative to the one before it, if that one is exact.

A tolerance above it takes its place."""
STEEPNESS: Final = 14.0
"""The worst of all levels weighs exp(this), a million times the best."""
SURROGATE_SCALE: Final = 1e9
"""Largest value of the first goal, as an integer.

It is large enough to distinguish three goals of weights 1, 1e-3 and 1e-6."""


def build_surrogate(statement: Statement) -> Problem:
    """Return the problem whose values stand for all goals; a single goal keeps its own.

    The values of each goal are scaled to at most 1. A goal weighs ``LATER_GOAL_WEIGHT`` times the one before
    it, or the tolerance of that goal if it is larger. The surrogate is only a guide;
    ``solve_goals`` reaches the goals themselves.
    """
    problem = statement.problem
    if len(statement.goals) == 1:
        return problem
    value, price, weight = np.zeros(len(problem.cell)), np.zeros(len(problem.cell)), 1.0
    for goal in statement.goals:
        goal_value, goal_price = _normalized(problem, goal)
        value += weight * goal_value
        price += weight * goal_price
        weight *= max(goal.tolerance, LATER_GOAL_WEIGHT)
    scale = min(SURROGATE_SCALE, MAX_TOTAL / 8 / max(1, len(problem.jobs)))
    restart_price = scale_values(price, scale)
    return replace(
        problem,
        value=scale_values(value + price, scale) - restart_price,
        restart_price=restart_price,
        scale=scale,
        unit="goals in order",
    )


def _normalized(problem: Problem, goal: Goal) -> tuple[Floats, Floats]:
    """Return (value, restart cost) of each column, scaled so that the largest value is 1."""
    if isinstance(goal, Levels):
        return _relief(problem, goal), np.zeros(len(goal.level))
    top = max(1.0, float(np.abs(goal.value + goal.restart_price).max(initial=0)))
    return goal.value / top, goal.restart_price / top


def _relief(problem: Problem, goal: Levels) -> Floats:
    """Return the improvement of its job's level by each column. The worst levels weigh most.

    Only the order of levels matters to the goal, so levels are compared by rank. The sum of a steep
    function of them is smallest, roughly, if the worst levels are best. The levels already include
    the restart.
    """
    counted = jobs_that_count(problem)
    ranks = np.unique(np.append(goal.level, goal.waiting[counted]), return_inverse=True)[1]
    height = np.exp(STEEPNESS * (ranks / max(1, ranks.max(initial=0)) - 1.0))
    waiting = np.zeros(len(problem.jobs))
    waiting[counted] = height[len(goal.level) :]
    return np.asarray(waiting[problem.column_job] - height[: len(goal.level)])
