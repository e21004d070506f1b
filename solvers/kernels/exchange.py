"""The compiled search for one or two changes of an answer that gain together.

At prices p, a change of a job's column alters its margin by d, at most 0 from its best. Changes whose
use fits into what is free gain at most their d plus the price of what is free. So only changes with d
above minus that price can gain, and only such pairs, and both are few once an answer is good.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily


@compile_lazily
def exchange_pairs(
    job_start: Ints,
    value: Ints,
    usage_start: Ints,
    row: Ints,
    amount: Ints,
    must_run: Bools,
    margin: Floats,
    prices: Floats,
    choice: Ints,
    free: Ints,
    most_changes: int,
    most_steps: int,
) -> int:
    """Improve ``choice`` (int64[jobs]) by single changes and pairs of them. Return the steps taken.

    Of each scan, the first change that gains with its best partner is made. ``free`` is updated.
    ``most_changes`` are looked at in a scan, those that lose least margin first.
    """
    rows = free.size
    total = value.size + job_start.size
    job_of, column_of = np.empty(total, np.int64), np.empty(total, np.int64)
    lost = np.empty(total)
    for step in range(most_steps):
        room = 0.0
        for r in range(rows):
            room += prices[r] * free[r]
        found = 0
        for job in range(job_start.size - 1):
            now = 0.0 if choice[job] < 0 else margin[choice[job]]
            for c in range(job_start[job], job_start[job + 1]):
                if c != choice[job] and margin[c] - now > -room:
                    job_of[found], column_of[found], lost[found] = job, c, now - margin[c]
                    found += 1
            if choice[job] >= 0 and not must_run[job] and now < room:
                job_of[found], column_of[found], lost[found] = job, -1, now
                found += 1
        order = np.argsort(lost[:found])
        number = min(found, most_changes)
        more = np.zeros((number, rows), np.int64)
        gain = np.zeros(number, np.int64)
        for k in range(number):
            job, new = job_of[order[k]], column_of[order[k]]
            old = choice[job]
            if new >= 0:
                gain[k] += value[new]
                for e in range(usage_start[new], usage_start[new + 1]):
                    more[k, row[e]] += amount[e]
            if old >= 0:
                gain[k] -= value[old]
                for e in range(usage_start[old], usage_start[old + 1]):
                    more[k, row[e]] -= amount[e]
        first, second = -1, -1
        for i in range(number):
            best = 0
            fits = True
            for r in range(rows):
                if more[i, r] > free[r]:
                    fits = False
                    break
            if fits and gain[i] > best:
                best, first, second = gain[i], i, -1
            for k in range(i + 1, number):
                if lost[order[i]] + lost[order[k]] >= room:
                    break
                if gain[i] + gain[k] > best and job_of[order[i]] != job_of[order[k]]:
                    fits = True
                    for r in range(rows):
                        if more[i, r] + more[k, r] > free[r]:
                            fits = False
                            break
                    if fits:
                        best, first, second = gain[i] + gain[k], i, k
            if best > 0:
                break
        if first < 0:
            return step
        for k in (first, second):
            if k >= 0:
                choice[job_of[order[k]]] = column_of[order[k]]
                for r in range(rows):
                    free[r] -= more[k, r]
    return most_steps
