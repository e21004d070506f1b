"""The loops of priority compression: contention graphs, orders, and the best cuts of an order.

Vertices are numbered so that edges rise. Edges are stored as CSR: the edges that leave vertex v are
``start[v] : start[v + 1]`` of ``target``. Weights are integers, so sums are exact.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

Narrow: TypeAlias = NDArray[np.int32]
"""The type of vertex numbers.

A dense graph has millions of edges; half the memory takes half the time."""


@compile_lazily
def list_edges(
    vertex_start: Ints, link: Ints, link_start: Ints, user: Ints, start: Ints, target: Narrow
) -> int:
    """Fill in the later vertices that share a link with each vertex; return the number of edges.

    ``link[vertex_start[v] : vertex_start[v + 1]]`` are the links of v, and ``user`` has the
    vertices of each link, rising. ``target`` has room for all edges, or for none: then they are
    only counted. Once a vertex is joined to all later ones, its further links are skipped.
    """
    count, edges = len(vertex_start) - 1, 0
    met_by = np.full(count, -1, np.int64)
    passed = link_start[:-1].copy()  # position in each link's users of the vertex after v
    for v in range(count):
        start[v] = edges
        for at in range(vertex_start[v], vertex_start[v + 1]):
            e = link[at]
            passed[e] += 1
            if edges - start[v] == count - v - 1:
                continue
            for k in range(passed[e], link_start[e + 1]):
                u = user[k]
                if met_by[u] != v:
                    met_by[u] = v
                    if edges < len(target):
                        target[edges] = u
                    edges += 1
    start[count] = edges
    return edges


@compile_lazily
def vertex_heights(start: Ints, target: Narrow) -> Ints:
    """Return the number of edges of the longest path from each vertex, int64[V]."""
    count = len(start) - 1
    height = np.zeros(count, np.int64)
    for v in range(count - 1, -1, -1):
        for at in range(start[v], start[v + 1]):
            height[v] = max(height[v], height[target[at]] + 1)
    return height


@compile_lazily
def edges_inside_levels(start: Ints, target: Narrow, level: Ints) -> Ints:
    """Return the number of edges from each vertex that end on its own level, int64[V]."""
    count = np.zeros(len(level), np.int64)
    for v in range(len(level)):
        for at in range(start[v], start[v + 1]):
            count[v] += level[target[at]] == level[v]
    return count


@compile_lazily
def pick_order(start: Ints, target: Narrow, draw: Floats, order: Ints) -> None:
    """Fill in a topological order.

    ``draw`` (in [0, 1)) picks the next vertex among those that are ready.
    """
    count = len(start) - 1
    before, ready, length = np.zeros(count, np.int64), np.empty(count, np.int64), 0
    for at in range(len(target)):
        before[target[at]] += 1
    for v in range(count):
        if before[v] == 0:
            ready[length] = v
            length += 1
    for place in range(count):
        at = int(draw[place] * length)
        v = ready[at]
        order[place] = v
        length -= 1
        ready[at] = ready[length]
        for k in range(start[v], start[v + 1]):
            u = target[k]
            before[u] -= 1
            if before[u] == 0:
                ready[length] = u
                length += 1


@compile_lazily
def place_edges(
    start: Ints,
    target: Narrow,
    order: Ints,
    enter_start: Ints,
    enter: Narrow,
    leave_start: Ints,
    leave: Narrow,
) -> None:
    """Fill in the edges by places of the order.

    For each place, these are the places at the other end of the edges into it, and of the edges out
    of it, rising.
    """
    count = len(order)
    place = np.empty(count, np.int64)
    enter_start[:], leave_start[0] = 0, 0
    for p in range(count):
        place[order[p]] = p
        leave_start[p + 1] = leave_start[p] + start[order[p] + 1] - start[order[p]]
    for at in range(len(target)):
        enter_start[place[target[at]] + 1] += 1
    for p in range(count):
        enter_start[p + 1] += enter_start[p]
    free = enter_start[:-1].copy()
    for p in range(count):
        for at in range(start[order[p]], start[order[p] + 1]):
            q = place[target[at]]
            enter[free[q]] = p
            free[q] += 1
    free[:] = leave_start[:-1]
    for p in range(count):
        for at in range(enter_start[p], enter_start[p + 1]):
            q = enter[at]
            leave[free[q]] = p
            free[q] += 1


@compile_lazily
def count_below(places: Narrow, low: int, high: int, end: int) -> int:
    """Return the number of ``places[low:high]`` (rising) that are below ``end``."""
    first = low
    while low < high:
        middle = (low + high) >> 1
        if places[middle] < end:
            low = middle + 1
        else:
            high = middle
    return low - first


@compile_lazily
def best_of(
    end: int, low: int, high: int, least: Ints, weight: Ints, leave_start: Ints, leave: Narrow
) -> tuple[int, int]:
    """Return the best beginning in [low, high] of the last level of the first ``end`` places.

    Ties go to the lowest. Also return the loss with that beginning, less the loss inside the last
    level if it begins at ``high``. Lower beginnings are not tried once that level alone loses too
    much; ``least`` never falls.
    """
    inside, best, begin = 0, least[high], high
    for j in range(high - 1, low - 1, -1):
        inside += weight[j] * count_below(leave, leave_start[j], leave_start[j + 1], end)
        if inside + least[low] > best:
            break
        if least[j] + inside <= best:
            best, begin = least[j] + inside, j
    return begin, best


@compile_lazily
def cut_order(
    levels: int,
    weight: Ints,
    enter_start: Ints,
    enter: Narrow,
    leave_start: Ints,
    leave: Narrow,
    ends: Ints,
) -> int:
    """Return the least weight of edges inside levels when an order is cut (Crux eq. 4).

    The order is cut into ``levels`` levels. ``ends`` (int64[levels + 1]) receives the cuts: level
    k, counted from the most urgent, has the places ``ends[k] : ends[k + 1]``, and may be empty.
    ``weight[p]`` is the weight of each edge out of place p.

    ``least[i]`` is the least loss of the first i places in the levels so far. The best beginning of
    the last level never falls as i rises (quadrangle inequality). So the beginning for i lies
    between those for settled numbers around it: first the middle is settled, then the quarters, and
    so on. For each level, O(n log n) steps find the beginnings. A last walk over i, which keeps the
    level's loss up to date, finds the values.
    """
    count = len(weight)
    begin = np.zeros((levels, count + 1), np.int32)
    least, following = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for i in range(count):
        total = 0
        for at in range(enter_start[i], enter_start[i + 1]):
            total += weight[enter[at]]
        least[i + 1] = least[i] + total
    step = 1
    while step <= count:
        step *= 2
    # Settle one level after another.
    for k in range(1, levels - 1):
        size = step
        while size > 1:
            half = size // 2
            for i in range(half, count + 1, size):
                low = begin[k, i - half]
                high = min(i, begin[k, i + half] if i + half <= count else count)
                begin[k, i] = best_of(i, low, high, least, weight, leave_start, leave)[0]
            size = half
        # Walk over i to find the least losses with the level.
        inside, first = 0, 0
        for i in range(1, count + 1):
            for at in range(enter_start[i] - 1, enter_start[i - 1] - 1, -1):
                if enter[at] < first:
                    break
                inside += weight[enter[at]]
            while first < begin[k, i]:
                inside -= weight[first] * count_below(
                    leave, leave_start[first], leave_start[first + 1], i
                )
                first += 1
            following[i] = least[first] + inside
        least, following = following, least
        following[0] = 0
    # Cut off the last level, and read the other cuts back.
    lost: int = least[count]
    ends[levels] = count
    if levels > 1:
        ends[levels - 1], lost = best_of(count, 0, count, least, weight, leave_start, leave)
    for k in range(levels - 2, 0, -1):
        ends[k] = begin[k, ends[k + 1]]
    ends[0] = 0
    return lost


@compile_lazily
def cut_order_plainly(
    levels: int, weight: Ints, enter_start: Ints, enter: Narrow, ends: Ints
) -> int:
    """Do the same as ``cut_order`` by the dynamic program that Crux prints, with its errata corrected.

    It keeps all weights between places in a square of prefix sums, and tries all beginnings for
    each number of places. It is only for comparison.
    """
    count = len(weight)
    sums = np.zeros(
        (count + 1, count + 1), np.int64
    )  # [j, i]: edges from the first j to the first i
    for i in range(count):
        for at in range(enter_start[i], enter_start[i + 1]):
            sums[enter[at] + 1, i + 1] = weight[enter[at]]
    for j in range(1, count + 1):
        row = 0
        for i in range(1, count + 1):
            row += sums[j, i]
            sums[j, i] = row + sums[j - 1, i]
    begin = np.zeros((levels, count + 1), np.int32)
    most, following = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for k in range(1, levels):
        for i in range(count + 1):
            best, begin_at = np.int64(-1), 0
            for j in range(i + 1):
                value = most[j] + sums[j, i] - sums[j, j]
                if value > best:
                    best, begin_at = value, j
            following[i], begin[k, i] = best, begin_at
        most, following = following, most
    ends[levels] = count
    for k in range(levels - 1, 0, -1):
        ends[k] = begin[k, ends[k + 1]]
    ends[0] = 0
    lost: int = sums[count, count] - most[count]
    return lost
