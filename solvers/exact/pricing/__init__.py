"""Shadow prices of the coupling rows by the Lagrangian dual, and a solution derived from them."""

from tessera.solvers.exact.pricing.solver import Pricing

__all__ = ["Pricing"]
