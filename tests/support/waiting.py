"""A wait for a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tests.support.patience import PATIENCE_S

T = TypeVar("T")


def until(
    condition: Callable[[], T | None],
    what: str,
    *,
    within_s: float = PATIENCE_S,
    every_s: float = 0.02,
) -> T:
    """Wait for ``condition`` and return its first true value. ``what`` describes it in errors."""
    end_s, pause = time.monotonic() + within_s, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end_s, f"timed out waiting for: {what}"
        pause.wait(every_s)
    return value
