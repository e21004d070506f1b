"""Exact maximum-weight matching in a complete graph whose vertices come in kinds.

Vertices of a kind are interchangeable, and a queue has few kinds of jobs. So the result is the
number of pairs of each two kinds. Edmonds' blossom inequalities say that an odd number of vertices
leaves one over. Without them, the linear program matches odd cycles by halves. Violated
inequalities are added until all of them hold.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array, vstack
from scipy.sparse.csgraph import connected_components

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.base import SolverFailed

MAX_ROUNDS: Final = 100
_WHOLE: Final = 1e-6


def match_pairs(count: Ints, weight: Floats) -> Ints:
    """Return the number of pairs of each two kinds, int64[kinds, kinds], upper triangle filled.

    ``count`` (kinds,) is the number of vertices. ``weight`` (kinds, kinds), symmetric, is the value
    of a pair; pairs without a positive weight are not made.

    Raises:
        SolverFailed: HiGHS found no optimum, though one exists.
    """
    pairs = np.zeros((len(count), len(count)), dtype=np.int64)
    first, second = np.nonzero(np.triu(weight > 0))
    useful = (first != second) | (count[first] > 1)
    first, second = first[useful], second[useful]
    if len(first):
        pairs[first, second] = _solved(count, first, second, weight[first, second])
    return pairs


def _solved(count: Ints, first: Ints, second: Ints, value: Floats) -> Ints:
    """Return the number of pairs of each edge.

    Linear programs are solved first, and an integer program if no violated blossom is found.
    """
    columns = np.arange(len(first))
    ends = np.concatenate([first, second]), np.concatenate([columns, columns])
    uses = coo_array((np.ones(2 * len(first)), ends), shape=(len(count), len(first)))
    rows: Any = csr_array(uses)  # the stubs know dense matrices only
    most = count.astype(np.float64)
    for _ in range(MAX_ROUNDS):
        result = linprog(-value, A_ub=rows, b_ub=most, method="highs")
        if result.x is None or not result.success:
            raise SolverFailed("highs", f"no matching: {result.message}")
        if np.abs(result.x - np.rint(result.x)).max() < _WHOLE:
            return _rounded(result.x)
        broken = _blossoms(count, first, second, result.x)
        if not broken:
            break
        inside = np.stack([odd[first] & odd[second] for odd in broken])
        rows = csr_array(vstack([rows, csr_array(inside.astype(np.float64))]))
        most = np.append(most, [float(count[odd].sum() // 2) for odd in broken])
    exact = milp(
        -value,
        integrality=np.ones(len(first), dtype=np.int64),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(rows, -np.inf, most),
        options={"mip_rel_gap": 0.0},
    )
    if not exact.success:
        raise SolverFailed("highs", f"no matching: {exact.message}")
    return _rounded(exact.x)


def _rounded(x: Floats) -> Ints:
    return np.rint(x).astype(np.int64)


def _blossoms(count: Ints, first: Ints, second: Ints, x: Floats) -> list[Bools]:
    """Return sets of kinds whose blossom inequality is violated by ``x``.

    Such a set has an odd number of vertices, and more than half of them pair up inside. The search
    covers the parts that fractional edges connect, and those that all used edges connect.
    """
    violated: dict[bytes, Bools] = {}
    for used in (np.abs(x - np.rint(x)) > _WHOLE, x > _WHOLE):
        ends = first[used], second[used]
        graph = coo_array((np.ones(int(used.sum())), ends), shape=(len(count), len(count)))
        parts, part = connected_components(graph, directed=False)
        vertices = np.bincount(part, weights=count, minlength=parts)
        same = part[first] == part[second]
        inside = np.bincount(part[first[same]], weights=x[same], minlength=parts)
        for at in np.flatnonzero((vertices % 2 == 1) & (inside > vertices // 2 + _WHOLE)).tolist():
            violated.setdefault((part == at).tobytes(), part == at)
    return list(violated.values())
