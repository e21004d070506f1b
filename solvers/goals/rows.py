"""Rows that represent reached goals, so that later goals do not give them away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.draft import RowUse
from tessera.formulation.round.goals import Levels, Linear
from tessera.formulation.round.problem import (
    MAX_TOTAL,
    CouplingRow,
    Problem,
    RowKind,
    reduce_by_job,
    restrict_problem,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on levels: at most ``most`` jobs have a level above ``above``."""

    above: float
    most: int


def with_rows(problem: Problem, rows: Sequence[RowUse]) -> Problem:
    """Return the problem with ``rows`` after its own."""
    if not rows:
        return problem
    first = len(problem.rows)
    uses = [(first + i, r.column, r.amount) for i, r in enumerate(rows)]
    idles = [(first + i, r.idle_job, r.idle_amount) for i, r in enumerate(rows)]
    usage_start, row, amount = _merged(
        problem.usage_column, problem.row, problem.amount, uses, len(problem.cell)
    )
    idle_start, idle_row, idle_amount = _merged(
        problem.idle_job, problem.idle_row, problem.idle_amount, idles, len(problem.jobs)
    )
    return replace(
        problem,
        rows=(*problem.rows, *(use.row for use in rows)),
        usage_start=usage_start,
        row=row,
        amount=amount,
        idle_start=idle_start,
        idle_row=idle_row,
        idle_amount=idle_amount,
    )


def _merged(
    owner: Ints, row: Ints, amount: Ints, added: list[tuple[int, Ints, Ints]], owners: int
) -> tuple[Ints, Ints, Ints]:
    """Return compressed rows (start, row, amount) with the entries of higher rows added.

    Entries of amount 0 are not added.
    """
    parts = [(index, who[what > 0], what[what > 0]) for index, who, what in added]
    owner = np.concatenate([owner, *(who for _, who, _ in parts)])
    row = np.concatenate([row, *(np.full(len(who), index) for index, who, _ in parts)])
    amount = np.concatenate([amount, *(what for *_, what in parts)])
    order = np.argsort(owner, kind="stable")  # added rows come after the existing rows
    start = np.searchsorted(owner[order], np.arange(owners + 1))
    return start, row[order], amount[order]


def keep_goal_row(problem: Problem, goal: Linear, reached: int) -> RowUse:
    """Return the row that keeps ``goal`` at no less than ``least_kept_value(goal, reached)``.

    Let top_j be the most that job j can add, at least 0 if it may wait. The sum of values is at
    least k if the amounts by which jobs fall short of top_j sum to at most the sum of top_j less k:

        sum over chosen columns of (top_j - v_c) + sum over waiting jobs of top_j
            <= sum over jobs of top_j - k

    If that exceeds 2^53, amounts and capacity are divided by a power of two and rounded down. No
    choice that keeps the goal is lost; less than that power can be given away per job unnoticed.
    """
    return keep_value_row(problem, goal, least_kept_value(goal, reached))


def keep_value_row(problem: Problem, goal: Linear, least: int) -> RowUse:
    """Return the row that keeps ``goal`` at no less than ``least``; see ``keep_goal_row``."""
    may_wait = ~problem.must_run & (np.diff(problem.job_start) > 0)
    top = reduce_by_job(np.maximum, goal.value.astype(np.float64), problem.job_start)
    top_value = np.where(may_wait, np.maximum(top, 0.0), top).astype(np.int64)
    waits = np.flatnonzero(may_wait & (top_value > 0))
    amount, idle = top_value[problem.column_job] - goal.value, top_value[waits]
    capacity = int(top_value.sum()) - least
    total = float(amount.sum(dtype=np.float64) + idle.sum(dtype=np.float64))
    shift = max(0, math.frexp(max(total, float(capacity)) / MAX_TOTAL)[1])
    return RowUse(
        row=CouplingRow(
            kind=RowKind.GOAL, subject=f"keeps {goal.name}", capacity=capacity >> shift
        ),
        column=np.arange(len(amount), dtype=np.int64),
        amount=amount >> shift,
        idle_job=waits,
        idle_amount=idle >> shift,
    )


def least_kept_value(goal: Linear, reached: int) -> int:
    """Return the value that later goals must leave of ``reached``, in the goal's integers."""
    return reached - math.floor(goal.tolerance * abs(reached))


def add_limits(problem: Problem, goal: Levels, limits: Sequence[Limit]) -> Problem:
    """Return the problem with each of ``limits`` as a row.

    Jobs that may no longer wait must run.
    """
    rows = [_at_most(problem, goal, limit) for limit in limits]
    none_above = min((limit.above for limit in limits if limit.most == 0), default=math.inf)
    must_run = problem.must_run | (jobs_that_count(problem) & (goal.waiting > none_above))
    return with_rows(replace(problem, must_run=must_run), [r for r in rows if r is not None])


def _at_most(problem: Problem, goal: Levels, limit: Limit) -> RowUse | None:
    """Return the row of a limit, or None if no column and no waiting is above it.

    Each column or waiting job above the limit counts 1.
    """
    column = np.flatnonzero(goal.level > limit.above)
    waits = jobs_that_count(problem) & ~problem.must_run & (goal.waiting > limit.above)
    idle_job = np.flatnonzero(waits & (limit.most > 0))  # otherwise it must run
    if not len(column) and not len(idle_job):
        return None
    subject = f"{goal.name}: at most {limit.most} above {limit.above:.6g}"
    return RowUse(
        row=CouplingRow(kind=RowKind.GOAL, subject=subject, capacity=limit.most),
        column=column,
        amount=np.ones(len(column), np.int64),
        idle_job=idle_job,
        idle_amount=np.ones(len(idle_job), np.int64),
    )


def jobs_that_count(problem: Problem) -> Bools:
    """Return the jobs whose levels count, bool[jobs]: those with a column."""
    return np.diff(problem.job_start) > 0


def levels_of(problem: Problem, goal: Levels, choice: Ints) -> Floats:
    """Return the levels of the jobs that count, worst first."""
    counted = np.flatnonzero(jobs_that_count(problem))
    own = choice[counted]
    level = np.where(own >= 0, goal.level[own] if len(goal.level) else 0.0, goal.waiting[counted])
    return np.asarray(np.sort(level)[::-1])


def restrict_columns(problem: Problem, keep: Bools) -> tuple[Problem, Ints]:
    """Return the problem with only the columns ``keep`` (bool[columns]), and their old indices.

    A job that loses all of its columns may only wait, and must be free to.
    """
    origin = np.flatnonzero(keep)
    return restrict_problem(problem, np.arange(len(problem.jobs)), origin), origin
