"""The benchmarks; importing this package registers them."""

from benchmarks.cases import (
    ablation,
    arena_compat,
    build,
    deadlines,
    estimate_error,
    fuzz,
    greedy_gap,
    objectives,
    philly_rounds,
    policies,
    rpc,
    simulator_speed,
    solve,
)

__all__ = [
    "ablation",
    "arena_compat",
    "build",
    "deadlines",
    "estimate_error",
    "fuzz",
    "greedy_gap",
    "objectives",
    "philly_rounds",
    "policies",
    "rpc",
    "simulator_speed",
    "solve",
]
