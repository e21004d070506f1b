"""A background task for each cluster, periodically and when the cluster is woken.

The replica that holds the cluster's lease runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tessera.db.rounds.leases import acquire_lease
from tessera.db.store.store import Store
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.logs import begin_ids
from tessera.service.server.rounds.periodic import TICK_S, TICKS_PER_LEASE, clusters_of
from tessera.service.server.tasks.calls import Calls

log = logging.getLogger(__name__)


class ClusterVisit(Protocol):
    """A function that does what is due for a cluster. Blocks."""

    def __call__(
        self, cluster: str, cancelled: Callable[[], bool], woken: Callable[[], bool], /
    ) -> object:
        """Do what is due for the cluster.

        ``cancelled`` returns whether this replica is shutting down. ``woken`` returns whether the
        cluster was woken again since the last call.
        """
        ...


class ClusterTask:
    """A task that runs ``attend`` for one cluster after another.

    It uses the lease of periodic rounds, so ``holder`` must be the same as theirs. ``fails`` is the
    log message after an error, for example "no estimates were updated".
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        attend: ClusterVisit,
        *,
        calls: Calls,
        work: Calls,
        holder: str,
        period_s: float,
        fails: str,
        event: str,
        again_in_s: Callable[[str], float | None] = lambda cluster: None,
        forget: Callable[[str], None] = lambda cluster: None,
        idle_too: bool = False,
    ) -> None:
        """Remember the settings.

        ``attend`` runs in the threads of ``work``. ``event`` names its errors in the log.
        ``forget`` drops what ``attend`` remembers of a cluster that was deleted or that another
        replica has taken over. If ``idle_too`` is set, clusters without a live job are also visited
        in each period.

        ``again_in_s`` is called after each visit of a cluster. It returns the seconds until the
        next extra visit, or None if none is needed.
        """
        self._store, self._clock, self._attend = store, clock, attend
        self._calls, self._work = calls, work
        self._holder, self._period_s = holder, period_s
        self._again_in_s, self._forget, self._idle_too = again_in_s, forget, idle_too
        self._fails, self._event = fails, event
        self._woken: set[str] = set()
        self._wake = asyncio.Event()
        self._over = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Stop, and cancel what is being done."""
        self._over.set()
        for timer in self._timers.values():
            timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake(self, cluster: str) -> None:
        """Visit ``cluster`` immediately, or all clusters if it is ""."""
        self._woken.add(cluster)
        self._wake.set()

    def wake_in(self, cluster: str, seconds: float) -> None:
        """Visit ``cluster`` after ``seconds``, too. This replaces an earlier call for it."""
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
                # asyncio.wait_for may lose a cancellation that coincides with a wake-up
                async with asyncio.timeout(left_s):
                    await self._wake.wait()

    async def look(self, woken: set[str] | None) -> None:
        """Visit the clusters that were woken, or all if ``woken`` is None."""
        begin_ids()
        try:
            chosen = sorted(woken) if woken is not None else await self._every_cluster()
        except TesseraError as error:
            log.warning(self._fails, extra={"event": self._event, "error": error})
            return
        for cluster in chosen:
            begin_ids(cluster=cluster)
            try:
                await self._one(cluster)
            except TesseraError as error:
                log.warning(
                    self._fails, extra={"event": self._event, "cluster": cluster, "error": error}
                )
            except Exception:  # the outermost guard of this task: it must outlive any mistake
                log.exception(self._fails, extra={"event": self._event, "cluster": cluster})

    async def _every_cluster(self) -> list[str]:
        records = await self._calls.run(clusters_of, self._store)
        return [record.name for record in records if self._idle_too or not record.idle]

    async def _one(self, cluster: str) -> None:
        lease_s = TICK_S * TICKS_PER_LEASE
        if await self._calls.run(self._store.update, acquire_lease, cluster, self._holder, lease_s):
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
        """Return whether the cluster was woken since its last visit. Safe in any thread."""
        try:
            self._woken.remove(cluster)  # atomic: a simultaneous wake-up is not lost
        except KeyError:
            return False
        return True
