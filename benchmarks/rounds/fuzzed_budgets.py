"""Random gaps and random records of work, as in a round that is repeated."""

from __future__ import annotations

import math
import time
from typing import Final

import numpy as np

from tessera.solvers.base import Budget
from tessera.solvers.goals.calls import CALLS_KEY

LARGEST_GAP: Final = 1e-2
SMALLEST_GAP: Final = 1e-9
NO_GAP_SHARE: Final = 0.3
"""The share of the budgets that ask for a gap of 0."""
RECORDED_SHARE: Final = 0.5
"""The share of the budgets that hold a record of work."""
WORK_AMOUNTS: Final = (0.0, 1e-9, 1e-3, 0.05, 1.0, 2.0, 5.0, 100.0, 400.0)
"""The amounts of work that a record may name; 0 leaves the solver out."""
STAGES: Final = ("greedy", "pricing", "lp", "cp-sat")
MAX_CALLS: Final = 12


def draw_gap(rng: np.random.Generator) -> float:
    """Draw a gap: 0, or one from ``SMALLEST_GAP`` to ``LARGEST_GAP``, uniform in its logarithm."""
    if rng.random() < NO_GAP_SHARE:
        return 0.0
    return float(10 ** rng.uniform(math.log10(SMALLEST_GAP), math.log10(LARGEST_GAP)))


def draw_work(rng: np.random.Generator, *, calls: bool = False) -> dict[str, float]:
    """Draw a record of work: empty, for some solvers, or (``calls``) for several calls."""
    if rng.random() >= RECORDED_SHARE:
        return {}
    if not calls or rng.random() < 0.5:
        return _amounts(rng, "")
    count = int(rng.integers(1, MAX_CALLS + 1))
    work = {CALLS_KEY: float(count)}
    for call in range(1, count + 1):
        if rng.random() < 0.8:  # the other calls had no time
            work |= _amounts(rng, f"{call}:")
    return work


def _amounts(rng: np.random.Generator, prefix: str) -> dict[str, float]:
    named = [name for name in STAGES if rng.random() < 0.6]
    return {f"{prefix}{name}": float(rng.choice(WORK_AMOUNTS)) for name in named}


def budget_of(
    limit_s: float, *, gap: float, seed: int, work: dict[str, float] | None = None
) -> Budget:
    """Return a budget of ``limit_s`` wall seconds from now."""
    if math.isinf(limit_s):
        return Budget(remaining_s=lambda: math.inf, gap=gap, seed=seed, work=work or {})
    end_s = time.perf_counter() + limit_s
    return Budget(
        remaining_s=lambda: end_s - time.perf_counter(), gap=gap, seed=seed, work=work or {}
    )
