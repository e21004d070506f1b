"""The times at which a call is tried again while no server answers."""

from __future__ import annotations

import time
from typing import Final

from tessera.client.errors import CallError, Unavailable

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 2.0


class Patience:
    """The time of one call: its deadline, and for how long it is tried again.

    ``deadline_s`` is the whole time of the call in seconds; None for no limit. ``retry_s`` is the
    time in which a call that found no server is tried again.
    """

    def __init__(self, deadline_s: float | None, retry_s: float, *, repeatable: bool) -> None:
        self._start_s = time.monotonic()
        self._deadline_s, self._retry_s = deadline_s, retry_s
        self._repeatable, self._pause_s = repeatable, FIRST_PAUSE_S

    def left_s(self) -> float | None:
        """Return the seconds that are left of the call, at least a little; None for no limit."""
        if self._deadline_s is None:
            return None
        return max(0.001, self._start_s + self._deadline_s - time.monotonic())

    def answered(self) -> None:
        """Note that the server answers, so that a later failure is tried again from the start."""
        self._pause_s = FIRST_PAUSE_S
        now_s = time.monotonic()
        if self._deadline_s is not None:
            self._deadline_s -= now_s - self._start_s
        self._start_s = now_s

    def pause_s(self, error: CallError) -> float:
        """Return the seconds until the next try. Raises the error if there is none."""
        waited_s = time.monotonic() - self._start_s
        if not (self._repeatable and isinstance(error, Unavailable)):
            raise error
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        left_s = self.left_s()
        if waited_s + pause_s > self._retry_s or (left_s is not None and pause_s > left_s):
            raise error
        return pause_s
