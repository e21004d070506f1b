"""Goals in order: each is reached by any solver on the problem that the earlier goals leave."""

from tessera.solvers.goals.ordered import SolvedGoals, solve_goals, state_goals
from tessera.solvers.goals.surrogate import build_surrogate

__all__ = ["SolvedGoals", "build_surrogate", "solve_goals", "state_goals"]
