"""The loops that try all changes of small loss: enumerated in two halves, and joined where they fit."""

from __future__ import annotations

import numpy as np

from tessera.formulation.tables import Floats, Ints
from tessera.solvers.kernels.jit import jitted


@jitted
def changes(
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
    """Enumerate the ways to change at most one column a group whose losses add up to ``allowed`` at most.

    ``loss`` (float64[columns]) and ``more`` (int64[columns, rows]) are what each costs and uses beyond the
    column that it takes the place of. Way s is way ``parent[s]`` and ``column[s]`` (-1: none); it loses
    ``total[s]`` and uses ``used[s]`` more. Of ways that use the same only the one of least loss is gone on
    with: ``alive`` are these. ``table`` (a power of two long, at least twice as many as ways; all -1) finds
    them by ``factor``. Return how many ways were made and how many of them are alive; -1: more than there is
    room for.
    """
    total[0], used[0, :], parent[0], column[0] = 0.0, 0, -1, -1
    count, living, mask, rows = 1, 1, len(table) - 1, more.shape[1]
    alive[0], table[0] = 0, 0  # whose factors add up to 0
    sums = np.empty(rows, np.int64)
    for g in range(len(group_start) - 1):
        before = alive[:living].copy()
        for s in before:
            for c in range(group_start[g], group_start[g + 1]):
                new = total[s] + loss[c]
                if new > allowed:
                    continue
                key = 0
                for r in range(rows):
                    sums[r] = used[s, r] + more[c, r]
                    key += factor[r] * sums[r]
                slot, place = (key ^ (key >> 32)) & mask, -1
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


@jitted
def keys(used: Ints, factor: Ints) -> Ints:
    """Return sum over rows of ``factor * used`` of each way, int64[ways]; it may wrap around."""
    out = np.zeros(len(used), np.int64)
    for s in range(len(used)):
        for r in range(len(factor)):
            out[s] += factor[r] * used[s, r]
    return out


@jitted
def joined(
    one: tuple[Ints, Floats, Ints],
    other: tuple[Ints, Floats, Ints],
    free: Ints,
    wanted: int,
    prices: Floats,
    allowed: float,
    most: int,
) -> tuple[float, int, int]:
    """Return the least loss of a way of each half that fit into ``free`` together, and the two ways.

    What is left of a row costs its price. A half is (key, total, used) of its ways, the other one's by rising
    key and then total; only ways whose keys add up to ``wanted`` are joined. Ways -1: none loses ``allowed``
    or less; -2: more than ``most`` pairs would have to be looked at.
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
