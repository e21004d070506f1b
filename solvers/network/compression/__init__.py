"""Compression of priorities to the few priority levels that NICs and switches have (Crux 4.3).

The steps are ``dag`` (the contention graph), ``topological_orders`` (topological orders of it), ``cuts`` (the
best cuts of each order) and ``mincut`` (from there to the proven best levels). The tests compare
the result with that of CP-SAT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.compression.cuts import Cut, cut_of
from tessera.solvers.network.compression.dag import Dag, dag_of
from tessera.solvers.network.compression.mincut import best_levels
from tessera.solvers.network.compression.orders import topological_orders

__all__ = ["MOST_EDGES", "Compression", "compress_levels", "compression_of"]

MOST_EDGES: Final = 2_000_000
"""With more edges than this, the best cut of the orders is the result.

Minimum cuts would take seconds. Graphs that dense leave orders so little choice that the cut is
within 1e-4 of the best loss (``network-scale``)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compression:
    """Priority levels and their loss.

    Each pair of jobs that share a link and a level loses the intensity of the more urgent one.
    ``at_stake`` is the loss of one level for all.
    """

    level: Ints  # (J,)
    lost: float
    at_stake: float
    proven: bool  # no levels without inversion lose less


def compress_levels(
    demand: LinkDemand,
    priority: Floats,
    order: Ints,
    levels: int,
    *,
    samples: int = 10,
    seed: int = 0,
) -> Ints:
    """Return each job's priority level, 0 to ``levels`` - 1, int64[jobs].

    Of two jobs that share a link, the one later in ``order`` never has the higher level. Jobs that
    share no link with others have level 0. Some topological orders of the contention DAG are cut:
    the one by urgency and random ones, ``samples`` in all. The best cut starts a search that ends
    with the best levels there are.

    Raises:
        InvalidInput: fewer than one level or sample, a priority that is NaN, or an order that does
            not name each job once.
    """
    if len(priority) != demand.jobs or np.isnan(priority).any():
        raise InvalidInput("priority", f"must be a number for each of {demand.jobs} jobs")
    return compression_of(demand, order, levels, samples=samples, seed=seed).level


def compression_of(
    demand: LinkDemand,
    order: Ints,
    levels: int,
    *,
    samples: int = 10,
    seed: int = 0,
    most_edges: int = MOST_EDGES,
) -> Compression:
    """Return the result of ``compress_levels`` with its loss.

    Above ``most_edges`` edges, only cuts of orders are tried.
    """
    if levels < 1:
        raise InvalidInput("levels", f"is {levels}; it must be at least 1")
    if samples < 1:
        raise InvalidInput("samples", f"is {samples}; it must be at least 1")
    dag = dag_of(demand, order)
    cut = sample_orders(dag, levels, samples, seed)
    if not cut.proven and dag.edges <= most_edges:
        cut = best_levels(dag, cut.level, levels)
    level = np.zeros(demand.jobs, np.int64)
    level[dag.job] = cut.level
    return Compression(
        level=level, lost=dag.lost(cut.level), at_stake=dag.at_stake, proven=cut.proven
    )


def sample_orders(dag: Dag, levels: int, samples: int, seed: int) -> Cut:
    """Return the best cut of ``samples`` topological orders, for each part separately.

    If no path has more vertices than there are levels, nothing is lost: a vertex's level is its
    height. If a path has all vertices, there is only one order.
    """
    level = dag.height()
    highest = np.maximum.reduceat(level, dag.part_start[:-1]) if dag.parts else level
    lost, proven = 0, True
    for at in np.flatnonzero(highest >= levels).tolist():
        part = dag.part(at)
        settled = levels == 1 or int(highest[at]) == len(part.job) - 1
        cuts = (
            cut_of(part, order, levels)
            for order in topological_orders(part, 1 if settled else samples, seed)
        )
        best = min(cuts, key=lambda cut: cut.lost)
        level[slice(*dag.part_start[at : at + 2])] = best.level
        lost, proven = lost + best.lost, proven and (settled or best.lost == 0)
    return Cut(level=level, lost=lost, proven=proven)
