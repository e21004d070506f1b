"""The times at which a future has rounds, and at which it ends."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.solvers.rounds.times import RoundTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRhythm:
    """The settings that say when rounds take place, and when a future ends.

    Rounds after events are at least ``spacing_s`` apart, and ``coarsening`` times the time since the
    snapshot. What is far away needs no rounds to the second, and this keeps their number small: with
    0.02, a week has about 300.
    """

    spacing_s: float = 60.0
    period_s: float = 300.0
    horizon_s: float = 30 * 86_400.0
    coarsening: float = 0.0
    settled: bool = False
    """Whether the snapshot is from just after a round, so that the next one needs an event."""
    to_horizon: bool = False
    """Whether the future goes on until its horizon, even once the jobs of the snapshot are over."""

    def times(self) -> RoundTimes:
        """Return the rule for when rounds are due."""
        return RoundTimes(spacing_s=self.spacing_s, period_s=self.period_s)
