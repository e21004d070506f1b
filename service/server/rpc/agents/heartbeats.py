"""Heartbeats of agents. All that arrive at the same time are recorded in one transaction.

An agent's lease must not depend on the number of other agents, nor on how busy a cluster's row is.
Therefore heartbeats have a separate thread and wait for no cluster's turn.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tessera.db.agents.agents import record_heartbeats, require_agent
from tessera.db.store.store import Store
from tessera.formulation.base.errors import Conflict, TesseraError
from tessera.formulation.base.logs import begin_ids
from tessera.formulation.records.agents import Heartbeat
from tessera.service.server.tasks.calls import Calls

MAX_HEARTBEATS: Final = 1000
"""Largest number of heartbeats in one transaction."""


class HeartbeatRecorder:
    """A recorder of heartbeats for all streams of this server.

    It belongs to the event loop's thread.
    """

    def __init__(self, store: Store, calls: Calls) -> None:
        """Remember the parts. ``calls`` are threads that nothing else uses."""
        self._store, self._calls = store, calls
        self._waiting: list[tuple[Heartbeat, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def record(self, beat: Heartbeat) -> None:
        """Record a heartbeat, and return once it is recorded.

        Raises:
            NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
                Unavailable.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((beat, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._record_all())
        await answer

    async def _record_all(self) -> None:
        begin_ids()  # not those of the stream that happened to start this task
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_HEARTBEATS], self._waiting[MAX_HEARTBEATS:]
            try:
                await self._record_batch(batch)
            finally:  # also if this task is cancelled
                for _, answer in batch:
                    answer.cancel()  # has no effect on those that have ended

    async def _record_batch(self, batch: list[tuple[Heartbeat, asyncio.Future[None]]]) -> None:
        try:
            heard = await self._calls.run(
                self._store.update, record_heartbeats, [beat for beat, _ in batch]
            )
        except Exception as error:  # noqa: BLE001 - the waiting calls get it, whatever it is
            _fail([answer for _, answer in batch], error)
            return
        for place, (beat, answer) in enumerate(batch):
            if answer.done():
                continue
            if place in heard:
                answer.set_result(None)
                continue
            try:
                await self._calls.run(
                    self._store.read, require_agent, beat.cluster, beat.agent, beat.incarnation
                )
            except TesseraError as error:
                _fail([answer], error)
            else:  # it has registered again since
                _fail([answer], Conflict(f"agent {beat.agent} has registered again; connect again"))


def _fail(answers: list[asyncio.Future[None]], error: Exception) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)
