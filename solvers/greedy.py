"""Greedy: again and again the step that gains most per unit of what it takes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from formulation.problem import Problem, jobwise
from formulation.solution import Solution, SolveStatus
from formulation.tables import Bools, Floats, Ints
from solvers.answers import (
    answer,
    cannot_run,
    is_answer,
    lonely_fit,
    objective_of,
    trivial_bound,
    usable_hint,
    without_answer,
)
from solvers.base import Budget

_FREE_STEP = 1e-9
"""A step that takes no more than this share of the cluster counts as taking this."""
_MISSES_BEFORE_REBUILD = 50
"""After so many stale entries, judging all jobs at once is cheaper than one by one."""

Use: TypeAlias = tuple[tuple[int, int], ...]  # (row, amount) pairs
Option: TypeAlias = tuple[int, int, float, Use]  # column, value, size, use


class Greedy:
    """Starts, upgrades and retypes by marginal gain per share of the cluster's capacity.

    A column's size is the sum over rows of amount / capacity. Each step takes the largest
    (gain in value) / (gain in size) among all steps that fit, over starting a waiting job and
    changing a placed one to a better column: the greedy of the multiple-choice knapsack, whose steps
    climb each job's efficient frontier. It is run from the must-run jobs alone, from what runs now,
    and from the hint; the best answer is kept. The budget does not bind it: it always ends.
    """

    name = "greedy"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Answer ``problem``; INFEASIBLE only where a must-run job fits nowhere even alone."""
        work = ((self.name, 1.0),)
        if len(cannot_run(problem)):
            return without_answer(
                problem, SolveStatus.INFEASIBLE, solver=self.name, seed=budget.seed, work=work
            )
        share = shares(problem)
        best: Ints | None = None
        for start in _starts(problem, hint, share):
            choice = improve(problem, start, share)
            if best is None or objective_of(problem, choice) > objective_of(problem, best):
                best = choice
        if best is None:
            return without_answer(
                problem, SolveStatus.UNKNOWN, solver=self.name, seed=budget.seed, work=work
            )
        return answer(
            problem, best, bound=trivial_bound(problem), solver=self.name, seed=budget.seed,
            work=work,
        )  # fmt: skip


def shares(problem: Problem) -> Floats:
    """Return the share of its row that one unit is, float64[rows]; 0 where the row has no capacity."""
    capacity = problem.capacity.astype(np.float64)
    return np.divide(1.0, capacity, out=np.zeros_like(capacity), where=capacity > 0)


def improve(problem: Problem, start: Ints, weight: Floats) -> Ints:
    """Return ``start`` after every step that gains, best gain per size first, int64[jobs].

    ``start`` must be an answer; ``weight`` (float64[rows]) is what a unit of a row counts: its share of
    the capacity, or its price. No step lowers the objective, and no job stops.
    """
    board = _Board(problem, start, weight)
    while board.fill_heap():
        misses = 0
        while board.heap and misses < _MISSES_BEFORE_REBUILD:
            _, job, column = heapq.heappop(board.heap)
            if board.fits(job, column):
                board.move(job, column)
            else:
                misses += 1
            board.push_best_step(job)
    return np.array(board.choice, dtype=np.int64)


class _Board:
    """A choice being improved: what is free, and the best known step of each job."""

    def __init__(self, problem: Problem, start: Ints, weight: Floats) -> None:
        self.problem = problem
        self.choice: list[int] = start.tolist()
        self.free: list[int] = (problem.capacity - problem.used(start)).tolist()
        self.job = problem.column_job
        self.entry_column = problem.usage_column
        self.entry_job = self.job[self.entry_column]
        self.size = problem.cost(weight)
        self.possible = lonely_fit(problem)
        self.heap: list[tuple[float, int, int]] = []
        self._options: dict[int, list[Option]] = {}
        self._own: dict[int, dict[int, int]] = {}

    def fill_heap(self) -> bool:
        """Judge every column at once and keep each job's best step; return whether there is one."""
        problem, choice = self.problem, np.array(self.choice, dtype=np.int64)
        if not len(problem.cell):
            return False
        runs = choice >= 0
        value = np.where(runs, problem.value[choice], 0)
        size = np.where(runs, self.size[choice], 0.0)
        gain = problem.value - value[self.job]
        candidate = np.flatnonzero((gain > 0) & self._fitting(choice))
        if not len(candidate):
            return False
        job = self.job[candidate]
        ratio = gain[candidate] / np.maximum(self.size[candidate] - size[job], _FREE_STEP)
        first = np.flatnonzero(np.diff(job, prepend=-1))
        counts = np.diff(np.append(first, len(job)))
        at_best = np.flatnonzero(ratio == np.repeat(np.maximum.reduceat(ratio, first), counts))
        one_each = at_best[np.flatnonzero(np.diff(job[at_best], prepend=-1))]
        self.heap = list(
            zip(
                (-ratio[one_each]).tolist(), job[one_each].tolist(), candidate[one_each].tolist(),
                strict=True,
            )
        )  # fmt: skip
        heapq.heapify(self.heap)
        return True

    def _fitting(self, choice: Ints) -> Bools:
        """Return, bool[columns], which columns fit once their job has given back what it holds."""
        problem, rows = self.problem, len(self.problem.rows)
        free = np.array(self.free, dtype=np.int64)
        chosen = np.zeros(len(problem.cell), dtype=np.bool_)
        chosen[choice[choice >= 0]] = True
        mine = chosen[self.entry_column]
        own = np.bincount(
            self.entry_job[mine] * rows + problem.row[mine],
            weights=problem.amount[mine], minlength=len(problem.jobs) * rows,
        )  # fmt: skip
        key = self.entry_job * rows + problem.row
        fits = self.possible.copy()
        fits[self.entry_column[problem.amount > free[problem.row] + own[key]]] = False
        return fits

    def options(self, job: int) -> list[Option]:
        """Return the columns of ``job`` that fit into the empty cluster, as plain Python values."""
        known = self._options.get(job)
        if known is None:
            known = [
                (c, int(self.problem.value[c]), float(self.size[c]), self.use(c))
                for c in self.problem.columns_of(job)
                if self.possible[c]
            ]
            self._options[job] = known
        return known

    def use(self, column: int) -> Use:
        """Return what ``column`` uses."""
        return tuple(self.problem.usage_of(column).items())

    def own(self, job: int) -> dict[int, int]:
        """Return row -> amount that ``job`` holds now."""
        known = self._own.get(job)
        if known is None:
            column = self.choice[job]
            known = dict(self.use(column)) if column >= 0 else {}
            self._own[job] = known
        return known

    def fits(self, job: int, column: int) -> bool:
        """Return whether ``job`` can change to ``column`` now."""
        return self._fits(self.use(column), self.own(job))

    def _fits(self, use: Use, own: dict[int, int]) -> bool:
        free = self.free
        return all(amount <= free[row] + own.get(row, 0) for row, amount in use)

    def push_best_step(self, job: int) -> None:
        """Put the best step of ``job`` that fits now on the heap, if there is one."""
        now, own = self.choice[job], self.own(job)
        value = int(self.problem.value[now]) if now >= 0 else 0
        size = float(self.size[now]) if now >= 0 else 0.0
        best, found = 0.0, -1
        for column, worth, takes, use in self.options(job):
            if worth <= value:
                continue
            ratio = (worth - value) / max(takes - size, _FREE_STEP)
            if ratio > best and self._fits(use, own):
                best, found = ratio, column
        if found >= 0:
            heapq.heappush(self.heap, (-best, job, found))

    def move(self, job: int, column: int) -> None:
        """Change ``job`` to ``column``."""
        for row, amount in self.own(job).items():
            self.free[row] += amount
        use = self.use(column)
        for row, amount in use:
            self.free[row] -= amount
        self._own[job] = dict(use)
        self.choice[job] = column


def _starts(problem: Problem, hint: Solution | None, share: Floats) -> list[Ints]:
    """Return the answers to improve on: must-run jobs alone, what runs now, the hint; none twice."""
    packed = pack_must_run(problem, share)
    staying = pack_must_run(problem, share, stay=True)
    found = [packed, _keep(problem, staying, share), usable_hint(problem, hint)]
    if packed is None:
        found.append(staying)
    starts: list[Ints] = []
    for start in found:
        if start is not None and not any(np.array_equal(start, other) for other in starts):
            starts.append(start)
    return starts


def pack_must_run(problem: Problem, weight: Floats, *, stay: bool = False) -> Ints | None:
    """Return a choice that runs just the must-run jobs, largest first; None if this finds none.

    Each takes its current column if ``stay`` and it fits, else its smallest column that fits. Where
    that fails, each takes the column that uses the smallest share of what is still free.
    """
    for balance in (False, True):
        choice = _pack(problem, weight, stay=stay, balance=balance)
        if choice is not None:
            return choice
    return None


def _pack(problem: Problem, weight: Floats, *, stay: bool, balance: bool) -> Ints | None:
    board = _Board(problem, np.full(len(problem.jobs), -1, dtype=np.int64), weight)
    smallest = jobwise(np.minimum, board.size, problem.job_start)
    must = np.flatnonzero(problem.must_run)
    for job in must[np.argsort(-smallest[must], kind="stable")].tolist():
        fitting = [option for option in board.options(job) if board.fits(job, option[0])]
        if not fitting:
            return None
        current = int(problem.current[job])
        if stay and any(option[0] == current for option in fitting):
            board.move(job, current)
        else:
            board.move(job, min(fitting, key=lambda o: _cost(o, board.free, balance))[0])
    return np.array(board.choice, dtype=np.int64)


def _cost(option: Option, free: Sequence[int], balance: bool) -> tuple[float, float]:
    _, value, size, use = option
    if not balance:
        return size, -value
    return max((amount / max(free[row], 1) for row, amount in use), default=0.0), -value


def _keep(problem: Problem, staying: Ints | None, weight: Floats) -> Ints | None:
    """Return ``staying`` with as many of the other running jobs as fit, densest first."""
    running = np.flatnonzero((problem.current >= 0) & ~problem.must_run)
    if staying is None:
        return None
    whole = np.where(staying >= 0, staying, problem.current)
    if is_answer(problem, whole):
        return whole
    board = _Board(problem, staying, weight)
    column = problem.current[running]
    density = problem.value[column] / np.maximum(board.size[column], _FREE_STEP)
    for job in running[np.argsort(-density, kind="stable")].tolist():
        if board.fits(job, int(problem.current[job])):
            board.move(job, int(problem.current[job]))
    return np.array(board.choice, dtype=np.int64)
