"""Rounds without a call: after events, and at least one for each cluster in each period.

The replica that holds the cluster's lease runs them. When one is due is the rule of
``tessera.solvers.rounds.times``, which the simulator follows, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from dataclasses import dataclass
from functools import partial
from typing import Final

from tessera.db.rounds.leases import acquire_lease
from tessera.db.store.reads import list_clusters
from tessera.db.store.store import Store
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import Conflict, TesseraError
from tessera.formulation.base.logs import begin_ids
from tessera.formulation.records.clusters import ClusterOutlook, ClusterRecord
from tessera.formulation.records.rounds import RoundRecord
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.tasks.calls import Calls
from tessera.solvers.rounds.times import RoundTimes

log = logging.getLogger(__name__)

TICK_S: Final = 5.0
"""Seconds between ticks. A tick renews the leases and begins the rounds that are due."""

TICKS_PER_LEASE: Final = 3
"""Number of ticks without a renewal after which another replica takes a lease over."""

LOOK_LATE_S: Final = 0.05
"""Seconds after a node's last moment at which its cluster is looked at. By then it has passed."""

MAX_RETRY_S: Final = 60.0
"""Longest time in seconds from a round that failed to the next attempt."""

PAGE_SIZE: Final = 1000


def clusters_of(store: Store) -> list[ClusterRecord]:
    """Return all clusters, page by page."""
    records: list[ClusterRecord] = []
    while page := store.read(list_clusters, records[-1].name if records else "", PAGE_SIZE):
        records += page
    return records


@dataclass(slots=True)
class _ClusterRounds:
    """This replica's knowledge of one cluster's rounds. Times are of the monotonic clock."""

    times: RoundTimes
    last_round: int | None = None  # None until it is known
    ours: bool = False  # whether this replica held the lease when it last asked
    schedulable: str | None = None  # of the last outlook; None before the first one
    look_s: float = math.inf  # when a node falls silent unless it is heard
    failures: int = 0  # of rounds in a row
    task: asyncio.Task[None] | None = None  # the round that runs

    def due_s(self) -> float:
        """Return the time at which this replica has to begin a round, or inf."""
        if self.task is not None or not (self.ours or self.times.is_asked):
            return math.inf
        return self.times.due_s()

    def next_s(self) -> float:
        """Return the time at which there is something to do, or inf.

        While a round runs it is inf, because everything is looked at again after the round.
        """
        return math.inf if self.task is not None else min(self.due_s(), self.look_s)

    def leave(self) -> None:
        """Forget what only the replica with the lease does."""
        self.ours, self.look_s = False, math.inf


class PeriodicRounds:
    """A task that begins a cluster's round after an event, or when it had none for ``period_s``.

    Two rounds of a cluster that it begins after events begin at least ``spacing_s`` apart, one at a
    time. ``holder`` is a unique name of this replica. ``deadline_s`` is the time that a round may
    take. ``policies`` has the standing policies, which are read at the beginning of each round.
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
        spacing_s: float,
        period_s: float,
        deadline_s: float,
        policies: StandingPolicies | None = None,
    ) -> None:
        self._store, self._rounds, self._clock = store, rounds, clock
        self._calls, self._round_calls = calls, round_calls
        self._holder, self._deadline_s = holder, deadline_s
        self._spacing_s, self._period_s = spacing_s, period_s
        self._policies = policies or StandingPolicies(store)
        self._tick_s = min(TICK_S, period_s)
        self._clusters: dict[str, _ClusterRounds] = {}
        self._resume_s = -math.inf  # nothing is begun before this time, because the store failed
        self._woken = asyncio.Event()
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

    def begun(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the rounds that run now."""
        return [known.task for known in self._clusters.values() if known.task is not None]

    def wake(self, cluster: str) -> None:
        """Request a round of ``cluster`` for an event. Call this in the event loop.

        "" stands for a lost connection to the database. Any event may have been missed meanwhile,
        so every cluster of this replica gets a round.
        """
        now_s = self._clock.monotonic_s()
        if cluster:
            self._ask(cluster, now_s)
        else:
            for name in [name for name, known in self._clusters.items() if known.ours]:
                self._ask(name, now_s)

    async def tick(self) -> None:
        """Renew the leases and begin the rounds that are due. Raises what the store raises.

        A cluster without a live job has no rounds and no lease, so empty clusters cost nothing.
        """
        records = await self._calls.run(clusters_of, self._store)
        for deleted in self._clusters.keys() - {record.name for record in records}:
            if self._clusters[deleted].task is None:
                del self._clusters[deleted]
        for record in records:
            if record.idle:
                if (idle := self._clusters.get(record.name)) is not None:
                    idle.leave()
                continue
            known = self._known(record.name)
            # A round that a call or another replica committed restarts the period.
            if known.last_round not in (None, record.last_round):
                known.times.restart_period(self._clock.monotonic_s())
            known.last_round = record.last_round
            if not await self._lease(record.name):
                known.leave()
            elif not known.ours:  # the replica before may have missed events when it ended
                known.ours = True
                self._ask(record.name, self._clock.monotonic_s())
        await self._look([name for name, known in self._clusters.items() if known.ours])
        await self.begin_due()

    async def begin_due(self) -> None:
        """Begin the rounds that are due, and look for silent nodes. Raises what the store raises."""
        now_s = self._clock.monotonic_s()
        if now_s < self._resume_s:
            return
        try:
            await self._look(
                [name for name, known in self._clusters.items() if known.look_s <= now_s]
            )
            for name in sorted(self._clusters):
                known = self._clusters.get(name)
                if known is None or known.due_s() > now_s:
                    continue
                if not await self._lease(name):  # the replica that has it knows of the event, too
                    known.leave()
                    known.times.drop()
                elif known.task is None:
                    known.ours = True
                    self._begin(name, known)
        except TesseraError:
            self._resume_s = now_s + self._spacing_s
            raise

    def _known(self, cluster: str) -> _ClusterRounds:
        """Return what is known of a cluster, which is nothing at first."""
        known = self._clusters.get(cluster)
        if known is None:
            known = _ClusterRounds(RoundTimes(self._spacing_s, self._period_s))
            self._clusters[cluster] = known
        return known

    def _ask(self, cluster: str, at_s: float) -> None:
        known = self._known(cluster)
        before_s = known.due_s()
        known.times.ask(at_s)
        if known.due_s() < before_s:  # most events of a storm change nothing
            self._woken.set()

    async def _lease(self, cluster: str) -> bool:
        """Take or renew the lease of ``cluster``, and return whether this replica holds it."""
        lease_s = self._tick_s * TICKS_PER_LEASE
        return await self._calls.run(
            self._store.update, acquire_lease, cluster, self._holder, lease_s
        )

    async def _look(self, clusters: list[str]) -> None:
        """Read what time will bring to clusters, and request the rounds that this needs."""
        waiting = [name for name in clusters if self._clusters[name].task is None]
        if not waiting:
            return
        for name in waiting:
            self._clusters[name].look_s = math.inf
        outlooks = await self._calls.run(self._store.outlooks, waiting)
        now_s = self._clock.monotonic_s()
        for name, outlook in outlooks.items():
            known = self._clusters.get(name)
            if known is not None and known.task is None:  # after a round it is read again
                self._heed(name, known, outlook, now_s)

    def _heed(
        self, cluster: str, known: _ClusterRounds, outlook: ClusterOutlook, now_s: float
    ) -> None:
        before, known.schedulable = known.schedulable, outlook.schedulable
        if before not in (None, outlook.schedulable):  # a node fell silent or was heard again
            self._ask(cluster, now_s)
        known.look_s = now_s + outlook.look_in_s + LOOK_LATE_S
        if known.failures:  # the next round is requested already, for later
            return
        due_s = known.due_s()
        known.times.ask(now_s + outlook.event_in_s)
        known.times.expect(now_s + outlook.start_in_s)
        known.times.need(now_s + outlook.promises_due_in_s)
        if known.due_s() < due_s:
            self._woken.set()

    def _begin(self, cluster: str, known: _ClusterRounds) -> None:
        now_s = self._clock.monotonic_s()
        asked = known.times.begin(now_s)
        known.task = asyncio.create_task(self._round(cluster, known, now_s, asked=asked))
        known.task.add_done_callback(partial(self._ended, known))

    def _ended(self, known: _ClusterRounds, _task: asyncio.Task[None]) -> None:
        known.task = None
        self._woken.set()  # an event may have asked for another one

    async def _repeat(self) -> None:
        problem, next_tick_s = "", -math.inf  # a problem is logged once, not at each tick
        while True:
            try:
                if self._clock.monotonic_s() >= next_tick_s:
                    next_tick_s = self._clock.monotonic_s() + self._tick_s
                    await self.tick()
                await self.begin_due()
                problem = ""
            except TesseraError as error:
                if str(error) != problem:
                    log.warning(
                        "cannot begin periodic rounds",
                        extra={"event": "rounds_not_begun", "error": error},
                    )
                problem = str(error)
            except Exception:  # the outermost guard of this task: it must outlive any mistake
                log.exception("cannot begin periodic rounds", extra={"event": "rounds_not_begun"})
                self._resume_s = self._clock.monotonic_s() + self._spacing_s
            self._woken.clear()
            next_s = min((known.next_s() for known in self._clusters.values()), default=math.inf)
            next_s = min(next_tick_s, max(next_s, self._resume_s))
            with contextlib.suppress(TimeoutError):  # after the timeout something is due
                async with asyncio.timeout(max(0.0, next_s - self._clock.monotonic_s())):
                    await self._woken.wait()

    async def _round(
        self, cluster: str, known: _ClusterRounds, now_s: float, *, asked: bool
    ) -> None:
        end_s = now_s + self._deadline_s
        begin_ids(cluster=cluster)

        def work() -> RoundRecord:
            standing = self._policies.of(cluster)
            return self._rounds.schedule(
                cluster,
                standing.options,
                remaining_s=lambda: end_s - self._clock.monotonic_s(),
                dry_run=False,
                request=None,
                cancelled=self._over.is_set,
                policy_version=standing.version,
            )

        try:
            record = await self._round_calls.run(work)
            known.last_round, known.failures = record.summary.number, 0
            await self._look_after_round(cluster, known)
        except Conflict as error:
            log.info(
                "another round was committed first",
                extra={"event": "round_overtaken", "cluster": cluster, "error": error},
            )
            if asked:  # the round that was committed in the meantime may not have seen the event
                self._ask(cluster, self._clock.monotonic_s())
        except TesseraError as error:
            log.warning(
                "the periodic round failed; it is tried again",
                extra={"event": "periodic_round_failed", "cluster": cluster, "error": error},
            )
            self._try_again(cluster, known)
        except Exception:  # the outermost guard of one round
            log.exception(
                "the periodic round failed; it is tried again",
                extra={"event": "periodic_round_failed", "cluster": cluster},
            )
            self._try_again(cluster, known)

    def _try_again(self, cluster: str, known: _ClusterRounds) -> None:
        """Request another round after one that failed, each time after twice as long."""
        wait_s = min(self._spacing_s * 2.0 ** min(known.failures, 32), self._period_s, MAX_RETRY_S)
        known.failures += 1
        self._ask(cluster, self._clock.monotonic_s() + wait_s)

    async def _look_after_round(self, cluster: str, known: _ClusterRounds) -> None:
        try:
            outlooks = await self._calls.run(self._store.outlooks, [cluster])
        except TesseraError as error:
            log.warning(
                "cannot read when a cluster needs its next round; the next check tries again",
                extra={"event": "outlook_unread", "cluster": cluster, "error": error},
            )
            return
        if (outlook := outlooks.get(cluster)) is not None:
            self._heed(cluster, known, outlook, self._clock.monotonic_s())
