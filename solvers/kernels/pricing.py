"""The loops that price every column: compiled, without allocations, a job after another."""

from __future__ import annotations

import numpy as np

from formulation.tables import Bools, Floats, Ints
from solvers.kernels.jit import jitted


@jitted
def demand(
    job_start: Ints, value: Ints, usage_start: Ints, row: Ints, amount: Ints, must_run: Bools,
    prices: Floats, usage: Floats,
) -> float:  # fmt: skip
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
    job_start: Ints, value: Ints, usage_start: Ints, row: Ints, amount: Ints, must_run: Bools,
    prices: Floats, margin: Floats, best: Floats, lead: Floats, choice: Ints,
) -> tuple[float, float]:  # fmt: skip
    """Fill each column's margin; each job's best one, its lead over the next best choice, and its column.

    Return the sum of the best, and the sum over jobs of their largest |value| + cost, by which rounding
    is bounded. Waiting is a choice of margin 0 for jobs that need not run.
    """
    total, size = 0.0, 0.0
    for job in range(job_start.size - 1):
        first, second = 0.0, -np.inf
        if must_run[job]:
            first = -np.inf
        largest, column = 0.0, -1
        for c in range(job_start[job], job_start[job + 1]):
            cost = 0.0
            for k in range(usage_start[c], usage_start[c + 1]):
                cost += prices[row[k]] * amount[k]
            m = value[c] - cost
            margin[c] = m
            largest = max(largest, abs(float(value[c])) + cost)
            if m > first:
                first, second, column = m, first, c
            elif m > second:
                second = m
        if job_start[job] == job_start[job + 1]:
            first = 0.0
        best[job] = first
        lead[job] = first - second
        choice[job] = column
        total += first
        size += largest
    return total, size


@jitted
def inserted(
    job_start: Ints, usage_start: Ints, row: Ints, amount: Ints, must_run: Bools, margin: Floats,
    order: Ints, free: Ints, choice: Ints,
) -> bool:  # fmt: skip
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


@jitted
def undecided(
    job_start: Ints, usage_start: Ints, row: Ints, amount: Ints, must_run: Bools, margin: Floats,
    drift: Floats, count: Ints, columns: Ints, must_take: Bools,
) -> int:  # fmt: skip
    """Fill ``columns`` with those that may be best where no price is further than ``drift`` from here.

    A column's margin moves by at most the drift of what it uses, so one that cannot catch up with another
    is left out; where waiting cannot, ``must_take`` is set. ``count`` is how many each job is left (0: it
    can only wait). Return how many there are in all.
    """
    total = 0
    for job in range(job_start.size - 1):
        least = -np.inf if must_run[job] else 0.0
        before = total
        for c in range(job_start[job], job_start[job + 1]):
            moves = 0.0
            for k in range(usage_start[c], usage_start[c + 1]):
                moves += drift[row[k]] * amount[k]
            if margin[c] + moves >= least:
                least = max(least, margin[c] - moves)
                columns[total] = c
                total += 1
        kept = before
        for i in range(before, total):
            c = columns[i]
            moves = 0.0
            for k in range(usage_start[c], usage_start[c + 1]):
                moves += drift[row[k]] * amount[k]
            if margin[c] + moves >= least:
                columns[kept] = c
                kept += 1
        total = kept
        count[job] = total - before
        must_take[job] = must_run[job] or least > 0.0
    return total
