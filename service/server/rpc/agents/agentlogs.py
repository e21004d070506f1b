"""Requests for output that wait for one agent, and the answers on their way to the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from tessera.db.agents import log_reads
from tessera.db.store.store import Store
from tessera.formulation.base.errors import TooBusy, Unavailable
from tessera.formulation.records.logs import MAX_READS_PER_AGENT, LogAnswer, agent_key
from tessera.service.server.convert.agents import of_log_read, to_log_answer
from tessera.service.server.tasks.lanes import FairCalls
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)


class AgentLogs:
    """The requests for output that one agent has not answered, and its answers.

    They are read and stored by a task of their own, so that the agent's lease never waits for them.
    It belongs to the event loop's thread.
    """

    def __init__(self, store: Store, calls: FairCalls, cluster: str, agent: str) -> None:
        self.key = agent_key(cluster, agent)
        self._store, self._calls = store, calls
        self._cluster, self._agent = cluster, agent
        self._open: dict[str, pb.LogRead] = {}
        self._answers: dict[str, LogAnswer] = {}  # not stored yet
        self._asked = True  # the store may have other requests than before
        self._more = False  # the store had as many requests as are read at a time
        self._failed = False  # the store was unavailable; it is tried again when a message is due
        self._task: asyncio.Task[None] | None = None

    def note_asked(self, asked: bool) -> None:
        """Note whether the agent was asked since the last call."""
        self._asked = self._asked or asked

    def requests(self) -> list[pb.LogRead]:
        """Return the requests that are not answered, oldest first."""
        return list(self._open.values())

    def receive(self, message: pb.LogAnswer) -> None:
        """Take an answer. One to a request that is not open is ignored, so few wait here."""
        request = self._open.pop(message.read_id, None)
        if request is not None:
            self._answers[message.read_id] = to_log_answer(message, request.max_bytes)

    def exchange(self, wake: Callable[[], None], *, due: bool) -> None:
        """Begin to store answers and to read requests, if there is a need.

        ``wake`` is called at the end. If a message to the agent is ``due``, open requests are read
        again, because some may have expired.
        """
        if self._task is not None:
            return
        needed = self._answers or self._asked or (due and self._open)
        if needed and (due or not self._failed):
            work = self._exchange(again=due and bool(self._open))
            self._task = asyncio.create_task(work)
            self._task.add_done_callback(partial(self._end, wake))

    def leave(self) -> None:
        """Drop answers that are not stored. The agent is asked again when it reconnects."""
        if self._task is not None:
            self._task.cancel()

    async def _exchange(self, *, again: bool) -> None:
        asked, self._asked = self._asked, False
        try:
            if answers := list(self._answers.values()):
                await self._calls.run(
                    self._store.update, log_reads.store_answers, self._cluster, self._agent, answers
                )
                for answer in answers:
                    del self._answers[answer.id]
            if asked or again or (self._more and not self._open):
                pending = await self._calls.run(
                    self._store.read, log_reads.find_pending, self._cluster, self._agent
                )
                self._more = len(pending) >= MAX_READS_PER_AGENT
                self._open = {
                    read.id: of_log_read(read) for read in pending if read.id not in self._answers
                }
        except (Unavailable, TooBusy):
            self._asked = True
            raise

    def _end(self, wake: Callable[[], None], ended: asyncio.Task[None]) -> None:
        self._task = None
        self._failed = False
        if not ended.cancelled() and (error := ended.exception()) is not None:
            self._failed = True
            log.warning(
                "cannot exchange output with an agent; it is tried again",
                extra={"event": "agent_output_waits", "agent": self._agent, "error": error},
            )
        wake()
