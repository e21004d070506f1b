"""The loops that price every column: compiled, without allocations, a job after another."""

from __future__ import annotations

import numpy as np

from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import jitted

ROUNDING = 1e-12
"""More than what the sums of one column are rounded by, as a share of its |value| and its cost."""


@jitted
def demand(
    job_start: Ints,
    value: Ints,
    usage_start: Ints,
    row: Ints,
    amount: Ints,
    must_run: Bools,
    prices: Floats,
    usage: Floats,
) -> float:
    """Return the sum over jobs of the best margin, value less cost; at least 0 where a job may wait.

    ``usage`` is filled with what the columns that give it use of each row (of equals the first). A job
    that must run and has no column makes the sum -inf.
    """
    usage[:] = 0.0
    total = 0.0
    for job in range(job_start.size - 1):
        best, column = 0.0, -1
        if must_run[job]:
            best = -np.inf
        for c in range(job_start[job], job_start[job + 1]):
            margin = float(value[c])
            for k in range(usage_start[c], usage_start[c + 1]):
                margin -= prices[row[k]] * amount[k]
            if margin > best:
                best, column = margin, c
        total += best
        if column >= 0:
            for k in range(usage_start[column], usage_start[column + 1]):
                usage[row[k]] += amount[k]
    return total


@jitted
def margins(
    job_start: Ints,
    value: Ints,
    usage_start: Ints,
    row: Ints,
    amount: Ints,
    must_run: Bools,
    prices: Floats,
    margin: Floats,
    best: Floats,
    lead: Floats,
    choice: Ints,
    drift: Floats,
    count: Ints,
    open_columns: Ints,
    must_take: Bools,
) -> tuple[float, float, int]:
    """Fill each column's margin; each job's best one, its lead over the next best choice, and its column.

    Return the sum of the best, and the sum over jobs of their largest |value| + cost, by which rounding
    is bounded. Waiting is a choice of margin 0 for jobs that need not run.

    Unless ``drift`` is empty, fill ``open_columns`` with those that may be best where no price is further
    than ``drift`` (float64[rows]) from here, and return how many they are; ``count`` is how many each job is
    left. A column's margin moves by at most the drift of what it uses (and ``ROUNDING``), so one that cannot
    catch up with another is left out; where waiting cannot, ``must_take`` is set.
    """
    total, size, opened = 0.0, 0.0, 0
    nearby = drift.size > 0
    for job in range(job_start.size - 1):
        first, second = 0.0, -np.inf
        if must_run[job]:
            first = -np.inf
        least, widest, next_widest = first, -np.inf, -np.inf
        largest, column = 0.0, -1
        for c in range(job_start[job], job_start[job + 1]):
            cost, moves = 0.0, 0.0
            for k in range(usage_start[c], usage_start[c + 1]):
                cost += prices[row[k]] * amount[k]
                if nearby:
                    moves += drift[row[k]] * amount[k]
            m = value[c] - cost
            margin[c] = m
            largest = max(largest, abs(float(value[c])) + cost)
            if m > first:
                first, second, column = m, first, c
            elif m > second:
                second = m
            if nearby:
                least = max(least, m - moves)
                next_widest = max(next_widest, min(widest, m + moves))
                widest = max(widest, m + moves)
        if job_start[job] == job_start[job + 1]:
            first = 0.0
        best[job] = first
        lead[job] = first - second
        choice[job] = column
        total += first
        size += largest
        if nearby:
            least -= ROUNDING * largest
            before = opened
            if next_widest < least and column >= 0:  # no other column
                open_columns[opened] = column
                opened += 1
            elif widest >= least:
                for c in range(job_start[job], job_start[job + 1]):
                    moves = 0.0
                    for k in range(usage_start[c], usage_start[c + 1]):
                        moves += drift[row[k]] * amount[k]
                    if margin[c] + moves >= least:
                        open_columns[opened] = c
                        opened += 1
            count[job] = opened - before
            must_take[job] = must_run[job] or least > 0.0
    return total, size, opened


@jitted
def inserted(
    job_start: Ints,
    usage_start: Ints,
    row: Ints,
    amount: Ints,
    must_run: Bools,
    margin: Floats,
    order: Ints,
    free: Ints,
    choice: Ints,
) -> bool:
    """Give each job of ``order`` its column of greatest margin that fits what is ``free``, or let it wait.

    ``free`` is brought up to date. Return whether every job that must run has a column.
    """
    complete = True
    for job in order:
        best, column = 0.0, -1
        if must_run[job]:
            best = -np.inf
        for c in range(job_start[job], job_start[job + 1]):
            if margin[c] > best or (column < 0 and margin[c] == best):
                fits = True
                for k in range(usage_start[c], usage_start[c + 1]):
                    if amount[k] > free[row[k]]:
                        fits = False
                        break
                if fits:
                    best, column = margin[c], c
        choice[job] = column
        if column >= 0:
            for k in range(usage_start[column], usage_start[column + 1]):
                free[row[k]] -= amount[k]
        elif must_run[job]:
            complete = False
    return complete
