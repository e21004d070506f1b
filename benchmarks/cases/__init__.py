"""The benchmarks; importing this package registers them."""

from benchmarks.cases import (
    ablation,
    arena_compat,
    build,
    deadlines,
    estimate_error,
    fidelity,
    fuzz,
    greedy_gap,
    morphling,
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
    "fidelity",
    "fuzz",
    "greedy_gap",
    "morphling",
    "objectives",
    "philly_rounds",
    "policies",
    "rpc",
    "simulator_speed",
    "solve",
]
