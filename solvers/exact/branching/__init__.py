"""Branch and bound on the part of a round that shadow prices leave undecided.

Identical jobs are joined and counted (``joining``). The search (``search``) and its proof
(``proof``) work on counts. ``solver`` is the stage of the portfolio. ``knapsacks`` is another stage,
for rounds in which few large gangs fill a GPU type.
"""

from tessera.solvers.exact.branching.knapsacks import KnapsackFilling
from tessera.solvers.exact.branching.solver import Branching

__all__ = ["Branching", "KnapsackFilling"]
