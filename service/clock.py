"""The system's clocks: the only place that reads them."""

from __future__ import annotations

import time


class SystemClock:
    """Meets ``service.ports.Clock``; wall time beside it, for checking what callers ask for."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin; never goes back."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return seconds since 1970; may jump."""
        return time.time_ns() / 1e9
