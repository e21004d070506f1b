"""The options of a round, and those of its solution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tessera.formulation.answer.solution import RecordedAnswer
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.parameters import PARAMETERS_FIELD, parse_parameters
from tessera.formulation.round.policy import Policy
from tessera.solvers.base import Budget, unlimited_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions(Policy):
    """The options that a caller may give for a round, with those of its solution.

    They are recorded with the round.
    """

    solver: str = "portfolio"
    gap: float = 1e-4
    seed: int = 0
    solve_limit_s: float = math.inf
    scheduler: str = ""
    """A published scheduler (``tessera.solvers.schedulers``) that decides, e.g. ``fcfs``.

    No promise or limit binds it. If it is empty, Tessera's own statement is solved."""
    scheduler_parameters: str = ""
    """Parameters of that scheduler, e.g. ``depth=5,breadth=8``. All others have their defaults.

    ``tessera.solvers.schedulers.registry.parameters_of`` lists those of each scheduler."""
    work: tuple[tuple[str, float], ...] = ()
    """Pairs of a solver and the deterministic work at which to stop it.

    If it is empty, only time and gap stop it."""
    recorded: tuple[RecordedAnswer, ...] = ()
    """Answers of a recorded round that its clock ended, for a repetition of that round."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        Policy.__post_init__(self)
        if not 0 < self.gap < 1:
            raise InvalidInput("gap", "must lie between 0 and 1")
        if not self.solve_limit_s > 0:
            raise InvalidInput("solve_limit", "must be a positive duration")
        if parse_parameters(self.scheduler_parameters) and not self.scheduler:
            raise InvalidInput(
                PARAMETERS_FIELD,
                "needs a published scheduler; set scheduler, too, e.g. scheduler: arena",
            )


def recorded_options(recorded: Mapping[str, Any]) -> RoundOptions:
    """Return the options that a round recorded."""
    return RoundOptions(**recorded)


def make_budget(
    options: RoundOptions,
    remaining_s: Callable[[], float],
    *,
    cancelled: Callable[[], bool] = never_cancelled,
    left_s: Callable[[], float] = unlimited_time,
) -> Budget:
    """Return what a round with ``options`` may spend. The rest is explained by ``Budget``."""
    return Budget(
        remaining_s=remaining_s,
        seed=options.seed,
        gap=options.gap,
        work=dict(options.work),
        recorded=options.recorded,
        cancelled=cancelled,
        left_s=left_s,
    )
