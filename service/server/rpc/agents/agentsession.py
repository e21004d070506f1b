"""An agent's stream between its hello and its end: what is recorded, and what is sent when.

The store counts an agent's silence from its last recorded message. A node must never be given away
while its agent believes in its lease. Therefore each answer says which message that was, and the
agent counts from the same one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.store.store import Store
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import Conflict, NotAllowed, Unavailable
from tessera.formulation.records.agents import Heartbeat, NodeHealth
from tessera.service import fields
from tessera.service.server.convert import agents as convert
from tessera.service.server.convert import names
from tessera.service.server.rpc.agents.agentinbox import AgentInbox
from tessera.service.server.rpc.agents.agentlogs import AgentLogs
from tessera.service.server.rpc.agents.heartbeats import HeartbeatRecorder
from tessera.service.server.settings.streams import AgentTiming
from tessera.service.server.tasks.calls import Subscription
from tessera.service.server.tasks.lanes import FairCalls
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

TURN_PATIENCE_S: Final = 0.2
"""Seconds for which a stream waits for its cluster's turn before it continues with other work."""

HEALTH_REPEAT_S: Final = 300.0
"""Longest time in seconds until unchanged health is recorded again, e.g. for nodes that were deleted
and created again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCalls:
    """The ways in which agents' streams use the store, each with separate threads.

    ``turns`` are calls that wait for their cluster's row. At most one of each cluster holds a
    thread. ``log_calls`` are the threads for requests for output.
    """

    store: Store
    heartbeats: HeartbeatRecorder
    turns: FairCalls
    reads: FairCalls
    log_calls: FairCalls


class AgentSession:
    """An agent's stream, with what was recorded of the agent and what was sent to it."""

    def __init__(
        self, first: pb.AgentMessage, calls: AgentCalls, clock: Clock, timing: AgentTiming
    ) -> None:
        hello = first.hello
        self.cluster = names.parse_cluster("hello.parent", hello.parent)
        self._agent = names.require_identifier("hello.agent_id", hello.agent_id)
        self._incarnation = fields.require_text(
            "hello.incarnation", hello.incarnation, 100, required=True
        )
        self._nodes = convert.to_nodes("hello.nodes", hello)
        self._offers = convert.to_offers(hello)
        self._own = frozenset(node.name for node in self._nodes)
        self._calls, self._clock, self._timing = calls, clock, timing
        now_s = clock.monotonic_s()
        self.logs = AgentLogs(calls.store, calls.log_calls, self.cluster, self._agent)
        self.inbox = AgentInbox(
            agent=self._agent,
            spoke_s=now_s,
            sent_at_s=first.sent_at_s,
            own=self._own,
            logs=self.logs,
        )
        self.lease_start_s = 0.0  # the agent's clock at its latest recorded message
        self._due_s = now_s  # when a Desired must be sent even without a change
        self._push = True  # the desired state may have changed since it was last read
        self._sent: pb.Desired | None = None
        self._failed = False  # the store was unavailable at the last step
        self._remarks: tuple[str, ...] = ()  # about the network, as recorded
        self._observing: asyncio.Task[None] | None = None
        self._health: tuple[NodeHealth, ...] | None = None  # of the nodes, as recorded
        self._health_due_s = now_s  # when it is recorded again, although it is the same

    async def register(self) -> None:
        """Record the agent and its nodes."""
        await self._calls.turns.run(
            self._calls.store.hello,
            self.cluster,
            self._agent,
            self._incarnation,
            self._nodes,
            self._offers,
        )
        self.lease_start_s = self.inbox.sent_at_s

    async def step(self, stream: Subscription) -> pb.Desired | None:
        """Record what the agent reported; return the message to send now, or None.

        While the store is unavailable, nothing is sent and nothing is lost.

        Raises:
            Conflict: another incarnation of the agent took over.
            Unavailable: the agent was silent for longer than its lease.
        """
        self._push = stream.take_changed() or self._push
        now_s = self._clock.monotonic_s()
        if now_s - self.inbox.spoke_s > self._timing.lease_s:
            raise Unavailable(
                f"agent {self._agent} sent nothing for {self._timing.lease_s:g} s; connect again"
            )
        try:
            await self._beat()
            await self._observe(stream)
            self.logs.exchange(stream.wake, due=now_s >= self._due_s)
            desired = await self._next()
        except NotAllowed as error:
            raise Conflict(str(error)) from error
        except Unavailable as error:
            if not self._failed:
                log.warning(
                    "the store is unavailable; the agent's stream waits",
                    extra={"event": "agent_stream_waits", "agent": self._agent, "error": error},
                )
            self._failed = True
            return None
        self._failed = False
        return desired

    def pause_s(self) -> float:
        """Return the seconds to wait for a wake-up."""
        if self._failed:
            return self._timing.retry_s
        left_s = self._due_s - self._clock.monotonic_s()
        return left_s if left_s > 0 else self._timing.heartbeat_s

    def leave(self) -> None:
        """Drop what is not recorded yet. The agent reports it again when it reconnects."""
        self.logs.leave()
        if self._observing is not None:
            self._observing.cancel()

    async def _beat(self) -> None:
        inbox = self.inbox
        if inbox.spoke:
            sent_at_s, inbox.spoke, remarks = inbox.sent_at_s, False, inbox.network
            try:
                await self._calls.heartbeats.record(
                    Heartbeat(
                        cluster=self.cluster,
                        agent=self._agent,
                        incarnation=self._incarnation,
                        network_remarks=remarks if remarks != self._remarks else None,
                    )
                )
                self._remarks = remarks
            except Unavailable:
                inbox.spoke = True
                raise
            self.lease_start_s = sent_at_s

    async def _observe(self, stream: Subscription) -> None:
        """Record what the agent observed, or continue while that waits for the cluster's turn.

        If many calls change a cluster at the same time, its agents' leases must still be renewed.
        """
        if self._observing is None and self.inbox.observed:
            self._observing = asyncio.create_task(self._record_observed())
            self._observing.add_done_callback(partial(_wake, stream))
        if self._observing is None:
            return
        await asyncio.wait([self._observing], timeout=TURN_PATIENCE_S)
        if self._observing.done():
            ended, self._observing = self._observing, None
            ended.result()

    async def _record_observed(self) -> None:
        inbox = self.inbox
        while inbox.observed:
            first = inbox.observed[0]
            # A faulty node is drained before the jobs that failed there can be started again.
            await self._record_health(first.health)
            changed = await self._calls.turns.run(
                self._calls.store.update,
                record_observation,
                self.cluster,
                self._agent,
                self._incarnation,
                first.gangs,
                first.revision,
            )
            self._push = self._push or changed
            if inbox.observed[0] is first:  # else a newer one has replaced it
                inbox.observed.pop(0)

    async def _record_health(self, health: tuple[NodeHealth, ...]) -> None:
        """Record the health of the nodes if it has changed, or if time may have had an effect on it."""
        now_s = self._clock.monotonic_s()
        if health == self._health and (not health or now_s < self._health_due_s):
            return
        again_in_s = await self._calls.turns.run(
            self._calls.store.record_health, self.cluster, self._agent, self._incarnation, health
        )
        self._health, self._health_due_s = health, now_s + min(again_in_s, HEALTH_REPEAT_S)

    async def _next(self) -> pb.Desired | None:
        now_s = self._clock.monotonic_s()
        due = now_s >= self._due_s
        if not (due or self._push):
            return self._next_request()
        self._push = False
        try:
            read = await self._calls.reads.run(
                self._calls.store.read, load_desired_gangs, self.cluster, self._agent
            )
        except Unavailable:
            self._push = True
            raise
        desired = convert.of_desired(read, self._own)
        desired.log_reads.extend(self.logs.requests())
        if not due and desired == self._sent:
            return None
        self._sent = desired
        self._due_s = now_s + self._timing.heartbeat_s
        return desired

    def _next_request(self) -> pb.Desired | None:
        """Return the last desired state with requests for output that are new, or None."""
        requests = self.logs.requests()
        if self._sent is None or all(request in self._sent.log_reads for request in requests):
            return None
        desired = pb.Desired()
        desired.CopyFrom(self._sent)
        del desired.log_reads[:]
        desired.log_reads.extend(requests)
        self._sent = desired
        return desired


def _wake(stream: Subscription, ended: asyncio.Task[None]) -> None:
    """Wake the stream, and retrieve the task's error in case the stream has left."""
    if not ended.cancelled():
        ended.exception()
    stream.wake()
