"""The events that are still to come in a world."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import numpy as np


class EventQueue:
    """Events in order of time, and at equal times in the order in which they were added."""

    def __init__(self) -> None:
        """Begin without events."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self._events)

    def add(self, at_s: float, happen: Callable[[], None]) -> None:
        """Let ``happen`` be called at a time. If it is infinite, it never comes."""
        if np.isfinite(at_s):
            heapq.heappush(self._events, (at_s, next(self._order), happen))

    def next_s(self) -> float:
        """Return the time of the next event, or inf without one."""
        return self._events[0][0] if self._events else np.inf

    def pop(self) -> Callable[[], None]:
        """Remove the next event, and return it."""
        return heapq.heappop(self._events)[-1]
