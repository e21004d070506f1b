"""Reads that are shared by callers that request the same thing at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedReads(Generic[K, T]):
    """One read of each key at a time, for all callers. It belongs to the event loop's thread.

    No caller gets a read that began before its call, so a caller that was notified of a change sees
    the change. Otherwise hundreds of watches of one job would read it hundreds of times a second.
    The interpreter would have no time left for the leases of agents.
    """

    def __init__(self, read: Callable[[K], Awaitable[T]]) -> None:
        self._read = read
        self._running: dict[K, asyncio.Task[T]] = {}
        self._next: dict[K, asyncio.Task[T]] = {}  # reads that have not begun

    async def get(self, key: K) -> T:
        """Return the result of a read of ``key`` that begins from now on.

        Raises what the read raises.
        """
        task = self._next.get(key)
        if task is None:
            task = asyncio.create_task(self._read_after(self._running.get(key), key))
            task.add_done_callback(_retrieve)
            self._next[key] = task
        return await asyncio.shield(task)  # a caller that leaves does not cancel it for the others

    async def _read_after(self, before: asyncio.Task[T] | None, key: K) -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running[key] = self._next.pop(key)
        try:
            return await self._read(key)
        finally:
            del self._running[key]


def _retrieve(task: asyncio.Task[T]) -> None:
    """Retrieve the error of a read, because all callers may have left."""
    if not task.cancelled():
        task.exception()
