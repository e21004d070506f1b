"""Random statements with lexicographic goals, and a judge that tries every answer.

The judge shares no code with the solvers. It lists every answer of a small problem. It compares the
claims about each goal with the best among the answers that keep the goals before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.fuzzing import KINDS, TooLarge, draw_problem
from tessera.formulation.check import find_violations
from tessera.formulation.goals import Goal, GoalResult, Levels, Linear
from tessera.formulation.problem import MAX_TOTAL, Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.statement import Statement, replace_goal_values
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.goals import SolvedGoals

MAX_ANSWERS: Final = 50_000
"""The most answers that are listed. With more, only rules and repetition are judged."""
MAX_GOALS: Final = 4
MAX_LEVELS: Final = 8
LEVELS: Final = (-2.5, -1.0, 0.0, 0.5, 1.0, 1.5, 3.0, 1e9, 1e-9, 2 / 3, -math.inf)
TOLERANCES: Final = (0.0, 0.0, 0.01, 0.1, 0.5, 0.99)
BOUND_TOLERANCE: Final = 1e-12
"""The relative error of a bound that was divided by its goal's scale."""


def draw_statement(rng: np.random.Generator) -> Statement:
    """Draw a problem and one to ``MAX_GOALS`` goals on it, of which the last is a sum."""
    kind = str(rng.choice([name for name in KINDS if name != "middling" or rng.random() < 0.3]))
    problem = draw_problem(rng, kind)
    goals: list[Goal] = [
        _levels(rng, problem, k) if rng.random() < 0.5 else _sum(rng, problem, k)
        for k in range(int(rng.integers(0, MAX_GOALS)))
    ]
    last = _sum(rng, problem, len(goals))
    return Statement(
        problem=replace_goal_values(problem, last),
        goals=(*goals, last),
        absent={},
        rejected=frozenset(),
        opportunistic=np.zeros(len(problem.jobs), np.bool_),
    )


def _sum(rng: np.random.Generator, problem: Problem, position: int) -> Linear:
    """Draw a sum of the problem's own values, or of any values of their size."""
    value = problem.value
    if rng.random() < 0.7:
        value = (
            rng.permutation(value.copy()) if rng.random() < 0.5 else rng.integers(-3, 9, len(value))
        )
    return Linear(
        name=f"sum {position}",
        unit="units",
        value=value,
        restart_price=np.zeros(len(value), np.int64),
        scale=float(rng.choice([1.0, 1e6])),
        tolerance=float(rng.choice(TOLERANCES)),
    )


def _levels(rng: np.random.Generator, problem: Problem, position: int) -> Levels:
    return Levels(
        name=f"levels {position}",
        unit="units",
        level=rng.choice(LEVELS, len(problem.cell)),
        waiting=rng.choice(LEVELS, len(problem.jobs)),
        sign=int(rng.choice([1, -1])),
        depth=int(rng.integers(1, MAX_LEVELS + 1)),
        tolerance=float(rng.choice(TOLERANCES)),
    )


def every_answer(problem: Problem) -> Ints:
    """Return every answer, int64[answers, jobs]: a column of each job, or -1.

    Raises:
        TooLarge: some first jobs have more than ``MAX_ANSWERS`` answers.
    """
    capacity = np.array([row.capacity for row in problem.rows], dtype=np.int64)
    answers = np.zeros((1, 0), np.int64)
    used = np.zeros((1, len(capacity)), np.int64)
    for job in range(len(problem.jobs)):
        ways = list(problem.columns_of(job)) + ([] if problem.must_run[job] else [-1])
        takes = np.zeros((len(ways), len(capacity)), np.int64)
        for way, column in enumerate(ways):
            use = problem.usage_of(column) if column >= 0 else problem.idle_usage_of(job)
            takes[way, list(use)] = list(use.values())
        total = used[:, np.newaxis] + takes
        at, taken = np.nonzero((total <= capacity).all(axis=2))
        if len(at) > MAX_ANSWERS:
            raise TooLarge
        used = total[at, taken]
        answers = np.column_stack([answers[at], np.array(ways, np.int64)[taken]])
    return answers


def goal_faults(
    statement: Statement, solved: SolvedGoals, greedy: Solution, answers: Ints | None
) -> list[str]:
    """Return the faults of an answer to lexicographic goals.

    ``answers`` has all possible answers. If it is None, they are not known.
    """
    solution, wrong = solved.solution, []
    if solution.has_answer and _broken(statement, solved):
        wrong.append("violations")
    if greedy.has_answer and not (
        solution.has_answer
        and _standing(statement, solved, solution.choice)
        >= _standing(statement, solved, greedy.choice)
    ):
        wrong.append("below_greedy")
    if answers is None:
        return wrong
    if not len(answers):
        return [*wrong, "wrong_proofs"] if solution.has_answer else wrong
    if solution.status is SolveStatus.INFEASIBLE:
        return [*wrong, "wrong_proofs"]
    if not solution.has_answer:
        first = statement.goals[0]
        true = _bounds(first, solved.results[0], _reached(statement.problem, first, answers))
        return wrong if true else [*wrong, "wrong_bounds"]
    return wrong + _untrue(statement, solved, answers)


def _standing(statement: Statement, solved: SolvedGoals, choice: Ints) -> tuple[float, ...]:
    """Return the values of ``choice`` by the goals in order. Greater is better."""
    only = statement.goals[0]
    if len(statement.goals) == 1 and isinstance(only, Linear):
        return (float(_sums(only, choice[np.newaxis])[0]),)
    return solved.standing(statement, choice)


def _broken(statement: Statement, solved: SolvedGoals) -> bool:
    """Return whether the answer breaks a rule of the problem, or takes too much from a goal."""
    if find_violations(statement.problem, solved.solution):
        return True
    mine = solved.solution.choice[np.newaxis]
    return not all(
        _keeps(statement.problem, goal, floor, mine, spare=True).all()
        for goal, floor in zip(statement.goals, solved.floors, strict=False)
    )


def _untrue(statement: Statement, solved: SolvedGoals, answers: Ints) -> list[str]:
    """Return the ``wrong_bounds`` and ``wrong_proofs`` of an answer that breaks no rule."""
    wrong, problem = set(), statement.problem
    mine = solved.solution.choice[np.newaxis]
    for position, (goal, result) in enumerate(zip(statement.goals, solved.results, strict=True)):
        best = _reached(problem, goal, answers)
        if not _bounds(goal, result, best):
            wrong.add("wrong_bounds")
        if result.gap == 0 and _reached(problem, goal, mine) < best:
            wrong.add("wrong_proofs")
        if position < len(solved.floors):
            answers = answers[_keeps(problem, goal, solved.floors[position], answers)]
    last = statement.goals[-1]
    proven = solved.solution.status is SolveStatus.OPTIMAL
    best = _reached(problem, last, answers)
    if proven and _reached(problem, last, mine) < best:
        wrong.add("wrong_proofs")
    if not solved.solution.bound >= best:
        wrong.add("wrong_bounds")
    return sorted(wrong)


def _reached(problem: Problem, goal: Goal, answers: Ints) -> float:
    """Return the best that ``answers`` reach: the greatest sum, or minus the least worst level."""
    if isinstance(goal, Linear):
        return float(_sums(goal, answers).max())
    levels = _sorted_levels(problem, goal, answers)
    return -float(levels[:, 0].min()) if levels.shape[1] else 0.0


def _bounds(goal: Goal, result: GoalResult, best: float) -> bool:
    """Return whether the bound of ``result`` is true if ``best`` is the optimum."""
    if isinstance(goal, Linear):
        return result.bound * goal.scale >= best - BOUND_TOLERANCE * abs(best)
    return -goal.sign * result.bound >= best


def _keeps(
    problem: Problem, goal: Goal, floor: Sequence[float], answers: Ints, *, spare: bool = False
) -> Bools:
    """Return which answers leave at least ``floor`` of ``goal``, bool[answers].

    Rows of values above 2^53 are rounded, so that each job may lose a little: ``spare`` allows for
    it.
    """
    if isinstance(goal, Linear):
        huge = np.abs(goal.value).max(initial=0) > MAX_TOTAL / 64
        return np.asarray(
            _sums(goal, answers) >= floor[0] - (64 * len(problem.jobs) if spare and huge else 0)
        )
    levels = _sorted_levels(problem, goal, answers)[:, : len(floor)]
    return np.asarray((levels <= np.array(floor)).all(axis=1))


def _sums(goal: Linear, answers: Ints) -> Ints:
    if not len(goal.value):
        return np.zeros(len(answers), np.int64)
    return np.asarray(np.where(answers >= 0, goal.value[answers], 0).sum(axis=1))


def _sorted_levels(problem: Problem, goal: Levels, answers: Ints) -> Floats:
    """Return the levels of the jobs that have columns, worst first, float64[answers, jobs]."""
    who = np.flatnonzero(np.diff(problem.job_start) > 0)
    mine = answers[:, who]
    if not len(who):
        return np.zeros((len(answers), 0))
    level = np.where(mine >= 0, goal.level[mine], goal.waiting[who])
    return np.asarray(-np.sort(-level, axis=1))


def same_answer(one: SolvedGoals, other: SolvedGoals) -> bool:
    """Return whether two answers are equal bit for bit."""
    a, b = one.solution, other.solution
    return (
        np.array_equal(a.choice, b.choice)
        and np.array_equal(a.prices, b.prices)
        and (a.status, a.objective, a.bound, a.work) == (b.status, b.objective, b.bound, b.work)
        and repr(one.results) == repr(other.results)
    )
