"""The benchmarks; importing this package registers them."""

from benchmarks.cases import (
    build,
    deadlines,
    fuzz,
    greedy_gap,
    objectives,
    philly_rounds,
    rpc,
    solve,
)

__all__ = [
    "build",
    "deadlines",
    "fuzz",
    "greedy_gap",
    "objectives",
    "philly_rounds",
    "rpc",
    "solve",
]
