"""Rounds by themselves: one for each cluster in each period, from whichever replica holds its lease."""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from typing import Final

from formulation.errors import Conflict, TesseraError
from formulation.resources import ClusterRecord
from service.loop import RoundLoop
from service.ports import Clock, Store
from service.roundoptions import RoundOptions
from service.rpc.calls import Calls

log = logging.getLogger(__name__)

TICK_S: Final = 5.0
"""How often leases are renewed and rounds that are due are begun."""

TICKS_A_LEASE: Final = 3
"""Another replica takes over when a lease was not renewed for so many ticks."""

PAGE: Final = 1000


def clusters_of(store: Store) -> list[ClusterRecord]:
    """Return all clusters, page by page."""
    found: list[ClusterRecord] = []
    while page := store.list_clusters(found[-1].name if found else "", PAGE):
        found += page
    return found


class PeriodicRounds:
    """Begins a round for a cluster when none was committed for ``period_s``, whoever asked for it.

    ``holder`` names this replica, uniquely; ``deadline_s`` is what each round may take; ``options`` is
    the standing policy.
    """

    def __init__(
        self, store: Store, rounds: RoundLoop, clock: Clock, *,
        calls: Calls, round_calls: Calls, holder: str, period_s: float, deadline_s: float,
        options: RoundOptions | None = None,
    ) -> None:  # fmt: skip
        self._store, self._rounds, self._clock = store, rounds, clock
        self._calls, self._round_calls = calls, round_calls
        self._holder, self._period_s, self._deadline_s = holder, period_s, deadline_s
        self._options = options or RoundOptions()
        self._tick_s = min(TICK_S, period_s)
        self._last: dict[str, tuple[int, float]] = {}  # cluster -> last round, begun or seen when
        self._running: dict[str, asyncio.Task[None]] = {}
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

    async def tick(self) -> None:
        """Renew the leases and begin the rounds that are due. Raises what the store raises."""
        for record in await self._calls.run(clusters_of, self._store):
            cluster, last_round = record.name, record.last_round
            now_s = self._clock.monotonic_s()
            seen, since_s = self._last.get(cluster, (last_round, now_s - self._period_s))
            if seen != last_round:
                since_s = now_s
            self._last[cluster] = (last_round, since_s)
            lease_s = self._tick_s * TICKS_A_LEASE
            ours = await self._calls.run(self._store.acquire_lease, cluster, self._holder, lease_s)
            if ours and now_s - since_s >= self._period_s and cluster not in self._running:
                self._last[cluster] = (last_round, now_s)
                task = asyncio.create_task(self._round(cluster, now_s))
                self._running[cluster] = task
                task.add_done_callback(partial(self._ended, cluster))

    def begun(self) -> list[asyncio.Task[None]]:
        """Return the rounds that run now."""
        return list(self._running.values())

    async def _repeat(self) -> None:
        problem = ""  # told once, not at each tick
        while True:
            try:
                await self.tick()
                problem = ""
            except TesseraError as error:
                if str(error) != problem:
                    log.warning("no periodic rounds: %s", error, extra={"action": "tick_failed"})
                problem = str(error)
            except Exception:  # the outermost guard of this task: it must outlive any mistake
                log.exception("no periodic rounds", extra={"action": "tick_failed"})
            await asyncio.sleep(self._tick_s)

    def _ended(self, cluster: str, _task: asyncio.Task[None]) -> None:
        self._running.pop(cluster, None)

    async def _round(self, cluster: str, now_s: float) -> None:
        end_s = now_s + self._deadline_s
        work = partial(
            self._rounds.schedule, cluster, self._options,
            remaining_s=lambda: end_s - self._clock.monotonic_s(), dry_run=False, request=None,
            cancelled=self._over.is_set,
        )  # fmt: skip
        facts = {"action": "periodic_round_failed", "cluster": cluster}
        try:
            record = await self._round_calls.run(work)
            self._last[cluster] = (record.summary.number, now_s)
        except Conflict as error:
            log.info("%s", error, extra=facts)
        except TesseraError as error:
            log.warning("no round for %s: %s", cluster, error, extra=facts)
        except Exception:  # likewise
            log.exception("no round for %s", cluster, extra=facts)
