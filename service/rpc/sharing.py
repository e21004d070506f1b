"""Reads that callers share who ask for the same thing at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedReads(Generic[K, T]):
    """One read at a time of each key, for all who ask. Belongs to the event loop's thread.

    Nobody is given a read that began before they asked, so a caller that was told of a change sees it.
    Hundreds of watches of one job would otherwise read it hundreds of times a second, and the interpreter
    would have no time left for the leases of agents.
    """

    def __init__(self, read: Callable[[K], Awaitable[T]]) -> None:
        self._read = read
        self._running: dict[K, asyncio.Task[T]] = {}
        self._next: dict[K, asyncio.Task[T]] = {}  # these have not begun to read

    async def get(self, key: K) -> T:
        """Return what a read of ``key`` gives that begins from now on. Raises what the read raises."""
        task = self._next.get(key)
        if task is None:
            task = asyncio.create_task(self._read_after(self._running.get(key), key))
            task.add_done_callback(_retrieve)
            self._next[key] = task
        return await asyncio.shield(task)  # a caller that leaves takes nothing from the others

    async def _read_after(self, before: asyncio.Task[T] | None, key: K) -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running[key] = self._next.pop(key)
        try:
            return await self._read(key)
        finally:
            del self._running[key]


def _retrieve(task: asyncio.Task[T]) -> None:
    """Look at how a read ended, as all who asked may have left."""
    if not task.cancelled():
        task.exception()
