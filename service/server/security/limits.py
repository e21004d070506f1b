"""Limits on how often somebody may call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tessera.formulation.base.errors import TooBusy

REMEMBERED: Final = 10_000
"""Number of callers whose calls are counted. The one that called the longest ago is forgotten."""


class CallRate:
    """A limit on the number of calls of each caller in a minute. A sixth may be made at once.

    It is a token bucket for each name. A rate of 0 is no limit. It belongs to one thread.
    """

    def __init__(self, per_minute: int, what: str, monotonic_s: Callable[[], float]) -> None:
        self._per_s, self._burst = per_minute / 60.0, max(1.0, per_minute / 6.0)
        self._per_minute, self._what, self._monotonic_s = per_minute, what, monotonic_s
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (calls left, when)

    def take(self, name: str) -> None:
        """Count a call of ``name``. Raises TooBusy: it has called too often."""
        if not self._per_minute:
            return
        if (left := self._refilled(name)) < 1.0:
            wait_s = (1.0 - left) / self._per_s
            raise TooBusy(
                f"{self._what} of {name or 'this caller'} may not exceed {self._per_minute:,} a minute;"
                f" call again in {max(wait_s, 0.1):.1f} s, and less often"
            )
        self._left[name] = (left - 1.0, self._monotonic_s())
        self._left.move_to_end(name)
        while len(self._left) > REMEMBERED:
            self._left.popitem(last=False)

    def put_back(self, name: str) -> None:
        """Undo the last ``take`` of ``name``, because the call turned out not to count."""
        if name in self._left:
            left, since_s = self._left[name]
            self._left[name] = (min(self._burst, left + 1.0), since_s)

    def _refilled(self, name: str) -> float:
        now_s = self._monotonic_s()
        left, since_s = self._left.get(name, (self._burst, now_s))
        return min(self._burst, left + (now_s - since_s) * self._per_s)
