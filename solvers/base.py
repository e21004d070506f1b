"""What every solver is: ``(Problem, Budget, hint) -> Solution``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from tessera.formulation.cancelling import never
from tessera.formulation.errors import DeadlineTooShort, InvalidInput, TesseraError
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution


class SolverFailed(TesseraError):
    """A solver library said something that has no meaning here; report it with the problem attached."""

    reason = "SOLVER_FAILED"

    def __init__(self, solver: str, detail: str) -> None:
        super().__init__(f"solver {solver} failed: {detail}; choose another solver for this round")
        self.solver = solver
        self.detail = detail

    def metadata(self) -> dict[str, str]:
        """Name the solver."""
        return {"solver": self.solver}


def endless() -> float:
    """Return infinity: nothing limits the time."""
    return math.inf


def require_wanted(cancelled: Callable[[], bool]) -> None:
    """Raise DeadlineTooShort where nobody waits for the answer any more."""
    if cancelled():
        raise DeadlineTooShort(
            "the call was cancelled or its deadline ended while the round was decided; no round was"
            " committed: call again, with a longer deadline"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a solver may work. A value; a solver reads no clock and no configuration of its own.

    ``remaining_s`` returns the wall seconds left, by the caller's clock; it is asked, never stored.
    ``work`` limits solvers by name in their own deterministic unit (cp-sat: deterministic seconds;
    lp: rounds of column generation; others: 1), and 0 makes the portfolio skip the solver, so that
    a recorded round can be repeated bit for bit: with it, ``remaining_s`` should be infinite.
    """

    remaining_s: Callable[[], float]
    seed: int = 0
    gap: float = 1e-4
    """Stop once (bound - objective) / |bound| is at most this."""
    workers: int = 1
    """More than one is faster but not repeatable."""
    work: dict[str, float] = field(default_factory=dict)
    cancelled: Callable[[], bool] = never
    """Whether the answer is of no use to anybody any more; once true, it stays true."""
    left_s: Callable[[], float] = endless
    """Wall seconds until ``cancelled`` becomes true by itself. It only ends library calls that cannot be
    interrupted: no answer that is used depends on it, so a repeated round may have one."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not 0 <= self.gap < 1:
            raise InvalidInput("gap", "must lie in [0, 1)")
        if self.workers < 1:
            raise InvalidInput("workers", "must be at least 1")

    def share(self, fraction: float) -> Budget:
        """Return a budget of this fraction of the time that is left now."""
        left_s = self.remaining_s()
        kept_s = (1.0 - fraction) * left_s if math.isfinite(left_s) else 0.0
        return replace(self, remaining_s=lambda: self.remaining_s() - kept_s)

    def time_limit_s(self) -> float:
        """Return the wall seconds that a library call may take at most."""
        return min(self.remaining_s(), self.left_s())

    def check(self) -> None:
        """Raise DeadlineTooShort where nobody waits for the answer any more. For loops that take long."""
        require_wanted(self.cancelled)

    def expired(self) -> bool:
        """Return whether there is no time left."""
        return self.cancelled() or self.remaining_s() <= 0

    def skips(self, solver: str) -> bool:
        """Return whether the recorded run did without ``solver``."""
        return self.work.get(solver) == 0


class Solver(Protocol):
    """Anything that answers a problem."""

    @property
    def name(self) -> str:
        """Return the name under which its work is recorded."""
        ...

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Answer ``problem`` inside ``budget``; ``hint`` is an earlier answer to the same problem."""
        ...
