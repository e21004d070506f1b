"""Prices on the coupling rows by ascent on the Lagrangian dual, and an answer read off them."""

from solvers.pricing.solver import Pricing

__all__ = ["Pricing"]
