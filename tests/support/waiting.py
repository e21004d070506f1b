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
    what: str | Callable[[], str],
    *,
    within_s: float = PATIENCE_S,
    every_s: float = 0.02,
) -> T:
    """Wait for ``condition`` and return its first true value. ``what`` describes it in errors.

    If it is a function, it is called only for an error, so that it can say what there was instead.
    """
    end_s, pause = time.monotonic() + within_s, threading.Event()
    while not (value := condition()):
        if time.monotonic() >= end_s:
            raise AssertionError(
                f"timed out waiting for: {what if isinstance(what, str) else what()}"
            )
        pause.wait(every_s)
    return value
