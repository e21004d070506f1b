"""Prices on the coupling rows by ascent on the Lagrangian dual, and an answer read off them."""

from tessera.solvers.pricing.solver import Pricing

__all__ = ["Pricing"]
