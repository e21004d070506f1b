"""The times at which clusters that events woke have their next round: soon, but spaced."""

from __future__ import annotations

import math


class SpacedWakes:
    """The clusters that need a round before their next period.

    Two rounds of a cluster begin at least ``gap_s`` apart, so a job that fails in a loop does not
    keep the solver busy. Any event may wake a cluster; all events within the gap share one round.
    Times are seconds of one monotonic clock.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._due_s: dict[str, float] = {}
        self._begun_s: dict[str, float] = {}

    def wake(self, cluster: str, at_s: float) -> None:
        """Request a round of ``cluster`` at ``at_s``, or as soon after it as the gap allows."""
        due_s = max(at_s, self._begun_s.get(cluster, -math.inf) + self._gap_s)
        self._due_s[cluster] = min(due_s, self._due_s.get(cluster, math.inf))

    def begin(self, cluster: str, now_s: float) -> None:
        """Note that a round of ``cluster`` begins, whatever requested it."""
        self._begun_s[cluster] = now_s
        asked_s = self._due_s.pop(cluster, math.inf)
        if now_s < asked_s < math.inf:  # this round cannot see what happens later
            self.wake(cluster, asked_s)

    def take_due(self, now_s: float) -> list[str]:
        """Return the clusters whose round is due, by name. Each is returned once."""
        due = sorted(cluster for cluster, due_s in self._due_s.items() if due_s <= now_s)
        for cluster in due:
            del self._due_s[cluster]
        return due

    def next_s(self) -> float:
        """Return the time at which the next round is due, or inf if no round is due."""
        return min(self._due_s.values(), default=math.inf)
