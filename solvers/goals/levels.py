"""The max-min goal: the worst-off job is as well off as possible, then the next, and so on.

It is exact, by bisection over feasibility problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.goals import Levels
from tessera.formulation.round.problem import Problem, reduce_by_job
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import (
    find_unrunnable,
    fits_alone,
    is_answer,
    objective_of,
    trivial_bound,
)
from tessera.solvers.exact.pricing import Pricing
from tessera.solvers.exact.waiting_columns import read_back_choice
from tessera.solvers.goals.calls import Calls
from tessera.solvers.goals.rows import (
    Limit,
    add_limits,
    jobs_that_count,
    levels_of,
    restrict_columns,
)

PRICES_TIME_SHARE: Final = 0.5
"""Share of the goal's remaining time that the shadow prices may take in one try."""
SOLVER_TIME_SHARE: Final = 0.25
"""Share of the goal's remaining time that the solver may take in one try."""
ANY_ANSWER_GAP: Final = 0.9
"""Gap for a solver that shall find any answer at all."""

TrialResult = Ints | bool
"""The result of trying a level.

It is a choice; or False if it is proven that no choice exists; or True if it was not decided."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SettledLevels:
    """A choice, the levels reached in the settled places, and a proven bound of the first place."""

    choice: Ints
    places: tuple[float, ...]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LevelSearch:
    """The context of every try.

    ``proofs`` has (level, most jobs that can be at or below it), as proven so far. They also hold
    for later places, because limits are only ever added.
    """

    goal: Levels
    solver: Solver
    calls: Calls
    budget: Budget
    proofs: list[tuple[float, float]] = field(default_factory=list)

    def excludes(self, limit: Limit, jobs: int) -> bool:
        """Return whether it is proven that ``limit`` cannot be kept among ``jobs`` jobs."""
        least = jobs - limit.most
        return any(limit.above <= level and most < least for level, most in self.proofs)


def settle_levels(
    problem: Problem, goal: Levels, choice: Ints, solver: Solver, calls: Calls, budget: Budget
) -> SettledLevels:
    """Settle the first ``goal.depth`` places of the sorted levels, starting from ``choice``.

    Place n (from 0) is the least level above which a choice can have at most n jobs, while the
    places before it hold. This property is monotone in the level, so place n is found by bisection
    over the levels that occur. A level that remains undecided for lack of time is treated as
    impossible, but only what is proven counts for the bound. Places for which no time is left keep
    the level that they have in ``choice``, which must be feasible.
    """
    search = _LevelSearch(goal=goal, solver=solver, calls=calls, budget=budget)
    places: list[float] = []
    bound, at_floor = -math.inf, True
    most = min(goal.depth, int(jobs_that_count(problem).sum()))
    for place in range(most):
        if calls.over(budget):
            places += levels_of(problem, goal, choice)[place:most].tolist()
            break
        now = add_limits(problem, goal, limits_of(places))
        floors = _floors(now, goal)
        choice, proven = _place(now, search, choice, place, floors, floor_first=at_floor)
        reached = float(levels_of(problem, goal, choice)[place])
        places.append(reached)
        bound = proven if place == 0 else bound
        at_floor = reached <= floors[place]
    return SettledLevels(choice=choice, places=tuple(places), bound=bound)


def lowest_possible_level(problem: Problem, goal: Levels) -> float:
    """Return a true lower bound of the worst level, without any solver; -inf if no job counts."""
    return float(max(_floors(problem, goal), default=-math.inf))


def excludes_nothing(problem: Problem, goal: Levels, bound: float, reached: float) -> bool:
    """Return whether ``bound`` of the worst level excludes no possible level below ``reached``."""
    levels = np.append(goal.level, goal.waiting[jobs_that_count(problem)])
    possible = levels[(levels >= lowest_possible_level(problem, goal)) & (levels < reached)]
    return bool(len(possible)) and bound <= float(possible.min())


def limits_of(places: Sequence[float]) -> list[Limit]:
    """Return the limits that hold ``places``, worst first.

    Among equal levels, the first limit suffices.
    """
    return [
        Limit(above=level, most=place)
        for place, level in enumerate(places)
        if place == 0 or level < places[place - 1]
    ]


def loosen_levels(goal: Levels, places: Sequence[float]) -> tuple[float, ...]:
    """Return the levels up to which later goals may raise ``places``."""
    return tuple(
        level + goal.tolerance * abs(level) if math.isfinite(level) else level for level in places
    )


def _place(
    problem: Problem,
    search: _LevelSearch,
    choice: Ints,
    place: int,
    floors: Floats,
    *,
    floor_first: bool,
) -> tuple[Ints, float]:
    """Return the choice with the least level in ``place``, and a proven lower bound of that level.

    The ends are tried before the middle, since often nothing below the known level is possible.
    """
    goal = search.goal
    top = levels_of(problem, goal, choice)[place]
    levels = np.unique(np.append(goal.level, goal.waiting[jobs_that_count(problem)]))
    levels = levels[(levels >= floors[place]) & (levels < top)]
    proven, low, high = 0, 0, len(levels)
    ends = [high - 1, 0] if floor_first else [high - 1]
    while low < high:
        search.budget.check()
        middle = ends.pop() if ends else (low + high) // 2
        if not low <= middle < high:
            continue
        limit = Limit(above=float(levels[middle]), most=place)
        tried = _try(problem, search, choice, limit)
        if isinstance(tried, bool):
            low = middle + 1
            proven = proven if tried else low
        else:
            choice = tried
            top = levels_of(problem, goal, choice)[place]
            high = int(np.searchsorted(levels, top))
    return choice, float(levels[proven] if proven < high else top)


def _floors(problem: Problem, goal: Levels) -> Floats:
    """Return the least level that each job could have if it were alone, worst first."""
    counted = np.flatnonzero(jobs_that_count(problem))
    alone = np.where(fits_alone(problem), goal.level, np.inf)
    best = reduce_by_job(np.minimum, alone, problem.job_start)
    best = np.where(problem.must_run, best, np.minimum(best, goal.waiting))
    return np.asarray(np.sort(best[counted])[::-1])


def _try(problem: Problem, search: _LevelSearch, known: Ints, limit: Limit) -> TrialResult:
    """Return a choice that also keeps ``limit``, or the result that a bool stands for (``TrialResult``)."""
    goal, solver, calls, budget = search.goal, search.solver, search.calls, search.budget
    jobs = int(jobs_that_count(problem).sum())
    if search.excludes(limit, jobs):
        return False
    limited = add_limits(problem, goal, [limit])
    needed, origin = restrict_columns(limited, _needed(limited, goal, limit))
    if len(find_unrunnable(needed)):
        return False
    if solver.name == "portfolio":  # counting by its shadow prices usually decides, and ends sooner
        counts, waiting = _count(problem, goal, limit, origin)
        solution = calls.solve(
            Pricing(), counts, budget.share(PRICES_TIME_SHARE), _hint(counts, origin, known)
        )
        if solution is None:
            return True
        most = solution.bound + waiting
        if limit.most > 0 or not (problem.must_run.any() or len(problem.idle_row)):
            # With other limits, columns above the limit might make room, so it is not a proof.
            search.proofs.append((limit.above, most))
        if most < jobs - limit.most:
            return False
        answer = _lifted(limited, origin, solution)
        if answer is not None:
            return answer
    any_answer = replace(needed, value=np.zeros(len(origin), np.int64))
    any_budget = replace(budget.share(SOLVER_TIME_SHARE), gap=ANY_ANSWER_GAP)
    solution = calls.solve(solver, any_answer, any_budget)
    if solution is not None and solution.status is SolveStatus.INFEASIBLE:
        return False
    answer = None if solution is None else _lifted(limited, origin, solution)
    return True if answer is None else answer


def _needed(limited: Problem, goal: Levels, limit: Limit) -> Bools:
    """Return the columns that a choice may need, bool[columns].

    They are columns that fit, of jobs that cannot simply wait. Of a job's columns that keep the
    limit and use only the same single row, the one that uses least is enough. If no column of a job
    fits, but the job uses a row by waiting, it keeps all its columns, since it must have some.
    """
    fits, job = fits_alone(limited), limited.column_job
    idles = np.diff(limited.idle_start) > 0
    stuck = idles & (np.bincount(job[fits], minlength=len(idles)) == 0)
    free = ~limited.must_run & ~idles
    keep = fits.copy()
    simple = np.flatnonzero(
        fits & (np.diff(limited.usage_start) == 1) & (goal.level <= limit.above)
    )
    row, amount = (part[limited.usage_start[simple]] for part in (limited.row, limited.amount))
    order = np.lexsort((amount, row, job[simple]))
    again = np.zeros(len(order), dtype=np.bool_)
    own_job, own_row = job[simple][order], row[order]
    again[1:] = (own_job[1:] == own_job[:-1]) & (own_row[1:] == own_row[:-1])
    keep[simple[order[again]]] = False
    return np.asarray((keep | stuck[job]) & ~free[job])


def _count(problem: Problem, goal: Levels, limit: Limit, origin: Ints) -> tuple[Problem, int]:
    """Return the problem that counts jobs at or below the limit, and the number there by waiting.

    The latter are not counted, so waiting has the value 0. Its columns are ``origin`` of the whole
    problem. If no job may be above the limit, columns above it are not among them.
    """
    waits_below = ~problem.must_run & (goal.waiting <= limit.above)
    gain = (goal.level <= limit.above).astype(np.int64) - waits_below[problem.column_job]
    keep = np.zeros(len(problem.cell), dtype=np.bool_)
    keep[origin] = True
    counts, _ = restrict_columns(replace(problem, value=gain), keep)
    return counts, int((jobs_that_count(problem) & waits_below).sum())


def _hint(counts: Problem, origin: Ints, known: Ints) -> Solution | None:
    """Return the known choice in the columns ``origin``, or None if it needs others."""
    place = np.searchsorted(origin, known)
    has = (known >= 0) & (place < len(origin))
    has[has] = origin[place[has]] == known[has]
    choice = np.where(has, place, -1)
    if not is_answer(counts, choice):
        return None
    return Solution(
        status=SolveStatus.FEASIBLE,
        choice=choice,
        objective=objective_of(counts, choice),
        bound=trivial_bound(counts),
        solver="goals",
    )


def _lifted(limited: Problem, origin: Ints, solution: Solution) -> Ints | None:
    """Return the solution's choice in the columns of ``limited``; None if it is infeasible there."""
    if not solution.has_answer:
        return None
    choice = read_back_choice(origin, solution.choice)
    return choice if is_answer(limited, choice) else None
