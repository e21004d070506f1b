"""Points in time, in a form for people and programs."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

SAME_S: Final = 1e-3
"""Seconds by which two times may differ and still be the same."""


def format_rfc3339(moment_s: float) -> str:
    """Return seconds since 1970 as RFC 3339 in UTC, rounded up to whole seconds.

    From the end of the year 9999 on, the result is "never".
    """
    if not moment_s < 253_402_300_799:  # the last second of the year 9999
        return "never"
    return datetime.fromtimestamp(math.ceil(moment_s), UTC).isoformat().replace("+00:00", "Z")
