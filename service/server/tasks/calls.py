"""Blocking work in threads outside the event loop, and the wake-ups that streams wait for."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from tessera.formulation.base.errors import TooBusy, Unavailable

_A = TypeVar("_A")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ThreadPool:
    """A bounded number of threads, with the name of the work that each of them does."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._named: dict[Future[Any], str] = {}

    def submit(self, name: str, work: Callable[[_A], _T], argument: _A) -> Future[_T]:
        """Queue ``work(argument)`` for a thread and return its future.

        The thread has the context variables of the caller.
        """
        future = self._pool.submit(copy_context().run, work, argument)
        self._named[future] = name
        future.add_done_callback(lambda done: self._named.pop(done, None))
        return future

    def running(self) -> list[str]:
        """Return the names of the work that is running."""
        return [name for future, name in list(self._named.items()) if future.running()]

    async def close(self, wait_s: float = math.inf) -> list[str]:
        """Drop waiting work, await running work; return the names of the rest after ``wait_s``."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        left = [asyncio.wrap_future(future) for future in list(self._named) if future.running()]
        if left:
            await asyncio.wait(left, timeout=None if math.isinf(wait_s) else wait_s)
        return self.running()


class Calls:
    """A bounded pool of threads for the server's own blocking calls.

    A call that is cancelled while it waits for a thread is never started.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPool(threads, name)

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run ``work`` in a thread and return its result."""
        call = partial(work, *args, **kwargs)
        return await asyncio.wrap_future(self._pool.submit(name_of(work, *args), _call, call))

    def running(self) -> list[str]:
        """Return the names of the calls that hold a thread."""
        return self._pool.running()

    async def close(self, wait_s: float = math.inf) -> list[str]:
        """Drop waiting calls, await running ones; return the names of the rest after ``wait_s``."""
        return await self._pool.close(wait_s)


def _call(work: Callable[[], _T]) -> _T:
    return work()


def name_of(work: Callable[..., object], *args: object) -> str:
    """Return the name of a function, of a method with its class, or of the target of a partial.

    If ``work`` calls another function, as a transaction of the store does, this is its first
    argument, and its name is returned.
    """
    if args and callable(args[0]):
        work = args[0]
    while isinstance(work, partial):
        work = work.func
    return getattr(work, "__qualname__", type(work).__qualname__)


class StreamPlaces:
    """A limit on the number of streams, in all and for each client.

    It belongs to the event loop's thread.
    """

    def __init__(self, most: int, most_per_client: int, what: str) -> None:
        self._most, self._most_per_client, self._what = most, most_per_client, what
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def take(self, client: str) -> Iterator[None]:
        """Hold a place inside the block.

        Raises:
            TooBusy: no place is left.
        """
        for whose, taken, most in (
            ("of this client", self._taken[client], self._most_per_client),
            ("in all", self._taken.total(), self._most),
        ):
            if taken >= most:
                raise TooBusy(
                    f"{taken} {self._what} {whose} are open, which is the limit; close some of them, or"
                    " call another replica"
                )
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]

    def taken(self) -> int:
        """Return the number of places that are taken."""
        return self._taken.total()


class Subscription:
    """A stream's view of a cluster: whether it has changed, and an event to wait for.

    A change also wakes ``other``, if it is given.
    """

    def __init__(self, other: Subscription | None = None) -> None:
        self._other = other
        self._event = asyncio.Event()
        self._changed = False
        self._closed = False

    def changed(self) -> None:
        """Note that the cluster has changed, and wake the stream."""
        self._changed = True
        self._event.set()
        if self._other is not None:
            self._other.wake()

    def wake(self) -> None:
        """End the wait for another reason."""
        self._event.set()

    def close(self) -> None:
        """Note that the server is shutting down, and wake the stream."""
        self._closed = True
        self._event.set()

    def take_changed(self) -> bool:
        """Return whether the cluster has changed since the last call."""
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
    """A registry that wakes the streams of a cluster when it has changed.

    Requests for output and their answers wake streams, too, by the keys of
    ``formulation.records.logs``. It belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._streams: dict[str, set[Subscription]] = {}
        self._closed = False

    def changed(self, cluster: str) -> None:
        """Wake the streams of ``cluster``, or of every cluster if it is ""."""
        chosen = self._streams.values() if not cluster else [self._streams.get(cluster, set())]
        for stream in [s for streams in chosen for s in streams]:
            stream.changed()

    def close(self) -> None:
        """End all streams, including those that subscribe later."""
        self._closed = True
        for stream in [s for streams in self._streams.values() for s in streams]:
            stream.close()

    @contextlib.contextmanager
    def listen(self, cluster: str, other: Subscription | None = None) -> Iterator[Subscription]:
        """Subscribe to ``cluster`` inside the block. Its changes also wake ``other``."""
        stream = Subscription(other)
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
