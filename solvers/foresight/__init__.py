"""Foresight: answers of a round are rolled forward to the end of their jobs, and the best is taken."""

from tessera.solvers.foresight.search import FORESIGHT, Foreseen, look_forward

__all__ = ["FORESIGHT", "Foreseen", "look_forward"]
