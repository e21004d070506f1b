"""Classes of identical jobs: the undecided part of a problem, joined and counted.

Jobs are identical if they have the same columns, value by value and use by use, and both must run or
both may wait. At any shadow prices they then have the same margins. So what the prices decide, they
decide for all jobs of a class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.round.problem import Problem, reduce_by_job, restrict_problem
from tessera.solvers.exact.answers import objective_of
from tessera.solvers.exact.fixing import column_losses
from tessera.solvers.exact.prices import PricedProblem
from tessera.solvers.kernels.branching import JoinedProgram
from tessera.solvers.kernels.leaves import ProblemColumns

_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
"""Odd numbers that spread over 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedCore:
    """The undecided part of a problem, with identical jobs joined.

    ``program`` is its statement. Its columns are ``columns`` (int64) of the first job of each class.
    ``members`` are the jobs of all classes, and those of class k are ``members[member_start[k] :
    member_start[k + 1]]``, the first of them first. ``around`` is the whole problem as its proof
    needs it. ``offset`` is the value of what is settled. ``outside`` is about the
    bound of all answers that use something that was left out; it is -inf if nothing was.
    """

    program: JoinedProgram
    columns: Ints
    members: Ints
    member_start: Ints
    around: ProblemColumns
    offset: int
    outside: float


def join_core(
    problem: Problem, priced: PricedProblem, reach: float, most: int
) -> JoinedCore | None:
    """Return the joined core of all columns that lose at most ``reach``.

    If it would have more than ``most`` columns next to the best ones, those that lose least are kept.
    Return None if a must-run job has no column.
    """
    if np.any(problem.must_run & (np.diff(problem.job_start) == 0)):
        return None
    loss = column_losses(problem, priced)
    first, label = find_classes(problem, _undecided(problem, priced, loss, reach)[0])
    reach = _limit_reach(problem, first, loss, reach, most)
    keep = loss <= reach
    undecided, may_idle, count = _undecided(problem, priced, loss, reach)
    settled = np.full(len(problem.jobs), -1, dtype=np.int64)
    only = (count == 1) & ~may_idle
    kept = np.flatnonzero(keep)
    settled[only] = kept[only[problem.column_job[kept]]]
    chosen = first[undecided[first]]  # the first jobs of the undecided classes
    columns = kept[np.isin(problem.column_job[kept], chosen)]
    order = np.flatnonzero(undecided)
    order = order[np.argsort(label[order], kind="stable")]
    number = np.cumsum(undecided[first]) - 1  # of each class among the undecided
    owner = np.where(undecided, number[label], -1) if len(first) else label
    program = _program(problem, chosen, columns, owner, may_idle, settled)
    return JoinedCore(
        program=program,
        columns=columns,
        members=order,
        member_start=np.append(0, np.cumsum(program.members)),
        around=ProblemColumns(
            job_start=problem.job_start,
            value=problem.value,
            usage_start=problem.usage_start,
            row=problem.row,
            amount=problem.amount,
            capacity=problem.capacity,
            owner=owner,
            settled=settled,
            runs=~may_idle & ~problem.must_run,
            outside=~keep,
        ),
        offset=objective_of(problem, settled),
        outside=-math.inf if keep.all() else priced.total - reach,
    )


def _undecided(
    problem: Problem, priced: PricedProblem, loss: Floats, reach: float
) -> tuple[Bools, Bools, Ints]:
    """Return the jobs with more than one choice that loses at most ``reach``, bool[jobs].

    Also return those that may wait, and how many columns each has left. A job whose columns all lose
    too much waits.
    """
    count = np.bincount(problem.column_job[loss <= reach], minlength=len(problem.jobs))
    may_idle = ((priced.best <= reach) | (count == 0)) & ~problem.must_run
    return (count > 0) & ((count > 1) | may_idle), may_idle, count


def _limit_reach(problem: Problem, first: Ints, loss: Floats, reach: float, most: int) -> float:
    """Return the largest reach, at most ``reach``, that keeps at most ``most`` columns of classes."""
    of_first = np.zeros(len(problem.jobs), dtype=np.bool_)
    of_first[first] = True
    joined = loss[of_first[problem.column_job]]
    extra = joined[(joined > 0) & (joined <= reach)]
    if len(extra) <= most:
        return reach
    return float(np.nextafter(np.partition(extra, most)[most], 0.0))


def _program(
    problem: Problem, jobs: Ints, columns: Ints, owner: Ints, may_idle: Bools, settled: Ints
) -> JoinedProgram:
    """Return the statement over the columns of the first ``jobs`` of the classes."""
    count = np.bincount(owner[owner >= 0], minlength=len(jobs))
    of_class = owner[problem.column_job[columns]]
    begins = problem.usage_start[columns]
    uses = problem.usage_start[columns + 1] - begins
    entries = concatenate_ranges(begins, uses)
    usage = np.zeros((len(problem.rows), len(columns)), dtype=np.int64)
    usage[problem.row[entries], np.repeat(np.arange(len(columns)), uses)] = problem.amount[entries]
    value = np.ascontiguousarray(problem.value[columns])
    return JoinedProgram(
        class_start=np.searchsorted(of_class, np.arange(len(jobs) + 1)),
        owner=of_class,
        members=count,
        must=~may_idle[jobs],
        value=value,
        usage=usage,
        capacity=problem.capacity - problem.used(settled),
        size=np.maximum(usage.max(axis=1, initial=1), 1).astype(np.float64),
        unit=1.0 / max(float(np.abs(value).max(initial=1)), 1.0),
    )


def find_classes(problem: Problem, among: Bools) -> tuple[Ints, Ints]:
    """Return the first job of each class of the jobs ``among`` (bool[jobs]), rising.

    Also return each job's class, int64[jobs]; other jobs have -1.
    """
    jobs = np.flatnonzero(among)
    columns = np.flatnonzero(among[problem.column_job])
    first, label = _classes_of(restrict_problem(problem, jobs, columns))
    of_all = np.full(len(problem.jobs), -1, dtype=np.int64)
    of_all[jobs] = label
    return jobs[first], of_all


def _classes_of(problem: Problem) -> tuple[Ints, Ints]:
    names = _fingerprints(problem)
    _, first, label = np.unique(names, return_index=True, return_inverse=True)
    # Fingerprints may collide: a job that is not like the first of its class is one of its own.
    alike = _are_alike(problem, first[label])
    if not alike.all():
        odd = np.flatnonzero(~alike)
        label[odd] = len(first) + np.arange(len(odd))
        first = np.append(first, odd)
    order = np.argsort(first)
    place = np.empty(len(first), dtype=np.int64)
    place[order] = np.arange(len(first))
    return first[order], place[label]


def _fingerprints(problem: Problem) -> np.ndarray:
    """Return a number for each job, uint64[jobs], that is the same for identical jobs."""
    value, use, position = (np.uint64(m) for m in _MULTIPLIERS)
    with np.errstate(over="ignore"):
        entry = (problem.row.astype(np.uint64) + np.uint64(1)) * use
        entry = (entry ^ (entry >> np.uint64(29))) * (
            problem.amount.astype(np.uint64) + np.uint64(1)
        )
        column = problem.value.astype(np.uint64) * value
        column += _sums(entry * position, problem.usage_start)
        column ^= column >> np.uint64(31)
        place = np.arange(len(problem.cell)) - np.repeat(
            problem.job_start[:-1], np.diff(problem.job_start)
        )
        column *= (np.uint64(2) * place.astype(np.uint64) + np.uint64(1)) * use
        column ^= column >> np.uint64(27)
        job = _sums(column * value, problem.job_start)
        job += np.diff(problem.job_start).astype(np.uint64) * position
        return job * np.uint64(2) + problem.must_run.astype(np.uint64)


def _sums(values: np.ndarray, start: Ints) -> np.ndarray:
    """Return the sum of each span, modulo 2^64."""
    with np.errstate(over="ignore"):
        total = np.append(np.uint64(0), np.cumsum(values, dtype=np.uint64))
        return np.asarray(total[start[1:]] - total[start[:-1]])


def _are_alike(problem: Problem, other: Ints) -> Bools:
    """Return whether each job is identical to job ``other`` (int64[jobs]), bool[jobs]."""
    count = np.diff(problem.job_start)
    alike: Bools = (count == count[other]) & (problem.must_run == problem.must_run[other])
    mine = np.arange(len(problem.cell))
    shift = np.where(alike, problem.job_start[other] - problem.job_start[:-1], 0)
    theirs = mine + np.repeat(shift, count)
    uses = np.diff(problem.usage_start)
    same = (problem.value == problem.value[theirs]) & (uses == uses[theirs])
    begins = np.where(same, problem.usage_start[theirs], problem.usage_start[mine])
    entries = concatenate_ranges(begins, uses)
    equal = (problem.row == problem.row[entries]) & (problem.amount == problem.amount[entries])
    wrong = np.bincount(problem.usage_column[~equal], minlength=len(problem.cell))
    different = (~same | (wrong > 0)).astype(np.float64)
    return alike & (reduce_by_job(np.maximum, different, problem.job_start) <= 0)
