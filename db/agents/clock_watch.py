"""The silence after which nodes are dead, although a clock that is set forward feigns silence."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

import sqlalchemy as sa

log = logging.getLogger(__name__)

TOLERANCE_S: Final = 5.0
"""Seconds that a clock may gain between two checks. A slow answer looks like a gain."""

CLOCK_S: Final = "extract(epoch FROM clock_timestamp())::float8"
"""The database's clock as an SQL expression, in seconds since 1970."""

_CLOCK = sa.text(f"SELECT {CLOCK_S}")


class ClockWatch:
    """A comparison of the database's clock with this process's monotonic clock.

    Safe to share between threads.
    """

    def __init__(self, grace_s: float, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Remember the settings.

        ``grace_s`` (the grace) is the time for which silence is not believed after the clock was
        set forward.
        """
        self._grace_s, self._monotonic_s = grace_s, monotonic_s
        self._lock = threading.Lock()
        self._ahead_s: float | None = None
        self._until_s = float("-inf")

    def is_trusted(self, connection: sa.Connection) -> bool:
        """Read both clocks; return whether the database's was not set forward within the grace."""
        return self.sees(float(connection.execute(_CLOCK).scalar_one()))

    def sees(self, database_s: float) -> bool:
        """Record the database's clock; return whether it was not set forward within the grace."""
        with self._lock:
            now_s = self._monotonic_s()
            before_s, self._ahead_s = self._ahead_s, database_s - now_s
            gained_s = 0.0 if before_s is None else self._ahead_s - before_s
            if gained_s > TOLERANCE_S:
                self._until_s = now_s + self._grace_s
                log.warning(
                    "the database's clock was set forward; no node counts as silent for a while",
                    extra={
                        "event": "clock_set_forward",
                        "gained_s": gained_s,
                        "grace_s": self._grace_s,
                    },
                )
            return now_s >= self._until_s


class SilenceLimit:
    """The silence after which a node is dead, in seconds.

    It is infinite just after the database's clock was set forward. Safe to share between threads.
    """

    def __init__(self, silence_s: float, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Remember the limit that holds while the clock is trusted."""
        self.usual_s = silence_s
        self._watch = ClockWatch(silence_s, monotonic_s)

    def read(self, connection: sa.Connection) -> float:
        """Read the database's clock; return the limit now."""
        return self._limit_s(self._watch.is_trusted(connection))

    def at(self, database_s: float) -> float:
        """Return the limit at a time of the database's clock, which was just read."""
        return self._limit_s(self._watch.sees(database_s))

    def _limit_s(self, is_trusted: bool) -> float:
        return self.usual_s if is_trusted else math.inf
