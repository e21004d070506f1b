"""The clock as an argument, so that code that depends on time can be tested and simulated."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, for budgets and durations, never for stored times."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin."""
        ...


class SystemClock:
    """The system's clocks, which nothing else reads. Wall time checks times that callers give."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin. They never go back."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return seconds since 1970. They may jump."""
        return time.time_ns() / 1e9
