"""A clock that only the test moves."""

from __future__ import annotations


class HandClock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s
