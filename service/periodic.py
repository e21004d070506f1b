"""Rounds without a call: one for each cluster in each period, and one after events.

The replica that holds the cluster's lease runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from functools import partial
from typing import Final

from tessera.formulation.clock import Clock
from tessera.formulation.errors import Conflict, TesseraError
from tessera.formulation.records.clusters import ClusterRecord
from tessera.service.loop import RoundLoop
from tessera.service.ports import Store
from tessera.service.rpc.calls import Calls
from tessera.service.spaced_wakes import SpacedWakes
from tessera.solvers.rounds.options import RoundOptions

log = logging.getLogger(__name__)

TICK_S: Final = 5.0
"""Seconds between ticks. A tick renews the leases and begins the rounds that are due."""

TICKS_PER_LEASE: Final = 3
"""Number of ticks without a renewal after which another replica takes a lease over."""

WAKE_GAP_S: Final = 3.0
"""Shortest time from the beginning of a cluster's last round to one that an event requests."""

PAGE_SIZE: Final = 1000


def clusters_of(store: Store) -> list[ClusterRecord]:
    """Return all clusters, page by page."""
    records: list[ClusterRecord] = []
    while page := store.list_clusters(records[-1].name if records else "", PAGE_SIZE):
        records += page
    return records


class PeriodicRounds:
    """A task that begins a cluster's round when it is woken or had none for ``period_s``.

    ``holder`` is a unique name of this replica. ``deadline_s`` is the time that a round may take.
    ``options`` is the standing policy.
    """

    def __init__(
        self,
        store: Store,
        rounds: RoundLoop,
        clock: Clock,
        *,
        calls: Calls,
        round_calls: Calls,
        holder: str,
        period_s: float,
        deadline_s: float,
        options: RoundOptions | None = None,
    ) -> None:
        self._store, self._rounds, self._clock = store, rounds, clock
        self._calls, self._round_calls = calls, round_calls
        self._holder, self._period_s, self._deadline_s = holder, period_s, deadline_s
        self._options = options or RoundOptions()
        self._tick_s = min(TICK_S, period_s)
        # The last round of each cluster, and when it was begun or seen.
        self._last: dict[str, tuple[int, float]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._wakes, self._woken = SpacedWakes(WAKE_GAP_S), asyncio.Event()
        self._over = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Begin no more rounds, and end those that run without committing them."""
        self._over.set()
        tasks = [*self.begun(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self, cluster: str) -> None:
        """Schedule a round of ``cluster`` soon. Call this in the event loop.

        "" is ignored. It stands for a lost connection to the database, after which it is unknown
        which clusters need a round. What was missed waits for the period.
        """
        if cluster:
            self._wakes.wake(cluster, self._clock.monotonic_s())
            self._woken.set()

    async def begin_woken(self) -> None:
        """Begin the rounds that events asked for and that are due. Raises what the store raises."""
        now_s = self._clock.monotonic_s()
        due = self._wakes.take_due(now_s)
        for place, cluster in enumerate(due):
            if cluster in self._running:  # it may have read the cluster earlier
                self._wakes.wake(cluster, now_s + WAKE_GAP_S)
                continue
            try:
                ours = await self._lease(cluster)
            except TesseraError:
                for left in due[place:]:
                    self._wakes.wake(left, now_s + WAKE_GAP_S)
                raise
            if ours and cluster not in self._running:
                self._begin(cluster, self._last.get(cluster, (0, 0.0))[0], woken=True)

    async def tick(self) -> None:
        """Renew the leases and begin the rounds that are due. Raises what the store raises.

        A cluster without a live job has no rounds and no lease, so empty clusters cost nothing. Its
        first job has a round at the next tick.
        """
        records = await self._calls.run(clusters_of, self._store)
        for deleted in self._last.keys() - {record.name for record in records}:
            del self._last[deleted]
        for record in records:
            if record.idle:
                continue
            cluster, last_round = record.name, record.last_round
            now_s = self._clock.monotonic_s()
            seen, since_s = self._last.get(cluster, (last_round, -math.inf))
            # A round that a call or another replica committed restarts the period.
            if seen != last_round:
                since_s = now_s
            self._last[cluster] = (last_round, since_s)
            ours = await self._lease(cluster)
            if ours and now_s - since_s >= self._period_s and cluster not in self._running:
                self._begin(cluster, last_round)

    async def _lease(self, cluster: str) -> bool:
        """Take or renew the lease of ``cluster``, and return whether this replica holds it."""
        lease_s = self._tick_s * TICKS_PER_LEASE
        return await self._calls.run(self._store.acquire_lease, cluster, self._holder, lease_s)

    def _begin(self, cluster: str, last_round: int, *, woken: bool = False) -> None:
        now_s = self._clock.monotonic_s()
        self._last[cluster] = (last_round, now_s)
        self._wakes.begin(cluster, now_s)
        task = asyncio.create_task(self._round(cluster, now_s, woken=woken))
        self._running[cluster] = task
        task.add_done_callback(partial(self._ended, cluster))

    def begun(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the rounds that run now."""
        return list(self._running.values())

    async def _repeat(self) -> None:
        problem, next_tick_s = "", -math.inf  # a problem is logged once, not at each tick
        while True:
            try:
                if self._clock.monotonic_s() >= next_tick_s:
                    next_tick_s = self._clock.monotonic_s() + self._tick_s
                    await self.tick()
                await self.begin_woken()
                problem = ""
            except TesseraError as error:
                if str(error) != problem:
                    log.warning(
                        "cannot begin periodic rounds: %s", error, extra={"action": "tick_failed"}
                    )
                problem = str(error)
            except Exception:  # the outermost guard of this task: it must outlive any mistake
                log.exception("cannot begin periodic rounds", extra={"action": "tick_failed"})
            next_s = min(next_tick_s, self._wakes.next_s())
            self._woken.clear()
            with contextlib.suppress(TimeoutError):  # after the timeout something is due
                async with asyncio.timeout(max(0.0, next_s - self._clock.monotonic_s())):
                    await self._woken.wait()

    def _ended(self, cluster: str, _task: asyncio.Task[None]) -> None:
        self._running.pop(cluster, None)

    async def _round(self, cluster: str, now_s: float, *, woken: bool) -> None:
        end_s = now_s + self._deadline_s
        work = partial(
            self._rounds.schedule,
            cluster,
            self._options,
            remaining_s=lambda: end_s - self._clock.monotonic_s(),
            dry_run=False,
            request=None,
            cancelled=self._over.is_set,
        )
        facts = {"action": "periodic_round_failed", "cluster": cluster}
        try:
            record = await self._round_calls.run(work)
            self._last[cluster] = (record.summary.number, now_s)
            await self._wake_for_retries(cluster)
        except Conflict as error:
            log.info("%s", error, extra=facts)
            if woken:  # the round that was committed in the meantime may not have seen the event
                self.wake(cluster)
        except TesseraError as error:
            log.warning("the periodic round of %s failed: %s", cluster, error, extra=facts)
        except Exception:  # the outermost guard of one round
            log.exception("the periodic round of %s failed", cluster, extra=facts)

    async def _wake_for_retries(self, cluster: str) -> None:
        """Schedule a round of ``cluster`` for when the next back-off of a job ends."""
        try:
            retry_in_s = await self._calls.run(self._store.retry_in_s, cluster)
        except TesseraError as error:
            facts = {"action": "retries_not_read", "cluster": cluster}
            log.warning(
                "cannot read when failed jobs of %s may start again, so they wait for its next round: %s",
                cluster,
                error,
                extra=facts,
            )
            return
        if math.isfinite(retry_in_s):
            self._wakes.wake(cluster, self._clock.monotonic_s() + retry_in_s)
            self._woken.set()
