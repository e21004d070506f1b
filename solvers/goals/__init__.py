"""Goals in order: each is reached by any solver on the problem that the goals before it leave."""

from solvers.goals.ordered import Solved, solve_goals
from solvers.goals.surrogate import surrogate

__all__ = ["Solved", "solve_goals", "surrogate"]
