"""The best priority levels, found by minimum cuts.

Crux calls the compression NP-hard, like Max K-Cut. If no edge may point upward, it is not. An edge
from a to b of weight w loses ``w max(0, 1 - (l_a - l_b))`` with ``l_a >= l_b``, which is convex in
a difference of integers. The matrix of differences is totally unimodular, so a linear program has
integer levels as its optimum; it is the dual of a minimum-cost flow.

A sum of such terms is L-natural convex (Murota, Discrete Convex Analysis, 2003), so steepest
descent ends at the optimum (Kolmogorov and Shioura, New algorithms for convex cost tension problem,
2009). It raises the set of vertices that gains most by one level, until none gains. Then it lowers
sets in the same way. Each set is a minimum cut. There are at most ``2 levels`` of them, and fewer
from a good start.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from ortools.graph.python import max_flow

from tessera.formulation.base.tables import Ints
from tessera.solvers.base import SolverFailed
from tessera.solvers.network.compression.cuts import Cut
from tessera.solvers.network.compression.dag import MAX_TOTAL_WEIGHT, Dag

UNCUTTABLE_CAPACITY: Final = 4 * MAX_TOTAL_WEIGHT
"""Capacity of an arc that no minimum cut contains."""


def best_levels(dag: Dag, level: Ints, levels: int) -> Cut:
    """Return the levels that lose least; the start ``level`` must not invert any edge."""
    source = np.repeat(np.arange(len(dag.job)), np.diff(dag.start))
    level = level.copy()
    for up in (True, False):
        moved = np.flatnonzero(_moves(dag, source, level, levels, up))
        while len(moved):
            level[moved] += 1 if up else -1
            moved = np.flatnonzero(_moves(dag, source, level, levels, up))
    return Cut(level=level, lost=int(dag.inside(level) @ dag.weight), proven=True)


def _moves(dag: Dag, source: Ints, level: Ints, levels: int, up: bool) -> Ints:
    """Return 1 for each vertex of the smallest set that gains most by moving one level, int64[V].

    The set moves up if ``up``, else down. For an edge inside a level, the head moves up only if the
    tail does; the edge's weight is gained if only the tail moves. For an edge to the next level,
    the weight is lost if only the head moves. For moves down, tail and head are exchanged.
    """
    target = dag.target.astype(np.int64)
    gap = level[source] - level[target]
    flat, steep = gap == 0, gap == 1
    weight, count = dag.weight[source], len(level)
    tail, head = (source, target) if up else (target, source)
    gain = np.bincount(tail[flat], weights=weight[flat], minlength=count)
    gain -= np.bincount(head[flat], weights=weight[flat], minlength=count)
    stuck = np.flatnonzero(level == (levels - 1 if up else 0))
    gains, costs = np.flatnonzero(gain > 0), np.flatnonzero(gain < 0)
    begin, end = np.full(len(gains), count), np.full(len(costs) + len(stuck), count + 1)
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(  # the cost if an arc's first vertex moves and its second does not
        np.concatenate([begin, head[flat], head[steep], costs, stuck]),
        np.concatenate([gains, tail[flat], tail[steep], end]),
        np.concatenate(
            [
                gain[gains],
                np.full(flat.sum(), UNCUTTABLE_CAPACITY),
                weight[steep],
                -gain[costs],
                np.full(len(stuck), UNCUTTABLE_CAPACITY),
            ]
        ).astype(np.int64),
    )
    moved = np.zeros(count + 2, np.int64)
    if len(gains):
        if (status := flow.solve(count, count + 1)) != flow.OPTIMAL:
            raise SolverFailed("max-flow", f"status {status}")
        moved[flow.get_source_side_min_cut()] = 1
    return moved[:count]
