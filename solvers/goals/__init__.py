"""Goals in order: each is reached by any solver on the problem that the earlier goals leave."""

from tessera.solvers.goals.ordered import Solved, solve_goals
from tessera.solvers.goals.surrogate import surrogate

__all__ = ["Solved", "solve_goals", "surrogate"]
