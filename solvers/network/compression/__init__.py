"""Priorities brought down to the few levels that NICs and switches have (Crux 4.3).

``dag`` (who meets whom) -> ``orders`` (topological ones) -> ``cuts`` (the best cuts of each) -> ``mincut``
(from there to the proven best). ``exact`` says the same by CP-SAT, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Demand
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.network.compression.cuts import Cut, cut_of
from tessera.solvers.network.compression.dag import Dag, dag_of
from tessera.solvers.network.compression.mincut import best_levels
from tessera.solvers.network.compression.orders import orders

__all__ = ["MOST_EDGES", "Compression", "compressed", "compression_of"]

MOST_EDGES: Final = 2_000_000
"""With more edges the best cut of the orders is taken as it is: minimum cuts would take seconds, and graphs
that dense leave orders so little choice that it is within 1e-4 of the best loss (``network-scale``)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compression:
    """Levels and what they lose: the sum over pairs of jobs that share a link and a level of the intensity of
    the more urgent one, beside what one level for all would lose."""

    level: Ints  # (J,)
    lost: float
    at_stake: float
    proven: bool  # no levels without inversion lose less


def compressed(
    demand: Demand, priority: Floats, order: Ints, levels: int, *, samples: int = 10, seed: int = 0
) -> Ints:
    """Return each job's level, 0 to ``levels`` - 1, int64[jobs]; of two that share a link the one later in
    ``order`` is never on the higher. Jobs that meet nobody are on level 0.

    Of all topological orders of the contention DAG, that of urgency and random ones are cut, ``samples`` in
    all; the best cut is the start of a search that ends with the best levels there are.

    Raises:
        InvalidInput: fewer than one level or sample, a priority that is no number, or an order that does not
            name each job once.
    """
    if len(priority) != demand.jobs or np.isnan(priority).any():
        raise InvalidInput("priority", f"must be a number for each of {demand.jobs} jobs")
    return compression_of(demand, order, levels, samples=samples, seed=seed).level


def compression_of(
    demand: Demand,
    order: Ints,
    levels: int,
    *,
    samples: int = 10,
    seed: int = 0,
    most_edges: int = MOST_EDGES,
) -> Compression:
    """Return what ``compressed`` does and what it loses; above ``most_edges`` only by cutting orders."""
    if levels < 1:
        raise InvalidInput("levels", f"is {levels}; it must be at least 1")
    if samples < 1:
        raise InvalidInput("samples", f"is {samples}; it must be at least 1")
    dag = dag_of(demand, order)
    found = sampled(dag, levels, samples, seed)
    if not found.proven and dag.edges <= most_edges:
        found = best_levels(dag, found.level, levels)
    level = np.zeros(demand.jobs, np.int64)
    level[dag.job] = found.level
    return Compression(
        level=level, lost=dag.lost(found.level), at_stake=dag.at_stake, proven=found.proven
    )


def sampled(dag: Dag, levels: int, samples: int, seed: int) -> Cut:
    """Return the best cut of so many topological orders, for each part by itself.

    Where no path has more vertices than there are levels, nothing is lost: a vertex's level is its height.
    Where a path has all vertices there is no other order.
    """
    level = dag.height()
    highest = np.maximum.reduceat(level, dag.part_start[:-1]) if dag.parts else level
    lost, proven = 0, True
    for at in np.flatnonzero(highest >= levels).tolist():
        part = dag.part(at)
        settled = levels == 1 or int(highest[at]) == len(part.job) - 1
        cuts = (
            cut_of(part, order, levels) for order in orders(part, 1 if settled else samples, seed)
        )
        best = min(cuts, key=lambda cut: cut.lost)
        level[slice(*dag.part_start[at : at + 2])] = best.level
        lost, proven = lost + best.lost, proven and (settled or best.lost == 0)
    return Cut(level=level, lost=lost, proven=proven)
