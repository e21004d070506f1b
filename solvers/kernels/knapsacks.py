"""The compiled knapsacks of a bound in which each GPU type is filled exactly.

Jobs have prices instead of being limited to one column. Then rows that no column shares with another
of them are separate knapsacks with multiple choice (each job at most once in each), which a dynamic
program over their capacity solves exactly, in integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

LARGEST = 2**60
"""The most that a knapsack may be worth at a price."""
BOUND_PRICES, ASSIGN_PRICES = 4, 8
"""Prices of a knapsack's capacity that are tried: where the last one is near, and where it is not."""
IDLE_STEPS = 20
"""Subgradient steps without success after which the steps become shorter."""
SHORTER = 0.6
LENGTH, IDLE = 0, 1
"""Places of the state of a descent."""


class Knapsacks(NamedTuple):
    """Rows as knapsacks. The columns of one job in one row are a group; groups are sorted by row."""

    group_start: Ints  # int64[rows + 1], first group of each row
    item_start: Ints  # int64[groups + 1]
    owner: Ints  # int64[groups], class of the job
    job: Ints  # int64[groups]
    column: Ints  # int64[items]
    weight: Ints  # int64[items]
    worth: Ints  # int64[items], value times the scale
    capacity: Ints  # int64[rows]
    members: Ints  # int64[classes], the number of jobs of each
    must: Bools  # bool[classes]
    alone: Bools  # bool[classes], whether a class has columns in one row only, and needs no price


class Workspace(NamedTuple):
    """Memory for filling knapsacks. What it holds changes how long that takes, not what comes of it."""

    table: Ints  # int32[groups of the largest row, capacity + 1], the item of each line and load
    lines: Ints  # int64[1], the lines of the table that are in use
    groups: Ints  # int64[groups of the largest row], the group of each line
    kept: Ints  # int64[items of the largest group]
    unit: Ints  # int64[rows], the last price of a unit of each knapsack, times the scale
    width: Ints  # int64[rows], the last distance between its linear bound and its optimum
    effort: Ints  # int64[1], the items and loads that were looked at so far: about 1 ns each


@compile_lazily
def bound_by_knapsacks(sacks: Knapsacks, price: Ints, taken: Ints, space: Workspace) -> int:
    """Return the bound at the jobs' prices, int64[classes], times the scale.

    ``taken`` becomes the number of columns that the knapsacks take of each class.
    """
    taken[:] = 0
    total = 0
    for k in range(price.size):
        total += price[k] * sacks.members[k]
    for row in range(sacks.capacity.size):
        total += _fill(sacks, row, price, taken, space, False)
    return total


@compile_lazily
def assign_by_knapsacks(
    sacks: Knapsacks, price: Ints, order: Ints, space: Workspace, choice: Ints
) -> None:
    """Fill the knapsacks one after another, in ``order``, with jobs that are still waiting.

    ``choice`` (int64[jobs]) is -1 at first.
    """
    for row in order:
        _fill(sacks, row, price, choice, space, True)


@compile_lazily
def list_fillings(
    sacks: Knapsacks, price: Ints, rows: Ints, space: Workspace, choice: Ints, columns: Ints
) -> Ints:
    """Fill each of ``rows`` alone with waiting jobs, and list what each takes in ``columns``.

    ``choice`` (int64[jobs]) is left as it is. Return where the columns of each row begin, int64[rows
    + 1]. ``columns`` has room for those of all rows.
    """
    begin = np.zeros(rows.size + 1, np.int64)
    count = 0
    for k in range(rows.size):
        row = rows[k]
        _fill(sacks, row, price, choice, space, True)
        for line in range(space.lines[0]):
            job = sacks.job[space.groups[line]]
            if choice[job] >= 0:
                columns[count] = choice[job]
                count += 1
                choice[job] = -1
        begin[k + 1] = count
    return begin


@compile_lazily
def _fill(
    sacks: Knapsacks, row: int, price: Ints, taken: Ints, space: Workspace, assign: bool
) -> int:
    """Return the most that a knapsack can hold.

    What it takes is counted in ``taken`` (int64[classes]), or given to it (int64[jobs]) if
    ``assign``; then jobs that have a column already are left out.

    An item that loses ``width`` at a price of the capacity cannot be part of an answer that is worth
    more than the linear bound less ``width``. So the knapsack is solved with the items of least
    loss, and once more if that answer does not exclude the others.
    """
    bound = _price_capacity(sacks, row, price, taken, space, assign)
    value = _fill_with_best(sacks, row, price, taken, space, assign)
    if bound - value > space.width[row]:
        space.width[row] = bound - value
        value = _fill_with_best(sacks, row, price, taken, space, assign)
    space.width[row] = bound - value
    load = sacks.capacity[row]
    for k in range(space.lines[0] - 1, -1, -1):
        item = space.table[k, load]
        if item >= 0:
            load -= sacks.weight[item]
            g = space.groups[k]
            if assign:
                taken[sacks.job[g]] = sacks.column[item]
            else:
                taken[sacks.owner[g]] += 1
    return value


@compile_lazily
def _fill_with_best(
    sacks: Knapsacks, row: int, price: Ints, taken: Ints, space: Workspace, assign: bool
) -> int:
    """Return the most that a knapsack can hold of the items that lose at most its ``width``."""
    room, unit, width = sacks.capacity[row], space.unit[row], space.width[row]
    best, kept, lines = np.zeros(room + 1, np.int64), space.kept, 0
    for g in range(sacks.group_start[row], sacks.group_start[row + 1]):
        if assign and taken[sacks.job[g]] >= 0:
            continue
        paid, most = price[sacks.owner[g]], 0
        for i in range(sacks.item_start[g], sacks.item_start[g + 1]):
            if sacks.weight[i] <= room:
                most = max(most, sacks.worth[i] - paid - unit * sacks.weight[i])
        count = 0
        for i in range(sacks.item_start[g], sacks.item_start[g + 1]):
            loss = most - (sacks.worth[i] - paid - unit * sacks.weight[i])
            if loss <= width and sacks.weight[i] <= room and sacks.worth[i] > paid:
                kept[count] = i
                count += 1
        space.effort[0] += count * room
        if count == 0:
            continue
        line = space.table[lines]
        space.groups[lines] = g
        lines += 1
        # From the top, so that what a lighter load was worth is still that without this job.
        for load in range(room, -1, -1):
            value, item = best[load], -1
            for k in range(count):
                left = load - sacks.weight[kept[k]]
                if left >= 0 and best[left] + sacks.worth[kept[k]] - paid > value:
                    value, item = best[left] + sacks.worth[kept[k]] - paid, kept[k]
            best[load] = value
            line[load] = item
    space.lines[0] = lines
    return int(best[room])


@compile_lazily
def _price_capacity(
    sacks: Knapsacks, row: int, price: Ints, taken: Ints, space: Workspace, assign: bool
) -> int:
    """Find a price of a unit of a knapsack, from the last one. Return the linear bound at it.

    The bound is convex in the price. Where two prices enclose the lowest, the next one is where
    their tangents meet.
    """
    room = sacks.capacity[row]
    at = space.unit[row]
    items = sacks.item_start[sacks.group_start[row + 1]] - sacks.item_start[sacks.group_start[row]]
    step, best = at // 32 + 1, -1
    low = high = -1
    low_bound = high_bound = low_slope = high_slope = 0
    for _ in range(ASSIGN_PRICES if assign else BOUND_PRICES):
        bound, slope = _bound_at_price(sacks, row, price, taken, at, assign)
        space.effort[0] += items
        if best < 0 or bound < best:
            best, space.unit[row] = bound, at
        if slope < 0:
            low, low_bound, low_slope = at, bound, slope
        else:
            high, high_bound, high_slope = at, bound, slope
        if slope == 0 or high == 0 or (low >= 0 and 0 <= high <= low + 1):
            break
        if low < 0:
            at, step = max(high - step, 0), min(4 * step, LARGEST)
        elif high < 0:
            at, step = min(low + step, LARGEST // max(room, 1)), min(4 * step, LARGEST)
        else:
            fall = float(high_bound - low_bound) - float(high_slope) * float(high - low)
            at = low + int(fall / float(low_slope - high_slope))
            at = min(max(at, low + 1), high - 1)
    return best


@compile_lazily
def _bound_at_price(
    sacks: Knapsacks, row: int, price: Ints, taken: Ints, unit: int, assign: bool
) -> tuple[int, int]:
    """Return the linear bound of a knapsack at the price ``unit`` of its capacity, and its slope."""
    room = sacks.capacity[row]
    total, left = unit * room, room
    for g in range(sacks.group_start[row], sacks.group_start[row + 1]):
        if assign and taken[sacks.job[g]] >= 0:
            continue
        paid, most, weight = price[sacks.owner[g]], 0, 0
        for i in range(sacks.item_start[g], sacks.item_start[g + 1]):
            gain = sacks.worth[i] - paid - unit * sacks.weight[i]
            if gain > most and sacks.weight[i] <= room:
                most, weight = gain, sacks.weight[i]
        total += most
        left -= weight
    return total, left


@compile_lazily
def descend_knapsacks(
    sacks: Knapsacks,
    price: Ints,
    at: Ints,
    state: Floats,
    space: Workspace,
    target: int,
    enough: int,
    steps: int,
    effort: int,
) -> int:
    """Lower the bound by subgradient steps of Polyak's length. Return the best bound.

    ``price`` becomes the prices of the best bound, and ``at`` those where the steps went on. ``state``
    remembers the length of steps, and how many were without success. It ends at ``enough``, after
    ``steps``, or after some ``effort``.
    """
    effort += space.effort[0]
    taken = np.zeros(price.size, np.int64)
    best = bound_by_knapsacks(sacks, price, taken, space)
    bound = bound_by_knapsacks(sacks, at, taken, space)
    for _ in range(steps):
        if best <= enough or space.effort[0] >= effort:
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
        bound = bound_by_knapsacks(sacks, at, taken, space)
        state[IDLE] += 1.0
        if bound < best:
            best, state[IDLE] = bound, 0.0
            price[:] = at
        elif state[IDLE] >= IDLE_STEPS:
            state[LENGTH], state[IDLE] = SHORTER * state[LENGTH], 0.0
            at[:] = price
            bound = bound_by_knapsacks(sacks, at, taken, space)
    return best


@compile_lazily
def refill_knapsacks(
    sacks: Knapsacks,
    price: Ints,
    space: Workspace,
    columns: SackColumns,
    choice: Ints,
    free: Ints,
    draws: Floats,
    loss: float,
    effort: int,
) -> int:
    """Empty a few knapsacks and fill them again, one after another, for each row of ``draws``.

    A step is kept if every row has room and it loses at most ``loss``, which falls to 0 over the
    steps (threshold accepting, Dueck and Scheuer, 1990). ``draws`` is
    float64[steps, 1 + 2 * knapsacks of a step], uniform in [0, 1): how many knapsacks, which, and the
    share of the jobs' prices at which each is filled. ``choice`` (int64[jobs]) becomes the best answer
    on the way, and ``free`` (int64[rows]) what the last one leaves. It ends early after some
    ``effort``. Return the gain.
    """
    effort += space.effort[0]
    rows, total, most_gain = sacks.capacity.size, 0, 0
    most = (draws.shape[1] - 1) // 2
    before, best, after = choice.copy(), choice.copy(), np.zeros(free.size, np.int64)
    part = np.empty(price.size, np.int64)
    for step in range(draws.shape[0]):
        if space.effort[0] >= effort:
            break
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
            _fill(sacks, picked[k], part, choice, space, True)
        after[:] = free
        gain, fits = _gain_of_change(columns, before, choice, after)
        if fits and gain >= -loss * (draws.shape[0] - step) / draws.shape[0]:
            free[:] = after
            total += gain
            if total > most_gain:
                most_gain = total
                best[:] = choice
        else:
            choice[:] = before
    choice[:] = best
    return most_gain


@compile_lazily
def _gain_of_change(
    columns: SackColumns, before: Ints, choice: Ints, free: Ints
) -> tuple[int, bool]:
    """Return the gain of ``choice`` over ``before`` (int64[jobs]), and whether it is an answer.

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
            return 0, False
    for r in range(free.size):
        if free[r] < 0:
            return 0, False
    return int(gain), True


class SackColumns(NamedTuple):
    """The problem's columns. ``row_of`` has the knapsack of each; it is the number of them for none."""

    value: Ints
    usage_start: Ints
    row: Ints
    amount: Ints
    must_run: Bools
    row_of: Ints
