"""The passing of time as an argument, so that what depends on it can be tested and simulated."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, for budgets and durations; never for what is stored."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin."""
        ...
