"""Placement: a solution brought down to nodes and GPU indices."""

from solvers.placement.assign import place
from solvers.placement.defragment import defragment
from solvers.placement.placed import Placed

__all__ = ["Placed", "defragment", "place"]
