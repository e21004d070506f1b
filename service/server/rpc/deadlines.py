"""The time that a call of long work has: that of its caller, cut where it is too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from tessera.formulation.base.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeadlines:
    """The deadlines of calls: ``default_s`` if one has none, and ``longest_s`` for its solver."""

    clock: Clock
    default_s: float
    longest_s: float

    def of(
        self, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tuple[Callable[[], float], Callable[[], float]]:
        """Return functions, safe in any thread, for the seconds left to the call and to its solver.

        A long deadline is cut: the solver ends with its best answer after ``longest_s``, and
        everything after it may take the same time again.
        """
        now_s, given_s = self.clock.monotonic_s(), context.time_remaining()
        left_s = self.default_s if given_s is None else given_s
        solver_end_s = now_s + self.longest_s
        end_s = min(now_s + left_s, solver_end_s + self.longest_s)
        return (
            lambda: end_s - self.clock.monotonic_s(),
            lambda: solver_end_s - self.clock.monotonic_s(),
        )
