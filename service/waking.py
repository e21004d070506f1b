"""When clusters that were woken by events have their next round: soon, but never in a storm."""

from __future__ import annotations

import math


class SpacedWakes:
    """Clusters that need a round before their next period.

    No two rounds of a cluster begin within ``gap_s``, so a job that fails in a loop does not keep the
    solver busy. Whatever happens to a cluster may wake it; all that happens within the gap has one round.
    Times are seconds of one monotonic clock.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._due_s: dict[str, float] = {}
        self._begun_s: dict[str, float] = {}

    def wake(self, cluster: str, at_s: float) -> None:
        """Ask for a round of ``cluster`` at ``at_s``, or as soon after it as the gap allows."""
        due_s = max(at_s, self._begun_s.get(cluster, -math.inf) + self._gap_s)
        self._due_s[cluster] = min(due_s, self._due_s.get(cluster, math.inf))

    def begin(self, cluster: str, now_s: float) -> None:
        """Take note that a round of ``cluster`` begins, whatever asked for it."""
        self._begun_s[cluster] = now_s
        asked_s = self._due_s.pop(cluster, math.inf)
        if now_s < asked_s < math.inf:  # what is to happen later is not seen by this round
            self.wake(cluster, asked_s)

    def take_due(self, now_s: float) -> list[str]:
        """Return the clusters whose round is due, in order of names; each is returned once."""
        due = sorted(cluster for cluster, due_s in self._due_s.items() if due_s <= now_s)
        for cluster in due:
            del self._due_s[cluster]
        return due

    def next_s(self) -> float:
        """Return when the next round is due; inf: none is."""
        return min(self._due_s.values(), default=math.inf)
