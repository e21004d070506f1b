"""The compiled loops that price every column, job by job and without allocations."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

ROUNDING = 1e-12
"""An upper bound on the rounding of one column's sums, as a share of its |value| plus its cost."""


@compile_lazily
def price_best_columns(
    job_start: Ints,
    value: Ints,
    usage_start: Ints,
    row: Ints,
    amount: Ints,
    must_run: Bools,
    prices: Floats,
    usage: Floats,
) -> float:
    """Return the sum over jobs of the best margin, which is value less cost.

    The margin is at least 0 if the job may wait. ``usage`` is filled with what the best columns use
    of each row; of equal columns, the first counts. A job that must run and has no column makes the
    sum -inf.
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


@compile_lazily
def price_columns(
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
    """Fill the margin of each column, and each job's best margin, its lead and its column.

    The lead is the difference to the next best margin. Return the sum of the best margins, and the
    sum over jobs of their largest |value| + cost, which bounds the rounding. Waiting is a choice of
    margin 0 for jobs that need not run.

    Unless ``drift`` (float64[rows]) is empty, also fill ``open_columns`` and return how many there
    are. These columns may be best at some prices no further than ``drift`` from these. ``count`` is
    the number of them that each job has. A column's margin moves by at most the drift of what it
    uses (plus ``ROUNDING``), so a column that cannot catch up with another is left out.
    ``must_take`` is set where waiting cannot catch up.
    """
    total, size, opened = 0.0, 0.0, 0
    nearby = drift.size > 0
    for job in range(job_start.size - 1):
        first, second = 0.0, -np.inf
        if must_run[job]:
            first = -np.inf
        least, widest, next_widest = first, -np.inf, -np.inf
        largest, column = 0.0, -1
        # Price the columns, and find the best and the second best.
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
        # List the columns that may become best within the drift.
        if nearby:
            # Allow for rounding.
            least -= ROUNDING * largest
            before = opened
            if next_widest < least and column >= 0:  # no other column can become best
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


@compile_lazily
def insert_jobs(
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
    """Give each job of ``order`` its fitting column of greatest margin, or let it wait.

    ``free`` is updated. Return whether every job that must run has a column.
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
