"""What is done for a cluster when it is woken and in each period, by the replica that holds its lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tessera.formulation.clock import Clock
from tessera.formulation.errors import TesseraError
from tessera.service.periodic import TICK_S, TICKS_A_LEASE, clusters_of
from tessera.service.ports import Store
from tessera.service.rpc.calls import Calls

log = logging.getLogger(__name__)


class Attend(Protocol):
    """Does what is due for a cluster. Blocks."""

    def __call__(
        self, cluster: str, cancelled: Callable[[], bool], woken: Callable[[], bool], /
    ) -> object:
        """Do it. ``cancelled``: this replica ends; ``woken``: it was woken again since last asked."""
        ...


class Watching:
    """Attends to clusters, one after another. The lease is that of periodic rounds; so must ``holder`` be.

    ``fails`` says what is not done where an error comes of it, e.g. "nothing is estimated".
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        attend: Attend,
        *,
        calls: Calls,
        work: Calls,
        holder: str,
        period_s: float,
        fails: str,
        action: str,
        again_in_s: Callable[[str], float | None] = lambda cluster: None,
        forget: Callable[[str], None] = lambda cluster: None,
        idle_too: bool = False,
    ) -> None:
        """``attend`` runs in the threads of ``work``; ``action`` names its errors in the log.

        ``forget`` drops what ``attend`` remembers of a cluster: another replica has it, or it was deleted.
        ``idle_too``: clusters without a live job are visited in each period, too.

        ``again_in_s`` is asked for each cluster that was attended to: when to look at it again, too.
        """
        self._store, self._clock, self._attend = store, clock, attend
        self._calls, self._work = calls, work
        self._holder, self._period_s = holder, period_s
        self._again_in_s, self._forget, self._idle_too = again_in_s, forget, idle_too
        self._fails, self._facts = fails, {"action": action}
        self._woken: set[str] = set()
        self._wake = asyncio.Event()
        self._over = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """End; what is being done is cancelled."""
        self._over.set()
        for timer in self._timers.values():
            timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake(self, cluster: str) -> None:
        """Look at ``cluster`` at once; "": at all of them."""
        self._woken.add(cluster)
        self._wake.set()

    def wake_in(self, cluster: str, seconds: float) -> None:
        """Look at ``cluster`` then, too, instead of when this was last called for it."""
        if (timer := self._timers.pop(cluster, None)) is not None:
            timer.cancel()
        if not self._over.is_set():
            loop = asyncio.get_running_loop()
            self._timers[cluster] = loop.call_later(seconds, self.wake, cluster)

    async def _repeat(self) -> None:
        next_s = self._clock.monotonic_s()
        while not self._over.is_set():
            woken, self._woken = self._woken, set()
            self._wake.clear()
            every = "" in woken or self._clock.monotonic_s() >= next_s
            if every:
                next_s = self._clock.monotonic_s() + self._period_s
            await self.look(None if every else woken)
            left_s = max(0.0, next_s - self._clock.monotonic_s())
            with contextlib.suppress(TimeoutError):
                # asyncio.wait_for may lose a cancellation beside a wake-up
                async with asyncio.timeout(left_s):
                    await self._wake.wait()

    async def look(self, woken: set[str] | None) -> None:
        """Look at the clusters that were woken; None: at all."""
        try:
            chosen = sorted(woken) if woken is not None else await self._every_cluster()
        except TesseraError as error:
            log.warning("%s: %s", self._fails, error, extra=self._facts)
            return
        for cluster in chosen:
            try:
                await self._one(cluster)
            except TesseraError as error:
                log.warning("%s for %s: %s", self._fails, cluster, error, extra=self._facts)
            except Exception:  # the outermost guard of this task: it must outlive any mistake
                log.exception("%s for %s", self._fails, cluster, extra=self._facts)

    async def _every_cluster(self) -> list[str]:
        records = await self._calls.run(clusters_of, self._store)
        return [record.name for record in records if self._idle_too or not record.idle]

    async def _one(self, cluster: str) -> None:
        lease_s = TICK_S * TICKS_A_LEASE
        if await self._calls.run(self._store.acquire_lease, cluster, self._holder, lease_s):
            await self._work.run(
                self._attend, cluster, self._over.is_set, partial(self._take, cluster)
            )
            if (seconds := self._again_in_s(cluster)) is not None:
                self.wake_in(cluster, seconds)
        elif cluster:
            self._forget(cluster)
            if (timer := self._timers.pop(cluster, None)) is not None:
                timer.cancel()

    def _take(self, cluster: str) -> bool:
        """Return whether the cluster was woken since it was last looked at. In any thread."""
        try:
            self._woken.remove(cluster)  # in one step: a wake-up that comes now is not lost
        except KeyError:
            return False
        return True
