"""The benchmarks; importing this package registers them."""

from benchmarks.cases import build, philly_rounds, rpc

__all__ = ["build", "philly_rounds", "rpc"]
