"""The loops that try all changes of small loss.

The changes are enumerated in two halves, and the halves are joined where they fit.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.tables import Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily


@compile_lazily
def enumerate_changes(
    group_start: Ints,
    loss: Floats,
    more: Ints,
    factor: Ints,
    allowed: float,
    total: Floats,
    used: Ints,
    parent: Ints,
    column: Ints,
    alive: Ints,
    table: Ints,
) -> tuple[int, int]:
    """Enumerate the ways to change at most one column per group at a loss up to ``allowed``.

    ``loss`` (float64[columns]) and ``more`` (int64[columns, rows]) say what each column costs and
    uses beyond the column that it replaces. Way s extends way ``parent[s]`` by ``column[s]``; both
    are -1 for the way that changes nothing. Way s loses ``total[s]`` and uses ``used[s]`` more.

    Of the ways with the same usage, only the one of least loss is extended; these are listed in
    ``alive``. The hash table ``table`` finds them by ``factor``. Its length is a power of two, at
    least twice the number of ways, and it is all -1 at the start. Return the number of ways, and
    the number of them that are alive; both are -1 if there are more ways than there is room for.
    """
    total[0], used[0, :], parent[0], column[0] = 0.0, 0, -1, -1
    count, living, mask, rows = 1, 1, len(table) - 1, more.shape[1]
    alive[0], table[0] = 0, 0  # the way that changes nothing has hash 0
    sums = np.empty(rows, np.int64)
    for g in range(len(group_start) - 1):
        before = alive[:living].copy()
        for s in before:
            # Try to extend the way by each column of the group.
            for c in range(group_start[g], group_start[g + 1]):
                new = total[s] + loss[c]
                if new > allowed:
                    continue
                key = 0
                for r in range(rows):
                    sums[r] = used[s, r] + more[c, r]
                    key += factor[r] * sums[r]
                slot, place = (key ^ (key >> 32)) & mask, -1
                # Look up the way with the same usage by linear probing.
                while table[slot] >= 0:
                    same, place = alive[table[slot]], table[slot]
                    for r in range(rows):
                        if used[same, r] != sums[r]:
                            place = -1
                            break
                    if place >= 0:
                        break
                    slot = (slot + 1) & mask
                if place >= 0 and total[alive[place]] <= new:
                    continue
                # Record the new way, in place of a costlier one with the same usage.
                if count == len(total):
                    return -1, -1
                total[count], parent[count], column[count] = new, s, c
                used[count, :] = sums
                if place < 0:
                    place, table[slot] = living, living
                    living += 1
                alive[place] = count
                count += 1
    return count, living


@compile_lazily
def usage_keys(used: Ints, factor: Ints) -> Ints:
    """Return the sum over rows of ``factor * used`` for each way, int64[ways].

    It may wrap around.
    """
    out = np.zeros(len(used), np.int64)
    for s in range(len(used)):
        for r in range(len(factor)):
            out[s] += factor[r] * used[s, r]
    return out


@compile_lazily
def join_halves(
    one: tuple[Ints, Floats, Ints],
    other: tuple[Ints, Floats, Ints],
    free: Ints,
    wanted: int,
    prices: Floats,
    allowed: float,
    most: int,
) -> tuple[float, int, int]:
    """Return the least loss of two ways, one of each half, that fit together, and the two ways.

    They must fit into ``free``. Each unit that is left of a row costs its shadow price. A half is
    (key, total, used) of its ways; the ways of ``other`` are sorted by key and then by total. Only
    ways whose keys add up to ``wanted`` are joined. The ways are -1 if no pair loses ``allowed`` or
    less, and -2 if more than ``most`` pairs would have to be examined.
    """
    best, first, second, looked = allowed, -1, -1, 0
    key, total, used = other
    for s in range(len(one[0])):
        at = np.searchsorted(key, wanted - one[0][s])
        while at < len(key) and key[at] == wanted - one[0][s] and one[1][s] + total[at] <= best:
            looked += 1
            if looked > most:
                return best, -2, -2
            loss, fits = one[1][s] + total[at], True
            for r in range(len(free)):
                left = free[r] - one[2][s, r] - used[at, r]
                if left < 0:
                    fits = False
                    break
                loss += prices[r] * left
            if fits and loss <= best:
                best, first, second = loss, s, at
            at += 1
    return best, first, second
