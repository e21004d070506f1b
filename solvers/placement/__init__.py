"""Placement: the assignment of a solution to nodes and GPU indices."""

from tessera.solvers.placement.assign import PackedShares, place
from tessera.solvers.placement.defragment import defragment
from tessera.solvers.placement.leftover import seat_leftover
from tessera.solvers.placement.results import PlacementResult

__all__ = ["PackedShares", "PlacementResult", "defragment", "place", "seat_leftover"]
