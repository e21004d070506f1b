"""The benchmarks; importing this package registers them."""

from benchmarks.cases import (
    arena_compat,
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
    "arena_compat",
    "build",
    "deadlines",
    "fuzz",
    "greedy_gap",
    "objectives",
    "philly_rounds",
    "rpc",
    "solve",
]
