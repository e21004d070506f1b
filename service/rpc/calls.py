"""Blocking work off the event loop, and the wake-ups that streams wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from formulation.errors import Unavailable

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Calls:
    """A bounded pool of threads for calls that block.

    A call that is cancelled while it waits for a thread is never started.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what ``work`` returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)


class Subscription:
    """One stream's view of a cluster: whether it has changed, and something to wait on."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._changed = False
        self._closed = False

    def changed(self) -> None:
        """Say that the cluster has changed."""
        self._changed = True
        self._event.set()

    def wake(self) -> None:
        """End the wait for another reason."""
        self._event.set()

    def close(self) -> None:
        """Say that the server is shutting down."""
        self._closed = True
        self._event.set()

    def take_changed(self) -> bool:
        """Return whether the cluster has changed since the last time this was asked."""
        changed, self._changed = self._changed, False
        return changed

    async def wait(self, timeout_s: float) -> None:
        """Wait until woken, or for ``timeout_s``.

        Raises:
            Unavailable: the server is shutting down.
        """
        if not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
        if self._closed:
            raise Unavailable("this server is shutting down; call again to reach another replica")
        self._event.clear()


class Wakeups:
    """Tells the streams of a cluster that it has changed. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._streams: dict[str, set[Subscription]] = {}
        self._closed = False

    def changed(self, cluster: str) -> None:
        """Wake the streams of ``cluster``; "": of every cluster."""
        chosen = self._streams.values() if not cluster else [self._streams.get(cluster, set())]
        for stream in [s for streams in chosen for s in streams]:
            stream.changed()

    def close(self) -> None:
        """End all streams, now and later."""
        self._closed = True
        for stream in [s for streams in self._streams.values() for s in streams]:
            stream.close()

    @contextlib.contextmanager
    def listen(self, cluster: str) -> Iterator[Subscription]:
        """Subscribe to ``cluster`` inside the block."""
        stream = Subscription()
        if self._closed:
            stream.close()
        streams = self._streams.setdefault(cluster, set())
        streams.add(stream)
        try:
            yield stream
        finally:
            streams.discard(stream)
            if not streams and self._streams.get(cluster) is streams:
                del self._streams[cluster]
