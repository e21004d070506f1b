"""What a caller may ask of a round, and how it is to be solved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.formulation.errors import InvalidInput
from tessera.formulation.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions(Policy):
    """What a caller may ask of a round, and how it is to be solved; recorded with it."""

    solver: str = "portfolio"
    gap: float = 1e-4
    seed: int = 0
    solve_limit_s: float = math.inf
    scheduler: str = ""
    """A published policy (``tessera.solvers.schedulers``) decides, e.g. ``fcfs``; no promise or limit binds
    it. Empty: Tessera's own statement."""
    work: tuple[tuple[str, float], ...] = ()
    """Solver -> deterministic work at which to stop; empty: only time and gap stop it."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        Policy.__post_init__(self)
        if not 0 < self.gap < 1:
            raise InvalidInput("gap", "must lie between 0 and 1")
        if not self.solve_limit_s > 0:
            raise InvalidInput("solve_limit", "must be a positive duration")
