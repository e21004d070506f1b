"""The compiled search for one or two changes of an answer that gain together.

At prices p, a change of a job's column alters its margin by d, at most 0 from its best. Changes whose
use fits into what is free gain at most their d plus the price of what is free. So only changes with d
above minus that price can gain, and only such pairs, and both are few once an answer is good.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily


class ExchangeColumns(NamedTuple):
    """The columns of a problem at prices."""

    job_start: Ints
    value: Ints
    usage_start: Ints
    row: Ints
    amount: Ints
    must_run: Bools
    margin: Floats  # float64[columns]
    prices: Floats  # float64[rows]


class ChangeList(NamedTuple):
    """Changes by rising loss: ``column`` (-1: waiting) instead of what ``job`` has now."""

    job: Ints  # int64[changes]
    column: Ints  # int64[changes]
    loss: Floats  # float64[changes], of margin
    gain: Ints  # int64[changes], of value
    more: Ints  # int64[changes, rows], additional usage


@compile_lazily
def exchange_pairs(
    columns: ExchangeColumns, choice: Ints, free: Ints, most_changes: int, most_steps: int
) -> int:
    """Improve ``choice`` (int64[jobs]) by single changes and pairs of them. Return the steps taken.

    Of each scan, the first change that gains with its best partner is made. ``free`` (int64[rows]) is
    updated. ``most_changes`` are looked at in a scan, those that lose least margin first.
    """
    for step in range(most_steps):
        room = 0.0
        for r in range(free.size):
            room += columns.prices[r] * free[r]
        changes = _list_changes(columns, choice, room, free.size, most_changes)
        first, second = -1, -1
        for i in range(changes.job.size):
            first, second = _find_partner(changes, i, free, room)
            if first >= 0:
                break
        if first < 0:
            return step
        for k in (first, second):
            if k >= 0:
                choice[changes.job[k]] = changes.column[k]
                for r in range(free.size):
                    free[r] -= changes.more[k, r]
    return most_steps


@compile_lazily
def _list_changes(
    columns: ExchangeColumns, choice: Ints, room: float, rows: int, most: int
) -> ChangeList:
    """Return the changes that lose less margin than ``room``, at most ``most``."""
    total = columns.value.size + choice.size
    job_of, column_of = np.empty(total, np.int64), np.empty(total, np.int64)
    lost, found = np.empty(total), 0
    for job in range(choice.size):
        now = 0.0 if choice[job] < 0 else columns.margin[choice[job]]
        for c in range(columns.job_start[job], columns.job_start[job + 1]):
            if c != choice[job] and columns.margin[c] - now > -room:
                job_of[found], column_of[found] = job, c
                lost[found] = now - columns.margin[c]
                found += 1
        if choice[job] >= 0 and not columns.must_run[job] and now < room:
            job_of[found], column_of[found], lost[found] = job, -1, now
            found += 1
    order = np.argsort(lost[:found])[:most]
    gain, more = np.zeros(order.size, np.int64), np.zeros((order.size, rows), np.int64)
    for k in range(order.size):
        new, old = column_of[order[k]], choice[job_of[order[k]]]
        if new >= 0:
            gain[k] += columns.value[new]
            for e in range(columns.usage_start[new], columns.usage_start[new + 1]):
                more[k, columns.row[e]] += columns.amount[e]
        if old >= 0:
            gain[k] -= columns.value[old]
            for e in range(columns.usage_start[old], columns.usage_start[old + 1]):
                more[k, columns.row[e]] -= columns.amount[e]
    return ChangeList(job_of[order], column_of[order], lost[order], gain, more)


@compile_lazily
def _find_partner(changes: ChangeList, first: int, free: Ints, room: float) -> tuple[int, int]:
    """Return ``first`` and the later change with which it gains most; -1 is no change.

    Return two times -1 if it does not gain, alone or with any other.
    """
    best, found, second = 0, -1, -1
    fits = True
    for r in range(free.size):
        fits = fits and changes.more[first, r] <= free[r]
    if fits and changes.gain[first] > 0:
        best, found = changes.gain[first], first
    for k in range(first + 1, changes.job.size):
        if changes.loss[first] + changes.loss[k] >= room:
            break
        gain = changes.gain[first] + changes.gain[k]
        if gain > best and changes.job[first] != changes.job[k]:
            fits = True
            for r in range(free.size):
                if changes.more[first, r] + changes.more[k, r] > free[r]:
                    fits = False
                    break
            if fits:
                best, found, second = gain, first, k
    return found, second
