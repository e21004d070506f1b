"""The compiled knapsacks of a bound in which each GPU type is filled exactly.

Jobs have prices instead of being limited to one column. Then rows that no column shares with another
of them are separate knapsacks with multiple choice (each job at most once in each), which a dynamic
program over their capacity solves exactly, in integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

CANDIDATES = 16
"""Items of each weight among which an answer is looked for. The bound looks at all."""
SKIPPED = -2
"""A mark in the table for a job that was not looked at."""
IDLE_STEPS = 20
"""Subgradient steps without success after which the steps become shorter."""
SHORTER = 0.6
LENGTH, IDLE = 0, 1
"""Places of the state of a descent."""


class Knapsacks(NamedTuple):
    """Rows as knapsacks. The columns of one job in one row are a group; groups are sorted by row.

    The last row has no capacity: it is for columns that use none of the rows.
    """

    group_start: Ints  # int64[rows + 1], first group of each row
    item_start: Ints  # int64[groups + 1]
    owner: Ints  # int64[groups], class of the job
    job: Ints  # int64[groups]
    column: Ints  # int64[items]
    weight: Ints  # int64[items]
    worth: Ints  # int64[items], value less what the other rows cost, times the scale
    capacity: Ints  # int64[rows - 1]
    members: Ints  # int64[classes], the number of jobs of each
    must: Bools  # bool[classes]
    alone: Bools  # bool[classes], whether a class has columns in one row only, and needs no price
    sold: int  # what the capacity of the other rows costs, times the scale


@compile_lazily
def bound_by_knapsacks(sacks: Knapsacks, price: Ints, taken: Ints, table: Ints) -> int:
    """Return the bound at the jobs' prices, int64[classes], times the scale.

    ``taken`` becomes the number of columns that the knapsacks take of each class. ``table`` is
    int32[groups of a row, capacity + 1], for the largest row.
    """
    taken[:] = 0
    total = sacks.sold
    for k in range(price.size):
        total += price[k] * sacks.members[k]
    rows = sacks.capacity.size
    for row in range(rows):
        total += _fill(sacks, row, price, taken, table, False)
    for g in range(sacks.group_start[rows], sacks.group_start[rows + 1]):
        best = 0
        for i in range(sacks.item_start[g], sacks.item_start[g + 1]):
            best = max(best, sacks.worth[i] - price[sacks.owner[g]])
        total += best
        taken[sacks.owner[g]] += best > 0
    return total


@compile_lazily
def assign_by_knapsacks(
    sacks: Knapsacks, price: Ints, order: Ints, table: Ints, choice: Ints
) -> None:
    """Fill the knapsacks one after another, in ``order``, with jobs that are still waiting.

    ``choice`` (int64[jobs]) is -1 at first. Rows that are not knapsacks do not count.
    """
    for row in order:
        _fill(sacks, row, price, choice, table, True)
    rows = sacks.capacity.size
    for g in range(sacks.group_start[rows], sacks.group_start[rows + 1]):
        best = price[sacks.owner[g]]
        for i in range(sacks.item_start[g], sacks.item_start[g + 1]):
            if choice[sacks.job[g]] < 0 and sacks.worth[i] > best:
                best = sacks.worth[i]
                choice[sacks.job[g]] = sacks.column[i]


@compile_lazily
def _fill(sacks: Knapsacks, row: int, price: Ints, taken: Ints, table: Ints, assign: bool) -> int:
    """Return the most that a knapsack can hold.

    What it takes is counted in ``taken`` (int64[classes]), or given to it (int64[jobs]) if
    ``assign``; then jobs that have a column already are left out.
    """
    room = sacks.capacity[row]
    first, last = sacks.group_start[row], sacks.group_start[row + 1]
    best = np.zeros(room + 1, np.int64)
    least = _least_worth_of_weights(sacks, row, price, taken) if assign else best.copy()
    for g in range(first, last):
        paid = price[sacks.owner[g]]
        line = table[g - first]
        if (assign and taken[sacks.job[g]] >= 0) or not _is_promising(sacks, g, price, least):
            line[room] = SKIPPED
            continue
        # From the top, so that what a lighter load was worth is still that without this job.
        for load in range(room, -1, -1):
            most, item = best[load], -1
            for i in range(sacks.item_start[g], sacks.item_start[g + 1]):
                left = load - sacks.weight[i]
                if left >= 0:
                    worth = best[left] + sacks.worth[i] - paid
                    if worth > most:
                        most, item = worth, i
            best[load] = most
            line[load] = item
    load = room
    for g in range(last - 1, first - 1, -1):
        if table[g - first, room] == SKIPPED:
            continue
        item = table[g - first, load]
        if item >= 0:
            load -= sacks.weight[item]
            if assign:
                taken[sacks.job[g]] = sacks.column[item]
            else:
                taken[sacks.owner[g]] += 1
    return int(best[room])


@compile_lazily
def _least_worth_of_weights(sacks: Knapsacks, row: int, price: Ints, taken: Ints) -> Ints:
    """Return what an item of each weight must be worth to be among the best ones of its weight.

    The best ones are those of jobs that wait, as many as may fit, up to ``CANDIDATES``.
    """
    room = sacks.capacity[row]
    top = np.zeros((room + 1, CANDIDATES), np.int64)  # falling
    for g in range(sacks.group_start[row], sacks.group_start[row + 1]):
        if taken[sacks.job[g]] < 0:
            for i in range(sacks.item_start[g], sacks.item_start[g + 1]):
                worth = sacks.worth[i] - price[sacks.owner[g]]
                weight = sacks.weight[i]
                if 0 < weight <= room and worth > top[weight, CANDIDATES - 1]:
                    k = CANDIDATES - 1
                    while k > 0 and top[weight, k - 1] < worth:
                        top[weight, k] = top[weight, k - 1]
                        k -= 1
                    top[weight, k] = worth
    least = np.zeros(room + 1, np.int64)
    for weight in range(1, room + 1):
        least[weight] = top[weight, min(CANDIDATES - 1, room // weight)]
    return least


@compile_lazily
def _is_promising(sacks: Knapsacks, group: int, price: Ints, least: Ints) -> bool:
    """Return whether a job has an item that is worth something, and ``least`` of its weight."""
    for i in range(sacks.item_start[group], sacks.item_start[group + 1]):
        worth = sacks.worth[i] - price[sacks.owner[group]]
        weight = sacks.weight[i]
        if weight < least.size and worth > 0 and worth >= least[weight]:
            return True
    return False


@compile_lazily
def descend_knapsacks(
    sacks: Knapsacks,
    price: Ints,
    at: Ints,
    state: Floats,
    table: Ints,
    target: int,
    enough: int,
    steps: int,
) -> int:
    """Lower the bound by subgradient steps of Polyak's length. Return the best bound.

    ``price`` becomes the prices of the best bound, and ``at`` those where the steps went on. ``state``
    remembers the length of steps, and how many were without success. It ends at ``enough``, or after
    ``steps``.
    """
    taken = np.zeros(price.size, np.int64)
    best = bound_by_knapsacks(sacks, price, taken, table)
    bound = bound_by_knapsacks(sacks, at, taken, table)
    for _ in range(steps):
        if best <= enough:
            break
        norm = 0.0
        for k in range(at.size):
            if not sacks.alone[k]:
                norm += float(sacks.members[k] - taken[k]) ** 2
        if norm == 0.0:
            break
        step = state[LENGTH] * float(bound - target) / norm
        for k in range(at.size):
            if sacks.alone[k]:
                continue
            at[k] -= np.int64(step * (sacks.members[k] - taken[k]))
            if not sacks.must[k]:
                at[k] = max(at[k], 0)
        bound = bound_by_knapsacks(sacks, at, taken, table)
        state[IDLE] += 1.0
        if bound < best:
            best, state[IDLE] = bound, 0.0
            price[:] = at
        elif state[IDLE] >= IDLE_STEPS:
            state[LENGTH], state[IDLE] = SHORTER * state[LENGTH], 0.0
            at[:] = price
            bound = bound_by_knapsacks(sacks, at, taken, table)
    return best


@compile_lazily
def refill_knapsacks(
    sacks: Knapsacks,
    price: Ints,
    table: Ints,
    columns: SackColumns,
    choice: Ints,
    free: Ints,
    draws: Floats,
) -> int:
    """Empty a few knapsacks and fill them again, one after another, for each row of ``draws``.

    A step is kept if every row has room and the answer is worth no less. ``draws`` is
    float64[steps, 1 + 2 * knapsacks of a step], uniform in [0, 1): how many knapsacks, which, and the
    share of the jobs' prices at which each is filled. ``choice`` (int64[jobs]) and ``free``
    (int64[rows]) are updated. Return the gain.
    """
    rows, total = sacks.capacity.size, 0
    most = (draws.shape[1] - 1) // 2
    before, after = np.empty(choice.size, np.int64), np.zeros(free.size, np.int64)
    part = np.empty(price.size, np.int64)
    for step in range(draws.shape[0]):
        number = 1 + int(draws[step, 0] * most)
        before[:] = choice
        picked = (draws[step, 1 : 1 + number] * rows).astype(np.int64)
        for row in picked:
            for job in range(choice.size):
                if choice[job] >= 0 and columns.row_of[choice[job]] == row:
                    choice[job] = -1
        for k in range(number):
            share = 2.0 * draws[step, 1 + most + k] - 0.5
            for i in range(price.size):
                part[i] = np.int64(max(share, 0.0) * price[i])
            _fill(sacks, picked[k], part, choice, table, True)
        after[:] = free
        gain = _gain_of_change(columns, before, choice, after)
        if gain >= 0:
            free[:] = after
            total += gain
        else:
            choice[:] = before
    return total


@compile_lazily
def _gain_of_change(columns: SackColumns, before: Ints, choice: Ints, free: Ints) -> int:
    """Return the gain of ``choice`` over ``before`` (int64[jobs]); -1 if it is no answer.

    ``free`` (int64[rows]), what ``before`` leaves, becomes what ``choice`` leaves.
    """
    gain = 0
    for job in range(choice.size):
        old, new = before[job], choice[job]
        if old == new:
            continue
        if old >= 0:
            gain -= columns.value[old]
            for e in range(columns.usage_start[old], columns.usage_start[old + 1]):
                free[columns.row[e]] += columns.amount[e]
        if new >= 0:
            gain += columns.value[new]
            for e in range(columns.usage_start[new], columns.usage_start[new + 1]):
                free[columns.row[e]] -= columns.amount[e]
        elif columns.must_run[job]:
            return -1
    for r in range(free.size):
        if free[r] < 0:
            return -1
    return int(gain)


class SackColumns(NamedTuple):
    """The problem's columns. ``row_of`` has the knapsack of each; it is the number of them for none."""

    value: Ints
    usage_start: Ints
    row: Ints
    amount: Ints
    must_run: Bools
    row_of: Ints
