"""The passing of time as an argument, so that what depends on it can be tested and simulated."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, for budgets and durations; never for what is stored."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin."""
        ...


class SystemClock:
    """The system's clocks, which nothing else reads; wall time checks what callers ask for."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin; never goes back."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return seconds since 1970; may jump."""
        return time.time_ns() / 1e9
