"""Support for rows that count waiting jobs, for solvers that know only columns.

Where waiting uses a row (``Problem.idle_row``), waiting is spelled out as one more column of the
job, with value 0, and the job must take one of its columns. Nothing else about the problem changes,
so every solver, bound and proof remains valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Ints, concatenate_ranges
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import is_answer

Solve = TypeVar("Solve", bound=Callable[..., Solution])


def with_waiting_as_columns(solve: Solve) -> Solve:
    """Return ``solve``, a method of a solver that knows only columns, extended to every problem.

    Without this wrapper such a solver assumes that waiting uses nothing. It then returns choices
    that break a row, and the part that it fixes may seem to use more of a row than there is.
    """

    @wraps(solve)
    def solve_any(
        self: Any, problem: Problem, budget: Budget, hint: Solution | None = None
    ) -> Solution:
        return _solve_spelled_out(lambda *arguments: solve(self, *arguments), problem, budget, hint)

    return cast(Solve, solve_any)


class WaitingAsColumns:
    """A solver that spells out waiting as columns and calls another solver."""

    def __init__(self, inner: Solver) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """Return the inner solver's name."""
        return self._inner.name

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem`` by the inner solver; its bound, shadow prices and work remain valid."""
        return _solve_spelled_out(self._inner.solve, problem, budget, hint)


def _solve_spelled_out(
    solve: Callable[[Problem, Budget, Solution | None], Solution],
    problem: Problem,
    budget: Budget,
    hint: Solution | None,
) -> Solution:
    if not len(problem.idle_row):
        return solve(problem, budget, hint)
    spelled, origin = spell_out(problem)
    spelled_hint = None
    if hint is not None and hint.has_answer and is_answer(problem, hint.choice):
        spelled_hint = replace(hint, choice=_spelled(problem, origin, hint.choice))
    elif hint is not None and len(hint.prices):  # the shadow prices may still help
        spelled_hint = replace(
            hint, status=SolveStatus.UNKNOWN, choice=np.full_like(hint.choice, -1), objective=0
        )
    solution = solve(spelled, budget, spelled_hint)
    return replace(solution, choice=read_back_choice(origin, solution.choice))


def spell_out(problem: Problem) -> tuple[Problem, Ints]:
    """Return the problem with waiting as a column, and the origin of each of its columns.

    Each job that uses a row by waiting gets waiting as its last column. The origin, int64[columns],
    is the column of ``problem`` that each column is; -1 means waiting. The Cell of a waiting column
    has no meaning.
    """
    jobs = len(problem.jobs)
    waits = (np.diff(problem.idle_start) > 0) & ~problem.must_run
    count = np.diff(problem.job_start) + waits
    job_start = np.append(0, np.cumsum(count)).astype(np.int64)
    origin = np.full(int(job_start[-1]), -1, dtype=np.int64)
    place = concatenate_ranges(job_start[:-1], np.diff(problem.job_start))
    origin[place] = np.arange(len(problem.cell))
    real, job = origin >= 0, np.repeat(np.arange(jobs), count)
    uses = np.where(
        real,
        np.append(np.diff(problem.usage_start), 0)[origin],
        np.diff(problem.idle_start)[job],
    )
    first = np.where(real, problem.usage_start[origin], len(problem.row) + problem.idle_start[job])
    entries = concatenate_ranges(first, uses)

    def spread(values: Ints) -> Ints:
        return np.where(real, values[origin], 0)

    spelled = replace(
        problem,
        job_start=job_start,
        cell=spread(problem.cell),
        value=spread(problem.value),
        restart_price=spread(problem.restart_price),
        usage_start=np.append(0, np.cumsum(uses)).astype(np.int64),
        row=np.append(problem.row, problem.idle_row)[entries],
        amount=np.append(problem.amount, problem.idle_amount)[entries],
        idle_start=np.zeros(jobs + 1, np.int64),
        idle_row=np.zeros(0, np.int64),
        idle_amount=np.zeros(0, np.int64),
        must_run=problem.must_run | waits,
        current=np.where(problem.current >= 0, place[problem.current], -1)
        if len(place)
        else problem.current,
    )
    return spelled, origin


def read_back_choice(origin: Ints, choice: Ints) -> Ints:
    """Return a choice of the original problem for ``choice`` of the spelled-out one."""
    return np.where(choice >= 0, origin[choice], -1) if len(origin) else choice


def _spelled(problem: Problem, origin: Ints, choice: Ints) -> Ints:
    where = np.zeros(len(problem.cell), dtype=np.int64)
    real = np.flatnonzero(origin >= 0)
    where[origin[real]] = real
    waits = (np.diff(problem.idle_start) > 0) & ~problem.must_run
    count = np.diff(problem.job_start) + waits
    last = np.cumsum(count) - 1
    idle = np.where(waits, last, -1)
    return np.where(choice >= 0, where[choice], idle) if len(where) else idle
