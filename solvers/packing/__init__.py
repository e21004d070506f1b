"""Packing rows found for a choice that does not fit, and choices that surely fit on the nodes."""

from tessera.solvers.packing.separate import find_weights

__all__ = ["find_weights"]
