"""A clock that only the test moves."""

from __future__ import annotations


class HandClock:
    """A clock that stands still until the test moves it. Calling it returns its time, too."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s
