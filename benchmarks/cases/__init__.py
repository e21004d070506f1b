"""The benchmarks; importing this package registers them."""

from benchmarks.cases import build, greedy_gap, objectives, philly_rounds, rpc

__all__ = ["build", "greedy_gap", "objectives", "philly_rounds", "rpc"]
