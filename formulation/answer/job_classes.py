"""Classes of identical jobs of a problem in which waiting is spelled out, for proofs of its bound.

It is written without the solvers' code, so that a proof's checker cannot share a mistake with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobClasses:
    """The classes of a problem: all that a bound depends on, with each class written once.

    Class k has ``count[k]`` jobs, the first of which is job ``first[k]``. ``class_of`` is the class
    of each job. The columns of class k are ``start[k] : start[k + 1]``; ``column`` has their
    numbers in the problem with waiting as a column, rising. Columns that use more of a row than
    there is are left out, since no answer has them. Column i uses ``amount[e]`` of row ``row[e]``
    for e in ``entry_start[i] : entry_start[i + 1]``. ``capacity`` is rounded down to a multiple of
    the greatest common divisor of its row's amounts, ``divisor`` (0 if no column uses the row).
    ``value_divisor`` is that of all values, at least 1.
    """

    first: tuple[int, ...]
    count: tuple[int, ...]
    class_of: Ints  # int64[jobs]
    must_run: Bools  # bool[classes]
    start: Ints  # int64[classes + 1]
    column: Ints  # int64[columns of classes]
    value: Ints  # int64[columns of classes]
    entry_start: Ints  # int64[columns of classes + 1]
    row: Ints  # int64[entries]
    amount: Ints  # int64[entries]
    capacity: tuple[int, ...]
    divisor: tuple[int, ...]
    value_divisor: int
    job_start: Ints  # int64[jobs + 1], of the columns of each job in ``number``
    number: Ints  # int64[columns that fit], their numbers as in ``column``, of all jobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Spelled:
    """The arrays of a problem in which a job that uses rows by waiting waits on its last column."""

    job_start: Ints
    number: Ints  # int64[columns], of the column in the problem with waiting as a column
    value: Ints
    uses: Ints  # int64[columns], number of entries
    row: Ints
    amount: Ints
    must_run: Bools


def join_identical_jobs(problem: Problem) -> JobClasses:
    """Return the classes of ``problem``, in the order of their first jobs.

    Two jobs are in one class if their columns are equal in the same order, value by value and use by
    use, and both must run or both may wait.
    """
    spelled = _without_too_large(_spell_out_waiting(problem), problem)
    class_of, first = _group(spelled)
    is_first = np.zeros(len(problem.jobs), np.bool_)
    is_first[list(first)] = True
    columns = np.diff(spelled.job_start)
    kept = np.repeat(is_first, columns)
    entries = np.repeat(kept, spelled.uses)
    row, amount = spelled.row[entries], spelled.amount[entries]
    divisor = [0] * len(problem.rows)
    for r in np.unique(row).tolist():
        divisor[r] = math.gcd(*np.unique(amount[row == r]).tolist())
    capacity = [r.capacity for r in problem.rows]
    return JobClasses(
        first=first,
        count=tuple(np.bincount(class_of, minlength=len(first)).tolist()),
        class_of=class_of,
        must_run=spelled.must_run[is_first],
        start=np.append(0, np.cumsum(columns[is_first])),
        column=spelled.number[kept],
        value=spelled.value[kept],
        entry_start=np.append(0, np.cumsum(spelled.uses[kept])),
        row=row,
        amount=amount,
        capacity=tuple(c - c % d if d else 0 for c, d in zip(capacity, divisor, strict=True)),
        divisor=tuple(divisor),
        value_divisor=math.gcd(*np.unique(spelled.value[kept]).tolist()) or 1,
        job_start=spelled.job_start,
        number=spelled.number,
    )


def _spell_out_waiting(problem: Problem) -> _Spelled:
    """Return the problem's arrays with waiting as the last column of each job that waits by use."""
    waits = (np.diff(problem.idle_start) > 0) & ~problem.must_run
    ends, idles = problem.job_start[1:][waits], np.diff(problem.idle_start)[waits]
    idle = np.repeat(waits, np.diff(problem.idle_start))
    place = np.repeat(problem.usage_start[ends], idles)
    return _Spelled(
        job_start=np.append(0, np.cumsum(np.diff(problem.job_start) + waits)),
        number=np.arange(len(problem.value) + len(ends)),
        value=np.insert(problem.value, ends, 0),
        uses=np.insert(np.diff(problem.usage_start), ends, idles),
        row=np.insert(problem.row, place, problem.idle_row[idle]),
        amount=np.insert(problem.amount, place, problem.idle_amount[idle]),
        must_run=problem.must_run | waits,
    )


def _without_too_large(spelled: _Spelled, problem: Problem) -> _Spelled:
    """Return the columns that fit into the empty cluster."""
    capacity = np.array([r.capacity for r in problem.rows], dtype=np.int64)
    column = np.repeat(np.arange(len(spelled.value)), spelled.uses)
    fits = np.ones(len(spelled.value), np.bool_)
    fits[column[spelled.amount > capacity[spelled.row]]] = False
    if fits.all():
        return spelled
    before = np.append(0, np.cumsum(fits))
    entries = fits[column]
    return _Spelled(
        job_start=before[spelled.job_start],
        number=spelled.number[fits],
        value=spelled.value[fits],
        uses=spelled.uses[fits],
        row=spelled.row[entries],
        amount=spelled.amount[entries],
        must_run=spelled.must_run,
    )


def _group(spelled: _Spelled) -> tuple[Ints, tuple[int, ...]]:
    """Return each job's class, and the first job of each class. Jobs are compared byte by byte."""
    starts = spelled.job_start.tolist()
    entries = np.append(0, np.cumsum(spelled.uses))[spelled.job_start].tolist()
    value, uses = spelled.value.tobytes(), spelled.uses.tobytes()
    row, amount = spelled.row.tobytes(), spelled.amount.tobytes()
    known: dict[tuple[object, ...], int] = {}
    class_of: list[int] = []
    first: list[int] = []
    for job, must in enumerate(spelled.must_run.tolist()):
        a, b = 8 * starts[job], 8 * starts[job + 1]
        p, q = 8 * entries[job], 8 * entries[job + 1]
        content = (must, value[a:b], uses[a:b], row[p:q], amount[p:q])
        k = known.setdefault(content, len(first))
        class_of.append(k)
        if k == len(first):
            first.append(job)
    return np.array(class_of, np.int64), tuple(first)
