"""The benchmarks; importing this package registers them."""

from benchmarks.cases import philly_rounds, rpc

__all__ = ["philly_rounds", "rpc"]
