"""The best cuts of an order into priority levels (Crux 4.3, equation 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.network.compression.dag import Dag
from tessera.solvers.network.kernels.compression import cut_order, cut_order_plainly, place_edges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A level for each vertex of a DAG, and the weight of edges inside levels (``Dag.weight``)."""

    level: Ints  # (V,)
    lost: int
    proven: bool  # no levels without inversion lose less


def cut_of(dag: Dag, order: Ints, levels: int, *, plainly: bool = False) -> Cut:
    """Return the best cut of a topological order; of equal cuts, lower levels have more jobs.

    With ``plainly``, the dynamic program runs as it is printed, O(n^2 K) with a square of n^2. It
    returns the same cut.
    """
    count, edges = len(order), dag.edges
    enter_start, leave_start = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
    enter, leave = np.empty(edges, np.int32), np.empty(edges, np.int32)
    place_edges(dag.start, dag.target, order, enter_start, enter, leave_start, leave)
    weight, ends = as_fixed_array(dag.weight[order]), np.empty(levels + 1, np.int64)
    if plainly:
        lost = cut_order_plainly(levels, weight, enter_start, enter, ends)
    else:
        lost = cut_order(levels, weight, enter_start, enter, leave_start, leave, ends)
    level = np.empty(count, np.int64)
    level[order] = np.repeat(np.arange(levels - 1, -1, -1), np.diff(ends))
    return Cut(level=level, lost=int(lost), proven=False)
