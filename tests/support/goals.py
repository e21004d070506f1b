"""Statements with several goals: builders, a strategy, and the best answers by trying all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.draft import RowUse
from tessera.formulation.round.goals import Goal, Levels, Linear
from tessera.formulation.round.problem import CouplingRow, Problem, RowKind
from tessera.formulation.round.statement import Statement, replace_goal_values
from tessera.solvers.base import Budget
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.goals import build_surrogate
from tessera.solvers.goals.rows import with_rows
from tests.support.problems import problems


def a_sum(
    value: Sequence[int], name: str = "sum", *, tolerance: float = 0.0, scale: float = 1.0
) -> Linear:
    return Linear(
        name=name,
        unit="units",
        value=np.array(value, np.int64),
        scale=scale,
        restart_price=np.zeros(len(value), np.int64),
        tolerance=tolerance,
    )


def some_levels(
    level: Sequence[float],
    waiting: Sequence[float],
    name: str = "levels",
    *,
    depth: int = 4,
    tolerance: float = 0.0,
    sign: int = 1,
) -> Levels:
    return Levels(
        name=name,
        unit="units",
        level=np.array(level, float),
        waiting=np.array(waiting, float),
        depth=depth,
        tolerance=tolerance,
        sign=sign,
    )


def a_statement(problem: Problem, *goals: Goal) -> Statement:
    """Return the statement of ``goals``, of which the last is a sum."""
    last = goals[-1]
    assert isinstance(last, Linear)
    return Statement(
        problem=replace_goal_values(problem, last),
        goals=goals,
        absent={},
        rejected=frozenset(),
        opportunistic=np.zeros(len(problem.jobs), np.bool_),
    )


def greedy_of(statement: Statement, budget: Budget) -> Solution:
    return Greedy().solve(build_surrogate(statement), budget)


@st.composite
def statements(draw: st.DrawFn, *, most_goals: int = 3) -> Statement:
    """Draw a problem with up to ``most_goals`` goals. Some of its rows may count waiting jobs."""
    problem = draw(problems(jobs=4, options=3, rows=2))
    if draw(st.booleans()):
        problem = with_rows(problem, [_waiting_row(draw, problem)])
    columns, jobs = len(problem.cell), len(problem.jobs)
    tolerance = st.sampled_from([0.0, 0.0, 0.1, 0.5])
    goals: list[Goal] = []
    for position in range(draw(st.integers(1, most_goals)) - 1):
        if draw(st.booleans()):
            level = st.sampled_from([-2.5, -1.0, 0.0, 0.5, 1.0, 1.5, 3.0])
            goals.append(
                some_levels(
                    draw(st.lists(level, min_size=columns, max_size=columns)),
                    draw(st.lists(level, min_size=jobs, max_size=jobs)),
                    f"goal {position}",
                    depth=draw(st.integers(1, 4)),
                    tolerance=draw(tolerance),
                )
            )
        else:
            goals.append(_drawn_sum(draw, columns, f"goal {position}", draw(tolerance)))
    return a_statement(problem, *goals, _drawn_sum(draw, columns, "last", 0.0))


def _drawn_sum(draw: st.DrawFn, columns: int, name: str, tolerance: float) -> Linear:
    value = draw(st.lists(st.integers(-2, 5), min_size=columns, max_size=columns))
    return a_sum(value, name, tolerance=tolerance)


def _waiting_row(draw: st.DrawFn, problem: Problem) -> RowUse:
    """Draw a row in which waiting jobs count 1, and columns 0 or 1."""
    jobs = np.flatnonzero(np.diff(problem.job_start) > 0)
    counts = draw(st.lists(st.integers(0, 1), min_size=len(jobs), max_size=len(jobs)))
    uses = draw(st.lists(st.integers(0, 1), min_size=len(problem.cell), max_size=len(problem.cell)))
    return RowUse(
        row=CouplingRow(kind=RowKind.CHANGES, subject="waiting", capacity=draw(st.integers(0, 4))),
        column=np.arange(len(problem.cell)),
        amount=np.array(uses, np.int64),
        idle_job=jobs,
        idle_amount=np.array(counts, np.int64),
    )


def every_answer(problem: Problem) -> list[tuple[int, ...]]:
    """Return every feasible choice of ``problem`` by trying all."""
    ways = [
        [*([] if problem.must_run[j] else [-1]), *problem.columns_of(j)]
        for j in range(len(problem.jobs))
    ]
    return [choice for choice in itertools.product(*ways) if _fits(problem, choice)]


def _fits(problem: Problem, choice: tuple[int, ...]) -> bool:
    used = [0] * len(problem.rows)
    for job, column in enumerate(choice):
        use = problem.usage_of(column) if column >= 0 else problem.idle_usage_of(job)
        for row, amount in use.items():
            used[row] += amount
    return all(u <= row.capacity for u, row in zip(used, problem.rows, strict=True))


def value_of(goal: Linear, choice: Sequence[int]) -> int:
    return sum(int(goal.value[c]) for c in choice if c >= 0)


def sorted_levels(problem: Problem, goal: Levels, choice: Sequence[int]) -> list[float]:
    """Return the levels of jobs that have columns, worst first."""
    return sorted(
        (
            float(goal.level[c]) if c >= 0 else float(goal.waiting[j])
            for j, c in enumerate(choice)
            if len(problem.columns_of(j))
        ),
        reverse=True,
    )


def best_answers(statement: Statement) -> list[tuple[int, ...]]:
    """Return the best answers by the goals in order, by trying all answers.

    If the problem is infeasible, return none.
    """
    left = every_answer(statement.problem)
    for goal in statement.goals:
        if not left:
            return []
        if isinstance(goal, Linear):
            best = max(value_of(goal, c) for c in left)
            floor = best - math.floor(goal.tolerance * abs(best))
            left = [c for c in left if value_of(goal, c) >= floor]
            continue
        levels = {c: sorted_levels(statement.problem, goal, c)[: goal.depth] for c in left}
        ceiling = [place + goal.tolerance * abs(place) for place in min(levels.values())]
        left = [c for c in left if all(a <= b for a, b in zip(levels[c], ceiling, strict=True))]
    return left
