"""The benchmarks; importing this package registers them."""

from benchmarks.cases import build, deadlines, greedy_gap, objectives, philly_rounds, rpc

__all__ = ["build", "deadlines", "greedy_gap", "objectives", "philly_rounds", "rpc"]
