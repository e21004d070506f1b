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

GROWTH_BYTES: Final = 32 * 2**20
"""Growth since the last time from which giving back pays."""


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    found: int = psutil.Process().memory_info().rss
    return found


def give_back() -> None:
    """Collect cycles, and return free memory to the system.

    The C library keeps what threads have freed, for each of its arenas, unless it is told to return it.
    Another C library than glibc has no such call and needs none.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def give_back_repeatedly(
    resident: Callable[[], int] = resident_bytes, period_s: float = PERIOD_S
) -> None:
    """Give memory back whenever this process has grown, until cancelled."""
    known = resident()
    while True:
        await asyncio.sleep(period_s)
        now = resident()
        if now > known + GROWTH_BYTES:
            await asyncio.to_thread(give_back)
            now = known = resident()
        known = min(known, now)
