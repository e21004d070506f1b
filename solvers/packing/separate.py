"""Separation: weights of shares by which chosen counts exceed what the nodes of a type can hold.

The nodes are filled by patterns, sets of shares that fit on one of them (Gilmore and Gomory, 1961).
If the linear program over patterns needs more nodes than there are, its dual prices of shares, made
whole, are the weights of a packing row that the counts break. The dual is solved directly: it has a
variable for each size of a share and of a node, and a row for each pattern.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from tessera.formulation.base.tables import Floats
from tessera.formulation.round.packing.rows import PackingWeights, amount_of
from tessera.formulation.round.packing.shapes import ANY_SHAPE, ShapeClass, ShapeClasses
from tessera.formulation.round.packing.shares import Sizes, most_weight, shares_of

MAX_MULTIPLIER: Final = 24
"""Largest weight of a share that is tried. Weights of nodes of 8 GPUs need no more than 8."""
LEAST_EXCESS: Final = 1e-6
"""Excess of the linear program below which the counts are taken to fit."""
LEAST_CUT: Final = 1e-3
"""Weight by which counts must exceed a row for it to be worth adding."""
LEAST_CHOSEN: Final = 1e-6
"""Number of gangs below which a class counts as not chosen."""
MAX_LISTED_WAYS: Final = 200
"""Ways to divide a gang above which it is left out of the separation. It then weighs nothing."""


def find_weights(
    classes: ShapeClasses, names: dict[int, str], chosen: Floats
) -> list[PackingWeights]:
    """Return, for each type whose nodes cannot hold what is ``chosen``, weights that say so.

    ``chosen`` is float64[columns], at least 0, and ``names`` has the name of each type. Only what
    linear programming shows is found: the counts may not fit although nothing is returned.
    """
    inside = classes.of_column >= 0
    counts = np.bincount(
        classes.of_column[inside], weights=chosen[inside], minlength=len(classes.classes)
    ).tolist()
    found = []
    for kind in sorted(classes.sizes):
        own = {
            shape: number
            for shape, number in zip(classes.classes, counts, strict=True)
            if shape.gpu_type == kind and number > LEAST_CHOSEN
        }
        weight = _separate(own, classes.sizes[kind], classes.count[kind])
        if weight is not None:
            found.append(PackingWeights(gpu_type=names[kind], weight=weight))
    return found


@lru_cache(maxsize=64)
def patterns_of(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ways to fill a node of ``size`` GPUs wholly, each as the number of shares of 0 to
    ``size`` GPUs."""
    found: list[tuple[int, ...]] = []

    def fill(left: int, largest: int, counts: list[int]) -> None:
        if left == 0:
            found.append(tuple(counts))
            return
        for share in range(min(left, largest), 0, -1):
            counts[share] += 1
            fill(left - share, share, counts)
            counts[share] -= 1

    fill(size, size, [0] * (size + 1))
    return tuple(found)


def ways_of(shape: ShapeClass, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Return the ways to divide a gang of this class into shares; none if not all are listed."""
    if ANY_SHAPE in shape.nodes:
        return ()
    return tuple(way for n in shape.nodes for way in shares_of(shape.gpus, n, sizes))


def _separate(
    demand: dict[ShapeClass, float], sizes: Sizes, nodes: dict[int, int]
) -> tuple[int, ...] | None:
    """Return the weights of shares that the demand breaks most, or None if the LP fits it."""
    ways = {shape: ways_of(shape, sizes) for shape in demand}
    gangs = [shape for shape in demand if 0 < len(ways[shape]) <= MAX_LISTED_WAYS]
    if not gangs:
        return None
    shares, bins = sizes[-1], len(sizes)
    # Variables: the weight of each share, what each size of node can hold, what each class weighs.
    width = shares + bins + len(gangs)
    entries: list[tuple[int, int, float]] = []
    row = 0
    for b, size in enumerate(sizes):
        for pattern in patterns_of(size):
            entries += [(row, s - 1, float(n)) for s, n in enumerate(pattern) if n]
            entries.append((row, shares + b, -1.0))
            row += 1
    for k, shape in enumerate(gangs):
        for way in ways[shape]:
            entries += [(row, s - 1, -float(n)) for s, n in Counter(way).items()]
            entries.append((row, shares + bins + k, 1.0))
            row += 1
    gain = np.zeros(width)
    gain[shares : shares + bins] = [-nodes[size] for size in sizes]
    gain[shares + bins :] = [demand[shape] for shape in gangs]
    at, column, value = zip(*entries, strict=True)
    # The stubs know dense matrices only.
    limits: Any = sparse.csr_array((value, (at, column)), shape=(row, width))
    result = linprog(
        -gain,
        A_ub=limits,
        b_ub=np.zeros(row),
        bounds=[(0, 1)] * shares + [(0, None)] * (bins + len(gangs)),
        method="highs-ds",
    )
    if result.status != 0 or result.x is None or float(gain @ result.x) <= LEAST_EXCESS:
        return None
    return _whole_weights(result.x[:shares].tolist(), demand, sizes, nodes)


def _whole_weights(
    dual: list[float], demand: dict[ShapeClass, float], sizes: Sizes, nodes: dict[int, int]
) -> tuple[int, ...] | None:
    """Return whole weights in proportion to ``dual`` that the demand exceeds most, or None."""
    best: tuple[float, tuple[int, ...]] | None = None
    for multiplier in range(1, MAX_MULTIPLIER + 1):
        # A larger share may weigh as much as a smaller one, which would fit in its stead.
        whole = accumulate((int(np.floor(d * multiplier + 1e-6)) for d in dual), max)
        weight = (0, *whole)
        held = sum(n * most_weight(size, weight) for size, n in nodes.items())
        wanted = sum(n * amount_of(shape, sizes, weight) for shape, n in demand.items())
        if wanted > held + LEAST_CUT and (best is None or wanted / max(held, 1) > best[0] + 1e-9):
            best = wanted / max(held, 1), weight
    return None if best is None else best[1]
