"""Branch and bound on the part of a round that shadow prices leave undecided.

Identical jobs are joined and counted (``joining``). The search (``search``) and its proof
(``proof``) work on counts. ``solver`` is the stage of the portfolio.
"""

from tessera.solvers.branching.solver import Branching

__all__ = ["Branching"]
