"""The interface of a solver: ``(Problem, Budget, hint) -> Solution``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from tessera.formulation.answer.solution import RecordedAnswer, Solution
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import DeadlineTooShort, InvalidInput, TesseraError
from tessera.formulation.round.problem import Problem


class SolverFailed(TesseraError):
    """A result of a solver library that has no meaning here.

    Report it with the problem attached.
    """

    reason = "SOLVER_FAILED"

    def __init__(self, solver: str, detail: str) -> None:
        super().__init__(f"solver {solver} failed: {detail}; choose another solver for this round")
        self.solver = solver
        self.detail = detail

    def metadata(self) -> dict[str, str]:
        """Return the name of the solver."""
        return {"solver": self.solver}


def unlimited_time() -> float:
    """Return infinity, for a budget without a time limit."""
    return math.inf


def require_wanted(cancelled: Callable[[], bool]) -> None:
    """Raise DeadlineTooShort if nobody waits for the answer any more."""
    if cancelled():
        raise DeadlineTooShort(
            "the call was cancelled or its deadline ended while the round was decided, so no round was"
            " committed; call again, with a longer deadline"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The time and work that a solver may spend, as a value.

    A solver reads no clock and no configuration itself. ``remaining_s`` returns the wall seconds
    left by the caller's clock; call it each time and do not store its result.

    ``work`` limits solvers by name, each in its own deterministic unit: deterministic seconds for
    cp-sat, rounds of column generation for lp, and 1 for the others. A limit of 0 makes the
    portfolio skip the solver. With recorded ``work`` a round can be repeated bit for bit, if
    ``remaining_s`` is infinite.
    """

    remaining_s: Callable[[], float]
    seed: int = 0
    gap: float = 1e-4
    """Stop once (bound - objective) / |bound| is at most this."""
    workers: int = 1
    """More than one worker is faster, but the run cannot be repeated."""
    work: dict[str, float] = field(default_factory=dict)
    recorded: tuple[RecordedAnswer, ...] = ()
    """Answers of a recorded run that its clock ended, which replace runs of these stages."""
    cancelled: Callable[[], bool] = never_cancelled
    """Return whether nobody needs the answer any more; once true, it stays true."""
    left_s: Callable[[], float] = unlimited_time
    """Return the wall seconds until ``cancelled`` becomes true automatically.

    It only ends library calls that cannot be interrupted. No answer that is used depends on it, so
    a repeated round may have such a limit."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not 0 <= self.gap < 1:
            raise InvalidInput("gap", "must lie in [0, 1)")
        if self.workers < 1:
            raise InvalidInput("workers", "must be at least 1")

    def share(self, fraction: float) -> Budget:
        """Return a budget with this fraction of the time that is left now."""
        left_s = self.remaining_s()
        kept_s = (1.0 - fraction) * left_s if math.isfinite(left_s) else 0.0
        return replace(self, remaining_s=lambda: self.remaining_s() - kept_s)

    def time_limit_s(self) -> float:
        """Return the maximum number of wall seconds that a library call may take."""
        return min(self.remaining_s(), self.left_s())

    def check(self) -> None:
        """Raise DeadlineTooShort if nobody waits for the answer any more; long loops call this."""
        require_wanted(self.cancelled)

    def expired(self) -> bool:
        """Return whether there is no time left."""
        return self.cancelled() or self.remaining_s() <= 0

    def skips(self, solver: str) -> bool:
        """Return whether the recorded run skipped ``solver``."""
        return self.work.get(solver) == 0


class Solver(Protocol):
    """An object that solves a problem."""

    @property
    def name(self) -> str:
        """Return the name under which its work is recorded."""
        ...

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem`` within ``budget``; ``hint`` is an earlier solution of this problem."""
        ...
