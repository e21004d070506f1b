"""Memory given back to the system after a burst of calls."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final

import psutil

PERIOD_S: Final = 5.0
"""Seconds between two looks at the process's memory."""

PATIENT_PERIODS: Final = 12
"""Looks after which memory is given back although the process is busy."""

GROWTH_BYTES: Final = 32 * 2**20
"""Growth since the last time from which giving back pays."""


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    found: int = psutil.Process().memory_info().rss
    return found


def give_back() -> None:
    """Collect cycles, and return free memory to the system.

    Collecting stops every thread, for as long as there is much to look at: seconds of millions of objects.
    The C library keeps what threads have freed, for each of its arenas, unless it is told to return it.
    Another C library than glibc has no such call and needs none.
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

    Of a process that is always busy it is given back each ``PATIENT_PERIODS``, and once more when it rests.
    """
    known, waited = resident(), 0
    while True:
        await asyncio.sleep(period_s)
        now, waited, busy = resident(), waited + 1, is_busy()
        if now > known + GROWTH_BYTES and (waited >= PATIENT_PERIODS or not busy):
            await asyncio.to_thread(give_back)
            now, waited = resident(), 0
            if not busy:  # what calls hold will be free when they end
                known = now
        known = min(known, now)
