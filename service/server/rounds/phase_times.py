"""The times of the phases of rounds: those of a round, and what the next round is expected to take."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import DeadlineTooShort

RESERVE: Final = 1.5
"""Time reserved for placing, checking and committing, as a multiple of their expected duration."""

FIRST_GUESS_S: Final = {"commit": 0.1}
"""Seconds that a phase is expected to take before anything was measured. A commit of 300 jobs took
half of this (``tessera bench rpc``).
"""

AFTER_SOLVING: Final = ("place", "check", "network", "commit")
NOT_SOLVING: Final = ("load", "build", "greedy", *AFTER_SOLVING)

REMEMBERED_ROUNDS: Final = 5
"""Number of rounds over which the median of a phase's time is taken."""

MAX_REMEMBERED_CLUSTERS: Final = 4096
"""Number of clusters whose times are remembered: those with the latest rounds."""


class Phases:
    """Seconds by phase, measured with the given clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._last = clock, clock.monotonic_s()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to ``phase``."""
        now = self._clock.monotonic_s()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def book(self, phase: str, seconds: float) -> None:
        """Add seconds since the last mark that were measured elsewhere to ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._last += seconds


class PhaseTimes:
    """The times that the phases of a cluster's last rounds took."""

    def __init__(self) -> None:
        self._rounds: deque[dict[str, float]] = deque(maxlen=REMEMBERED_ROUNDS)

    def remember(self, seconds: dict[str, float]) -> None:
        """Add a round. Seconds that are added to ``seconds`` later count, too."""
        self._rounds.append(seconds)

    def forget_one(self) -> None:
        """Forget the oldest round, so that one slow round does not refuse all later calls."""
        if self._rounds:
            self._rounds.popleft()

    def expect_s(self, *phases: str) -> float:
        """Return the sum of the phases' medians in seconds.

        A guess is used if nothing was measured.
        """
        total = 0.0
        for phase in phases:
            took = [seconds[phase] for seconds in self._rounds if phase in seconds]
            total += median(took) if took else FIRST_GUESS_S.get(phase, 0.0)
        return total

    def reserve_s(self) -> float:
        """Return the seconds that the solver must leave to the steps after it."""
        return self.expect_s(*AFTER_SOLVING) * RESERVE

    def require(self, remaining_s: float, *phases: str) -> None:
        """Check that the phases can be over in ``remaining_s``.

        Raises:
            DeadlineTooShort: they cannot.
        """
        needed_s = self.expect_s(*phases)
        if remaining_s <= needed_s:
            self.forget_one()
            raise DeadlineTooShort(
                f"{max(remaining_s, 0.0):.3f} s of the deadline are left, but {', '.join(phases)} take"
                f" {needed_s:.3f} s; no round was committed: call again with a longer deadline"
            )


class PhaseHistory:
    """The times of phases by cluster, for the clusters with the latest rounds."""

    def __init__(self) -> None:
        self._times: dict[str, PhaseTimes] = {}  # the latest last

    def __len__(self) -> int:
        return len(self._times)

    def of(self, cluster: str) -> PhaseTimes:
        """Return the times of a cluster, which are new if none are known."""
        return self._times.get(cluster) or PhaseTimes()

    def keep(self, cluster: str, times: PhaseTimes) -> None:
        """Keep the times of a cluster, as those that are forgotten last."""
        self._times.pop(cluster, None)
        self._times[cluster] = times
        for oldest in list(self._times)[:-MAX_REMEMBERED_CLUSTERS]:
            self._times.pop(oldest, None)
