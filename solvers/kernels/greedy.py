"""Greedy's loops: take steps that gain, pack must-run jobs, and relieve overfull rows.

All of them change ``choice`` and ``free`` in place. ``choice`` is int64[jobs], a column or -1;
``free`` is int64[rows], the capacity less what the choice uses. While the columns of a job are
judged, the resources that it holds are returned to ``free``. The heap holds a job at most once; the
largest key comes first, and of equal keys the lower job, so the order is fully determined. Memory
is O(jobs + rows) in addition to the problem.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

FREE_STEP = 1e-9
"""A step that takes less than this counts as taking this.

The unit is the cluster, if sizes are shares."""

REFRESHES_PER_DOUBLING = 8
"""After this many evaluations of all jobs, the misses needed for the next evaluation double."""

Columns: TypeAlias = tuple[Ints, Ints, Ints, Ints, Ints, Floats]
"""A Problem's job_start, value, usage_start, row and amount, and each column's size.

Sizes are float64[columns]. It is a plain tuple because the files that keep machine code must name
no class of ours, which a later release might not have."""

Watch: TypeAlias = tuple[Floats, Bools, Ints, float]
"""The data with which ``take_gaining_steps`` decides to give up early.

These are shadow prices, float64[rows]; which jobs must run, bool[jobs]; each job's best choice at
the prices, int64[jobs], with -1 for waiting; and the loss at which to give up. If there are no
prices, it never gives up."""

ROUNDING = 1e-9
"""An upper bound on the rounding of losses, as a share of the values and costs in them."""


@compile_lazily
def column_sizes(
    job_start: Ints, usage_start: Ints, row: Ints, amount: Ints, weight: Floats, among: Ints
) -> Floats:
    """Return the sum over rows of ``weight[row] * amount`` of each column, float64[columns].

    Only columns of the jobs ``among`` get a size; the others are not initialized.
    """
    out = np.empty(len(usage_start) - 1)
    for j in among:
        for c in range(job_start[j], job_start[j + 1]):
            total = 0.0
            for k in range(usage_start[c], usage_start[c + 1]):
                total += weight[row[k]] * amount[k]
            out[c] = total
    return out


@compile_lazily
def smallest_sizes(job_start: Ints, size: Floats) -> Floats:
    """Return the least size of a column of each job, float64[jobs]; 0 if the job has no column."""
    out = np.zeros(len(job_start) - 1)
    for j in range(len(out)):
        first = job_start[j]
        for c in range(first, job_start[j + 1]):
            if c == first or size[c] < out[j]:
                out[j] = size[c]
    return out


@compile_lazily
def give_back(columns: Columns, column: int, free: Ints) -> None:
    """Return to ``free`` what ``column`` uses; -1 uses nothing."""
    _, _, usage_start, row, amount, _ = columns
    if column >= 0:
        for k in range(usage_start[column], usage_start[column + 1]):
            free[row[k]] += amount[k]


@compile_lazily
def take_usage(columns: Columns, column: int, free: Ints) -> None:
    """Take from ``free`` what ``column`` uses; -1 uses nothing."""
    _, _, usage_start, row, amount, _ = columns
    if column >= 0:
        for k in range(usage_start[column], usage_start[column + 1]):
            free[row[k]] -= amount[k]


@compile_lazily
def occupy_rows(columns: Columns, choice: Ints, free: Ints) -> None:
    """Take from ``free`` what ``choice`` uses."""
    for j in range(len(choice)):
        take_usage(columns, choice[j], free)


@compile_lazily
def column_fits(columns: Columns, column: int, free: Ints) -> bool:
    """Return whether ``column`` fits into ``free``."""
    _, _, usage_start, row, amount, _ = columns
    for k in range(usage_start[column], usage_start[column + 1]):  # noqa: SIM110
        if amount[k] > free[row[k]]:
            return False
    return True


@compile_lazily
def sink_in_heap(heap: Ints, length: int, key: Floats, at: int) -> None:
    """Move the job at place ``at`` down the heap until no job below it comes first."""
    job = heap[at]
    while True:
        child = 2 * at + 1
        if child >= length:
            break
        if child + 1 < length and comes_first(key, heap[child + 1], heap[child]):
            child += 1
        if not comes_first(key, heap[child], job):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = job


@compile_lazily
def comes_first(key: Floats, first: int, second: int) -> bool:
    """Return whether job ``first`` comes before job ``second``."""
    return key[first] > key[second] or (key[first] == key[second] and first < second)


@compile_lazily
def best_step(columns: Columns, job: int, now: int, free: Ints) -> tuple[float, int]:
    """Return the largest gain per size of a step of ``job``, and the column that the step leads to.

    The step starts from column ``now``, or from waiting if that is -1. Ties go to the lower column.
    The column is -1 if no step gains and fits.
    """
    job_start, value, _, _, _, size = columns
    gross, takes = 0, 0.0
    if now >= 0:
        gross, takes = value[now], size[now]
    best, column = 0.0, -1
    for c in range(job_start[job], job_start[job + 1]):
        if value[c] > gross:
            ratio = (value[c] - gross) / max(size[c] - takes, FREE_STEP)
            if ratio > best and column_fits(columns, c, free):
                best, column = ratio, c
    return best, column


@compile_lazily
def least_loss(columns: Columns, watch: Watch, job: int, now: int) -> float:
    """Return a lower bound on the loss of ``job``, once on column ``now``, to its best margin.

    The job's value never falls, so it ends on that column or on one of higher value. The result
    is rounded down.
    """
    job_start, value, usage_start, row, amount, _ = columns
    prices, must_run, preferred, _ = watch
    if preferred[job] >= 0 and value[preferred[job]] >= value[now]:
        return 0.0
    best, top, largest = 0.0, -np.inf, 0.0
    if must_run[job]:
        best = -np.inf
    for c in range(job_start[job], job_start[job + 1]):
        cost = 0.0
        for k in range(usage_start[c], usage_start[c + 1]):
            cost += prices[row[k]] * amount[k]
        margin = value[c] - cost
        largest = max(largest, abs(float(value[c])) + cost)
        best = max(best, margin)
        if c == now or value[c] > value[now]:
            top = max(top, margin)
    return max(best - top - ROUNDING * largest, 0.0)


@compile_lazily
def take_gaining_steps(
    columns: Columns, choice: Ints, free: Ints, among: Ints, watch: Watch
) -> bool:
    """Take the step with the largest gain per size repeatedly, until no step gains and fits.

    Only jobs of ``among`` (rising) take steps. A step that no longer fits when its turn comes (a
    miss) is replaced by the job's best step that does. When a retyped job releases resources, there
    may be room for other jobs, and then all jobs are evaluated again. That happens when the heap is
    empty at the latest, and earlier after some misses.

    If fewer misses suffice, the result is better (by up to 0.2 % on average with 64 to 10,000 jobs)
    but slower to reach. So the number of misses grows with the jobs and with the number of
    evaluations of all jobs. A job's value rises with each of its steps, so there are at most as
    many steps as columns.

    Return False as soon as the steps have added more to the jobs' ``least_loss`` than ``watch``
    allows; ``choice`` is then an intermediate state.
    """
    _, _, usage_start, row, _, _ = columns
    jobs = len(choice)
    heap, key, step = np.empty(len(among), np.int64), np.empty(jobs), np.empty(jobs, np.int64)
    before = np.zeros(len(free), np.int64)
    watched, lost, allowed = len(watch[0]) > 0, 0.0, watch[3]
    freed, rounds = True, 0
    while freed:
        freed, length, misses = False, 0, 0
        patience = (1 + len(among) // 1024) << min(rounds // REFRESHES_PER_DOUBLING, 40)
        rounds += 1
        # Evaluate all jobs, and build the heap.
        for j in among:
            give_back(columns, choice[j], free)
            key[j], step[j] = best_step(columns, j, choice[j], free)
            take_usage(columns, choice[j], free)
            if step[j] >= 0:
                heap[length] = j
                length += 1
        for at in range(length // 2 - 1, -1, -1):
            sink_in_heap(heap, length, key, at)
        # Take the best steps. A miss only replaces the job's step.
        while length > 0 and (misses < patience or not freed):
            j = heap[0]
            old = choice[j]
            if old >= 0:
                for k in range(usage_start[old], usage_start[old + 1]):
                    before[row[k]] = free[row[k]]
            give_back(columns, old, free)
            if column_fits(columns, step[j], free):
                choice[j] = step[j]
                if watched:
                    lost += least_loss(columns, watch, j, step[j]) * (1.0 - ROUNDING)
                    if old >= 0:
                        lost -= least_loss(columns, watch, j, old) * (1.0 + ROUNDING)
                    if lost > allowed:
                        return False
            else:
                misses += 1
            # Find the job's next step, and note whether this one released anything.
            key[j], step[j] = best_step(columns, j, choice[j], free)
            take_usage(columns, choice[j], free)
            if old >= 0:
                for k in range(usage_start[old], usage_start[old + 1]):
                    if free[row[k]] > before[row[k]]:
                        freed = True
            if step[j] < 0:
                length -= 1
                heap[0] = heap[length]
            sink_in_heap(heap, length, key, 0)
    return True


@compile_lazily
def pack_jobs(
    columns: Columns, order: Ints, current: Ints, balance: bool, choice: Ints, free: Ints
) -> bool:
    """Give each job of ``order`` a column; return whether all have one.

    A job gets its ``current`` column if that fits; -1 means that it has none. Otherwise it gets the
    smallest column that fits. With ``balance``, it gets the one whose largest share of what is free
    in a row is least. Ties go to the column of highest value, then to the lowest.
    """
    job_start, value, usage_start, row, amount, size = columns
    for j in order:
        column, least = -1, 0.0
        if current[j] >= 0 and column_fits(columns, current[j], free):
            column = current[j]
        else:
            for c in range(job_start[j], job_start[j + 1]):
                if not column_fits(columns, c, free):
                    continue
                cost = size[c]
                if balance:
                    cost = 0.0
                    for k in range(usage_start[c], usage_start[c + 1]):
                        cost = max(cost, amount[k] / max(free[row[k]], 1))
                if column >= 0 and cost == least:
                    better = value[c] > value[column]
                else:
                    better = column < 0 or cost < least
                if better:
                    column, least = c, cost
        if column < 0:
            return False
        choice[j] = column
        take_usage(columns, column, free)
    return True


@compile_lazily
def keep_columns(columns: Columns, order: Ints, current: Ints, choice: Ints, free: Ints) -> None:
    """Give each waiting job of ``order`` its ``current`` column if that fits."""
    for j in order:
        if column_fits(columns, current[j], free):
            choice[j] = current[j]
            take_usage(columns, current[j], free)


@compile_lazily
def relief_of_step(columns: Columns, share: Floats, now: int, free: Ints, given: Ints) -> float:
    """Return the sum over overfull rows of column ``now`` of ``share`` times the units given up.

    ``given`` is int64[rows]. For each row, no more counts than the units by which it is overfull.
    """
    _, _, usage_start, row, _, _ = columns
    total = 0.0
    for k in range(usage_start[now], usage_start[now + 1]):
        r = row[k]
        if free[r] < 0:
            total += share[r] * min(given[r], -free[r])
    return total


@compile_lazily
def best_relief(
    columns: Columns, share: Floats, job: int, now: int, must: bool, free: Ints, given: Ints
) -> tuple[float, int]:
    """Return the key of the cheapest step of ``job`` away from ``now``, and the column it leads to.

    The key is minus the loss of (value less size), divided by the step's ``relief_of_step``. A step may
    take resources that are free, but nothing more of an overfull row. Ties go to the lowest column.
    The column is -1 for waiting, which is possible unless ``must``, and -2 if there is no step.
    ``given`` (int64[rows]) is zero before and after the call.
    """
    job_start, value, usage_start, row, amount, size = columns
    # Count all that the job holds as given up.
    for k in range(usage_start[now], usage_start[now + 1]):
        given[row[k]] += amount[k]
    margin = value[now] - size[now]
    best, column = -np.inf, -2
    whole = relief_of_step(columns, share, now, free, given)
    if whole > 0:
        # Try each column: what it uses is not given up.
        for c in range(job_start[job], job_start[job + 1]):
            allowed = True
            for k in range(usage_start[c], usage_start[c + 1]):
                r = row[k]
                given[r] -= amount[k]
                if given[r] < -max(free[r], 0):
                    allowed = False
            if allowed:
                relieved = relief_of_step(columns, share, now, free, given)
                if relieved > 0:
                    key = (value[c] - size[c] - margin) / relieved
                    if key > best:
                        best, column = key, c
            for k in range(usage_start[c], usage_start[c + 1]):
                given[row[k]] += amount[k]
        # Try waiting, which gives up everything.
        if not must and -margin / whole > best:
            best, column = -margin / whole, -1
    for k in range(usage_start[now], usage_start[now + 1]):
        given[row[k]] = 0
    return best, column


@compile_lazily
def relieve_rows(
    columns: Columns, share: Floats, must: Bools, choice: Ints, free: Ints, among: Ints
) -> bool:
    """Take the step that costs least per unit of overfull rows until no row is overfull.

    Only jobs of ``among`` (rising) take steps. Those in ``must`` (bool[jobs]) are moved, never
    stopped. A row is overfull if its ``free`` is negative. No step takes more of an overfull row or
    makes another row overfull, so no job returns to a column that it has left. Return whether no
    row is overfull at the end.
    """
    jobs = len(choice)
    heap, key, step = np.empty(len(among), np.int64), np.empty(jobs), np.empty(jobs, np.int64)
    given = np.zeros(len(free), np.int64)
    moved = True
    while moved and is_short(free):
        # Find the cheapest step of each job, and build the heap.
        moved, length = False, 0
        for j in among:
            if choice[j] >= 0:
                key[j], step[j] = best_relief(columns, share, j, choice[j], must[j], free, given)
                if step[j] > -2:
                    heap[length] = j
                    length += 1
        for at in range(length // 2 - 1, -1, -1):
            sink_in_heap(heap, length, key, at)
        # Take the best steps whose keys are still up to date.
        while length > 0:
            j = heap[0]
            was, expected = key[j], step[j]
            key[j], step[j] = best_relief(columns, share, j, choice[j], must[j], free, given)
            # Otherwise the key is out of date, and the job's turn may come later.
            if key[j] == was and step[j] == expected:
                give_back(columns, choice[j], free)
                choice[j] = step[j]
                take_usage(columns, choice[j], free)
                moved = True
                if not is_short(free):
                    break
                step[j] = -2
                if choice[j] >= 0:
                    key[j], step[j] = best_relief(
                        columns, share, j, choice[j], must[j], free, given
                    )
            if step[j] == -2:
                length -= 1
                heap[0] = heap[length]
            sink_in_heap(heap, length, key, 0)
    return not is_short(free)


@compile_lazily
def is_short(free: Ints) -> bool:
    """Return whether any row is overfull."""
    for r in range(len(free)):  # noqa: SIM110
        if free[r] < 0:
            return True
    return False


@compile_lazily
def start_missing(columns: Columns, must: Bools, choice: Ints) -> None:
    """Give each waiting job of ``must`` its column of most value less size, ties to the lowest."""
    job_start, value, _, _, _, size = columns
    for j in range(len(choice)):
        if must[j] and choice[j] < 0:
            for c in range(job_start[j], job_start[j + 1]):
                margin = value[c] - size[c]
                now = choice[j]
                if now < 0 or margin > value[now] - size[now]:
                    choice[j] = c
