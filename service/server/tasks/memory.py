"""Memory that is returned to the system after a burst of calls."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final

import psutil

PERIOD_S: Final = 5.0
"""Seconds between two checks of the process's memory."""

MAX_BUSY_PERIODS: Final = 12
"""Number of checks after which memory is returned even if the process is busy."""

MIN_GROWTH_BYTES: Final = 32 * 2**20
"""Growth since the last return from which another one is worthwhile."""


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    size: int = psutil.Process().memory_info().rss
    return size


def give_back() -> None:
    """Collect reference cycles, and return free memory to the system.

    Collection stops every thread while it runs, which takes seconds with millions of objects. The C
    library keeps what threads have freed, in each of its arenas, until it is asked to return it.
    Other C libraries than glibc have no such call and need none.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def give_back_repeatedly(
    is_busy: Callable[[], bool],
    resident: Callable[[], int] = resident_bytes,
    period_s: float = PERIOD_S,
) -> None:
    """Give memory back when this process has grown and is not busy, until cancelled.

    If the process is always busy, memory is given back every ``MAX_BUSY_PERIODS`` checks, and once
    more when it is idle.
    """
    known, waited = resident(), 0
    while True:
        await asyncio.sleep(period_s)
        now, waited, busy = resident(), waited + 1, is_busy()
        if now > known + MIN_GROWTH_BYTES and (waited >= MAX_BUSY_PERIODS or not busy):
            await asyncio.to_thread(give_back)
            now, waited = resident(), 0
            if not busy:  # the calls will free what they hold when they end
                known = now
        known = min(known, now)
