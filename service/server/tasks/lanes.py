"""Lanes: bounded numbers of threads that clients and clusters share fairly.

The harm that a client can do to others in the same lane is bounded. This holds whether its work
takes minutes (rounds) or waits in the database for a cluster's row that others hold (writes):

1. ``LaneLimits`` says how many threads a client, a cluster and a share (one client on one cluster) may
   hold.
2. A free thread goes to the client that holds the fewest, and among its shares to the one that
   holds the fewest. Among equals it goes to the client, then to the share, that got one the longest
   ago.
3. Work that has run for ``turn_s`` while another share waits is asked to end.
4. The queue is bounded for all, for a client and for a share. Work that does not fit is refused
   immediately.
5. Work whose caller has left is never started.

By rules 2 and 3, the wait of a share that holds nothing is bounded by the number of waiting shares:
each takes at most one turn before it. The number of calls that another share makes has no
influence.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from google.protobuf.message import Message

from tessera.formulation.base.errors import TooBusy
from tessera.service.server.tasks.calls import ThreadPool, name_of

P = ParamSpec("P")
M = TypeVar("M", bound=Message)
R = TypeVar("R")
T = TypeVar("T")

CLIENT_DIVISOR: Final = 2
"""One client may hold the queue's places divided by this number."""

REST_EVERY_S: Final = 0.002
REST_S: Final = 0.0005
"""Interval and length of the pauses of cancellable work, made when it checks for cancellation. In a
pause, quick calls get the interpreter immediately and need not wait until it is taken from that
work.
"""

QUICK_BYTES: Final = 65_536
QUICK_ITEMS: Final = 1_000
"""Limits above which a request (bytes) or a page (items) is heavy, because it delays others."""

REMEMBERED_SHARES: Final = 10_000
"""Number of clients and shares for which a lane remembers when they last got a thread."""

SHARE_DIVISOR: Final = 4
"""One client may hold, on one cluster, the queue's places divided by this number."""


@dataclass(frozen=True, slots=True)
class Share:
    """The claim of one client on one cluster to a lane.

    ``client`` is the caller's name if the server knows it, and else its host: see ``client_of``.
    """

    client: str
    cluster: str


_NOBODY: Final = Share(client="", cluster="")

CALLER: Final = ContextVar("CALLER", default=_NOBODY)
"""The share for which the current task runs. The server sets it for each call."""


def client_of(peer: str) -> str:
    """Return the client of a peer's address: its host, which distinguishes unknown callers.

    ``ipv4:10.0.0.7:50123`` is ``10.0.0.7``, and all callers on a Unix socket are one client.
    """
    family, _, address = peer.partition(":")
    return address.rpartition(":")[0] if family in ("ipv4", "ipv6") else family


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """The numbers of threads of a lane that one client, one cluster and one share may hold."""

    client: int
    cluster: int
    share: int

    @classmethod
    def leaving_room(cls, threads: int) -> LaneLimits:
        """Return limits that leave a thread to other clients and clusters, two to other shares."""
        most = max(1, threads - 1)
        return cls(client=most, cluster=most, share=max(1, threads - 2))


@dataclass(eq=False, slots=True)
class LaneTurn:
    """The time that a piece of work has in a lane. Any thread may use it."""

    share: Share
    lane: Lane
    began_s: float = math.inf
    _over: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Note that nobody waits for the answer any more."""
        self._over.set()

    def is_over(self) -> bool:
        """Return whether the caller has left, its deadline has passed, or the server stops."""
        return self._over.is_set()

    def left_s(self) -> float:
        """Return the seconds until the work should end for others, or inf while none wait."""
        if not self.lane.others_wait(self.share):
            return math.inf
        return self.began_s + self.lane.turn_s - self.lane.now_s()


@dataclass(eq=False, slots=True)
class _WaitingWork:
    """A piece of work that waits for a thread."""

    turn: LaneTurn
    work: Callable[[LaneTurn], Any]
    number: int
    answer: asyncio.Future[Any]
    name: str
    context: Context  # the variables of the task that waits for it

    def run(self, turn: LaneTurn) -> Any:
        """Do the work, with the variables of the task that waits for it."""
        return self.context.run(self.work, turn)


class Lane:
    """Threads for long work of callers.

    It belongs to the event loop's thread, except ``others_wait``.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        limits: LaneLimits,
        *,
        most_waiting: int = 64,
        turn_s: float = 10.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.turn_s, self.now_s = turn_s, now_s
        self._pool = ThreadPool(threads, name)
        self._threads, self._name, self._limits = threads, name, limits
        self._most_waiting = most_waiting
        self._queues: dict[Share, deque[_WaitingWork]] = {}  # none of them empty
        self._held: Counter[Share] = Counter()
        # The number of the last turn of each share and each client, the latest last.
        self._given: dict[Share | str, int] = {}
        self._waiting = self._count = self._turns = 0
        self._closed = False

    async def run(self, share: Share, what: str, work: Callable[[LaneTurn], T]) -> T:
        """Run ``work`` in a thread and return its result.

        ``what`` names the call in the log of a server that stops.

        Raises:
            TooBusy: too much work is already waiting.
        """
        self._require_room(share)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._count += 1
        turn = LaneTurn(share=share, lane=self)
        waiting = _WaitingWork(
            turn=turn,
            work=work,
            number=self._count,
            answer=answer,
            name=what,
            context=copy_context(),
        )
        self._queues.setdefault(share, deque()).append(waiting)
        self._waiting += 1
        self._fill()
        try:
            return await answer
        finally:
            turn.end()
            self._forget(waiting)

    def others_wait(self, share: Share) -> bool:
        """Return whether any other share waits for a thread. Safe in any thread."""
        return len(self._queues) > (share in self._queues)

    def running(self) -> list[str]:
        """Return the names of the calls that hold a thread."""
        return self._pool.running()

    async def close(self, wait_s: float = math.inf) -> list[str]:
        """Drop waiting work, await running work; return the names of the rest after ``wait_s``."""
        self._closed = True
        for waiting in [w for queue in self._queues.values() for w in queue]:
            waiting.answer.cancel()
        self._queues.clear()
        return await self._pool.close(wait_s)

    def _require_room(self, share: Share) -> None:
        of_client = sum(len(q) for s, q in self._queues.items() if s.client == share.client)
        of_share = len(self._queues.get(share, ()))
        for whose, waits, most in (
            ("in all", self._waiting, self._most_waiting),
            ("of this client", of_client, max(1, self._most_waiting // CLIENT_DIVISOR)),
            ("of this client and cluster", of_share, max(1, self._most_waiting // SHARE_DIVISOR)),
        ):
            if waits >= most:
                raise TooBusy(
                    f"{waits} calls {whose} are waiting for one of {self._threads} {self._name} threads,"
                    " which is the limit; wait for some of them to end, then call again"
                )

    def _fill(self) -> None:
        """Give free threads to the shares whose turn it is."""
        while not self._closed and self._held.total() < self._threads:
            # Count the threads that each client and each cluster holds.
            of_client, of_cluster = Counter[str](), Counter[str]()
            for held, number in self._held.items():
                of_client[held.client] += number
                of_cluster[held.cluster] += number
            # Find the shares that may hold another thread.
            able = [
                s
                for s in self._queues
                if of_client[s.client] < self._limits.client
                and of_cluster[s.cluster] < self._limits.cluster
                and self._held[s] < self._limits.share
            ]
            if not able:
                return
            # Choose by rule 2: the fewest threads, then the oldest turn, then the order of arrival.
            chosen = min(
                able,
                key=lambda s: (
                    of_client[s.client],
                    self._held[s],
                    self._given.get(s.client, 0),
                    self._given.get(s, 0),
                    self._queues[s][0].number,
                ),
            )
            self._begin(self._take(chosen))

    def _take(self, share: Share) -> _WaitingWork:
        queue = self._queues[share]
        waiting = queue.popleft()
        self._waiting -= 1
        if not queue:
            del self._queues[share]
        return waiting

    def _begin(self, waiting: _WaitingWork) -> None:
        loop, turn = asyncio.get_running_loop(), waiting.turn
        self._held[turn.share] += 1
        self._turns += 1
        for who in (turn.share, turn.share.client):
            self._given.pop(who, None)
            self._given[who] = self._turns
        while len(self._given) > REMEMBERED_SHARES:
            del self._given[next(iter(self._given))]  # the oldest, which now counts as never served
        turn.began_s = self.now_s()
        future = self._pool.submit(waiting.name, waiting.run, turn)

        def ended(future: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._ended, waiting, future)

        future.add_done_callback(ended)

    def _ended(self, waiting: _WaitingWork, future: Future[Any]) -> None:
        """Take the thread back, whether or not anyone still waits for the answer."""
        share, answer = waiting.turn.share, waiting.answer
        self._held[share] -= 1
        if not self._held[share]:
            del self._held[share]
        if not answer.done():
            if future.cancelled():
                answer.cancel()
            elif (error := future.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(future.result())
        self._fill()

    def _forget(self, waiting: _WaitingWork) -> None:
        """Drop the work from the queue if it is still there, because its caller has left."""
        queue = self._queues.get(waiting.turn.share)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            self._waiting -= 1
            if not queue:
                del self._queues[waiting.turn.share]


class FairCalls:
    """Threads of a lane for short blocking calls. Each runs on the share of its ``CALLER``."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` in a thread and return its result.

        Raises:
            TooBusy: too many calls are already waiting.
        """
        call = partial(work, *args, **kwargs)
        return await self._lane.run(CALLER.get(), name_of(work, *args), lambda _: call())

    async def run_cancellable(self, work: Callable[[T, Callable[[], bool]], R], request: T) -> R:
        """Run ``work`` for a request in a thread and return its result.

        Its second argument returns true as soon as nobody waits for the answer any more, like
        ``LaneTurn.is_over``. Each call of it also lets other threads continue.
        """
        rested_s = 0.0

        def call(turn: LaneTurn) -> R:
            def ask() -> bool:
                nonlocal rested_s
                if (now_s := time.monotonic()) - rested_s > REST_EVERY_S:
                    time.sleep(REST_S)
                    rested_s = now_s
                return turn.is_over()

            return work(request, ask)

        return await self._lane.run(CALLER.get(), name_of(work), call)

    def running(self) -> list[str]:
        """Return the names of the calls that hold a thread."""
        return self._lane.running()

    async def close(self, wait_s: float = math.inf) -> list[str]:
        """Drop waiting calls, await running ones; return the names of the rest after ``wait_s``."""
        return await self._lane.close(wait_s)


class SizedCalls:
    """Threads for requests of clients: many for short calls, and few for heavy ones.

    Heavy calls compute for seconds and hold the interpreter meanwhile. If several of them ran at
    the same time, every short call would wait for all of them at each of its steps.
    """

    def __init__(self, quick: FairCalls, heavy: FairCalls) -> None:
        self._quick, self._heavy = quick, heavy

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work``, which is short, and return its result.

        Raises TooBusy like ``FairCalls.run``.
        """
        return await self._quick.run(work, *args, **kwargs)

    async def run_by_size(self, work: Callable[[M], T], request: M) -> T:
        """Run ``work`` for a request that is heavy if it is large, and return its result.

        Raises:
            TooBusy: too many calls are already waiting.
        """
        return await self._calls_for(request).run(work, request)

    async def run_heavy(self, work: Callable[[M], T], request: M) -> T:
        """Run ``work`` for a request that is always heavy, and return its result.

        Raises:
            TooBusy: too many calls are already waiting.
        """
        return await self._heavy.run(work, request)

    async def run_cancellable(self, work: Callable[[M, Callable[[], bool]], R], request: M) -> R:
        """Run ``work`` like ``FairCalls.run_cancellable``, as a heavy call, and return its result.

        Raises:
            TooBusy: too many calls are already waiting.
        """
        return await self._heavy.run_cancellable(work, request)

    def _calls_for(self, request: Message) -> FairCalls:
        items = getattr(request, "page_size", 0)
        heavy = items > QUICK_ITEMS or request.ByteSize() > QUICK_BYTES
        return self._heavy if heavy else self._quick
