"""tessera.v1.Agents: certificates of agents, and a stream for each with its desired state.

The store counts an agent's silence from its last recorded message. A node must never be given away
while its agent believes in its lease. Therefore each answer says which message that was, and the
agent counts from the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final

import grpc.aio

from tessera.formulation.access import AUDITED, IDENTITY, Identity
from tessera.formulation.clock import Clock
from tessera.formulation.errors import (
    Conflict,
    InvalidInput,
    NotAllowed,
    PermissionDenied,
    Unavailable,
)
from tessera.formulation.records.agents import Heartbeat, NodeHealth, ObservedGang
from tessera.service.ports.agents import AgentStore
from tessera.service.ports.logs import LogStore
from tessera.service.rpc import fields, names
from tessera.service.rpc.agentlogs import AgentLogs
from tessera.service.rpc.calls import StreamPlaces, Subscription, Wakeups
from tessera.service.rpc.convert import agents as convert
from tessera.service.rpc.enrolment import Enrolment
from tessera.service.rpc.heartbeats import HeartbeatRecorder
from tessera.service.rpc.lanes import CALLER, FairCalls
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import agents_pb2_grpc

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_Messages = AsyncIterator[pb.AgentMessage]

TURN_PATIENCE_S: Final = 0.2
"""Seconds for which a stream waits for its cluster's turn before it continues with other work."""

SHOWN_NODES: Final = 5
"""The number of nodes that an error names."""

MAX_REMARKS: Final = 32
MAX_REMARK_CHARS: Final = 300
"""Largest number of an agent's remarks about its nodes' network that are kept, and the length of
each in characters.
"""


HEALTH_REPEAT_S: Final = 300.0
"""Longest time in seconds until unchanged health is recorded again, e.g. for nodes that were deleted
and created again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """The intervals of an agent's stream, in seconds."""

    lease_s: float = 30.0
    """Time without contact after which an agent stops its gangs. The stream of an agent that is
    silent for this long is closed.
    """
    margin_s: float = 15.0
    """Time after the lease for which the store waits before it frees the agent's GPUs."""
    heartbeat_s: float = 5.0
    inspect_s: float = 20.0
    retry_s: float = 1.0
    """Time between attempts while the store is unavailable."""

    def __post_init__(self) -> None:
        """Refuse settings with which leases would expire between heartbeats."""
        if not 0 < self.heartbeat_s < self.lease_s / 3:
            raise InvalidInput("heartbeat_s", "must be positive and less than a third of lease_s")
        if not self.margin_s <= self.lease_s:
            raise InvalidInput("lease_s", "must be at least margin_s")
        if not (self.inspect_s > 0 and self.retry_s > 0):
            raise InvalidInput("inspect_s", "inspect_s and retry_s must be positive")


@dataclass(frozen=True, slots=True)
class Observation:
    """The gangs that ran on the agent's nodes under a revision of the desired state.

    ``health`` is that of the nodes that are watched.
    """

    revision: int
    gangs: tuple[ObservedGang, ...]
    health: tuple[NodeHealth, ...] = ()

    def covers(self, older: Observation) -> bool:
        """Return whether ``older`` can be dropped: every ended gang in it is also reported here."""
        reported = {(g.job, g.generation, g.node) for g in self.gangs}
        return all(
            (g.job, g.generation, g.node) in reported
            for g in older.gangs
            if g.phase in convert.ENDED_PHASES
        )


@dataclass(slots=True)
class AgentInbox:
    """The reports of an agent that are not recorded yet, usually only the newest observation."""

    spoke_s: float  # when the agent was last heard
    said_s: float = 0.0  # the same by the agent's clock
    spoke: bool = False  # whether it was heard since the last record
    observed: list[Observation] = field(default_factory=list)  # oldest first
    agent: str = ""
    network: tuple[str, ...] = ()  # reasons why the network plan has no effect on its nodes
    own: frozenset[str] = frozenset()  # its nodes
    logs: AgentLogs | None = None

    async def fill(self, messages: _Messages, stream: Subscription, clock: Clock) -> None:
        """Receive messages until the agent closes its side."""
        try:
            async for message in messages:
                if message.WhichOneof("body") == "hello":
                    raise InvalidInput("hello", "only the first message may be a hello")
                if message.WhichOneof("body") == "log_answer" and self.logs is not None:
                    self.logs.receive(message.log_answer)
                    stream.wake()
                    continue  # it renews no lease, so that reading output is not work for the store
                if message.WhichOneof("body") == "observed":
                    gangs = convert.to_observed("observed", message.observed)
                    health = convert.to_health(message.observed, self.own)
                    self._observe(Observation(message.observed.revision, gangs, health))
                    self._heed(message.observed.network_remarks)
                self.spoke, self.spoke_s = True, clock.monotonic_s()
                self.said_s = message.said_s
                stream.wake()
        finally:
            stream.wake()

    def _observe(self, newest: Observation) -> None:
        if self.observed and newest.covers(self.observed[-1]):
            self.observed.pop()
        self.observed.append(newest)

    def _heed(self, remarks: Iterable[str]) -> None:
        """Keep the agent's remarks about its nodes' network, and log each new one."""
        cleaned = tuple(
            "".join(c if c.isprintable() else " " for c in text[:MAX_REMARK_CHARS])
            for text in islice(remarks, MAX_REMARKS)
        )
        for text in cleaned:
            if text not in self.network:
                log.warning("agent %s: %s", self.agent, text, extra={"action": "agent_network"})
        self.network = cleaned


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCalls:
    """The ways in which agents' streams use the store, each with separate threads.

    ``turns`` are calls that wait for their cluster's row. At most one of each cluster holds a
    thread. ``logs`` keeps requests for output, and ``log_calls`` are the threads that use it.
    """

    store: AgentStore
    heartbeats: HeartbeatRecorder
    turns: FairCalls
    reads: FairCalls
    log_calls: FairCalls
    logs: LogStore | None = None


class AgentsServicer(agents_pb2_grpc.AgentsServicer):
    """The servicer of agents' streams."""

    def __init__(
        self,
        calls: AgentCalls,
        wakeups: Wakeups,
        clock: Clock,
        timing: AgentTiming,
        places: StreamPlaces,
        enrolment: Enrolment,
    ) -> None:
        """Remember the parts. ``places`` limits the number of streams."""
        self._calls, self._wakeups, self._enrolment = calls, wakeups, enrolment
        self._clock, self._timing, self._places = clock, timing, places

    async def Sync(
        self, request_iterator: _Messages, context: _Context
    ) -> AsyncIterator[pb.ServerMessage]:
        """Register the agent, then exchange desired and observed state until either side leaves."""
        with self._places.take(CALLER.get().client):
            async with contextlib.aclosing(self._sync(request_iterator)) as messages:
                async for message in messages:
                    yield message

    async def Enrol(self, request: pb.EnrolRequest, context: _Context) -> pb.EnrolResponse:
        """Sign the first certificate of an agent that has a join token."""
        return await self._enrolment.enrol(request)

    async def RenewCertificate(
        self, request: pb.RenewCertificateRequest, context: _Context
    ) -> pb.RenewCertificateResponse:
        """Sign another certificate for the agent that calls."""
        return await self._enrolment.renew(request)

    async def _sync(self, request_iterator: _Messages) -> AsyncGenerator[pb.ServerMessage]:
        if (first := await self._hello(request_iterator)) is None:
            return
        session = AgentSession(first, self._calls, self._clock, self._timing)
        require_own_nodes(IDENTITY.get(), session.cluster, first.hello)
        if (call := AUDITED.get()) is not None:
            target = f"{names.cluster_name(session.cluster)}/agents/{first.hello.agent_id}"
            AUDITED.set(replace(call, target=target))
        CALLER.set(replace(CALLER.get(), cluster=session.cluster))
        with (
            self._wakeups.listen(session.cluster) as stream,
            self._wakeups.listen(session.logs.key, stream) as asked,
        ):
            await session.register()
            t = self._timing
            yield pb.ServerMessage(
                welcome=pb.Welcome(
                    lease_s=t.lease_s, heartbeat_s=t.heartbeat_s, inspect_s=t.inspect_s
                ),
                lease_from_s=session.lease_from_s,
            )
            # One task reads the agent's messages while this one records them and sends the desired
            # state.
            filling = session.inbox.fill(request_iterator, stream, self._clock)
            reader = asyncio.create_task(filling)
            try:
                while not reader.done():
                    session.logs.note_asked(asked.take_changed())
                    if (desired := await session.step(stream)) is not None:
                        yield pb.ServerMessage(desired=desired, lease_from_s=session.lease_from_s)
                    await stream.wait(session.pause_s())
                reader.result()
            finally:
                reader.cancel()
                session.leave()
                await asyncio.gather(reader, return_exceptions=True)

    async def _hello(self, messages: _Messages) -> pb.AgentMessage | None:
        """Return the first message, or None if the agent left without one."""
        try:
            async with asyncio.timeout(self._timing.lease_s):
                first = await anext(messages, None)
        except TimeoutError:
            raise InvalidInput(
                "hello", "no hello was received; send it as the first message"
            ) from None
        if first is None:
            return None
        if first.WhichOneof("body") != "hello":
            raise InvalidInput("hello", "the first message must be a hello")
        return first


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
        self._own = frozenset(node.name for node in self._nodes)
        self._calls, self._clock, self._timing = calls, clock, timing
        now_s = clock.monotonic_s()
        self.logs = AgentLogs(calls.logs, calls.log_calls, self.cluster, self._agent)
        self.inbox = AgentInbox(
            agent=self._agent,
            spoke_s=now_s,
            said_s=first.said_s,
            own=self._own,
            logs=self.logs,
        )
        self.lease_from_s = 0.0  # the agent's clock at its latest recorded message
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
            self._calls.store.hello, self.cluster, self._agent, self._incarnation, self._nodes
        )
        self.lease_from_s = self.inbox.said_s

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
                    "the store is unavailable: %s", error, extra={"action": "agent_stream_waits"}
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
            said_s, inbox.spoke, remarks = inbox.said_s, False, inbox.network
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
            self.lease_from_s = said_s

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
                self._calls.store.observe,
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
            read = await self._calls.reads.run(self._calls.store.desired, self.cluster, self._agent)
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


def require_own_nodes(identity: Identity, cluster: str, hello: pb.Hello) -> None:
    """Check that an agent with a certificate speaks for itself and for nodes that are its own.

    Raises:
        PermissionDenied: the certificate is that of another agent, or does not name a node.
    """
    if not identity.agent:
        return
    if not identity.sees_cluster(cluster) or hello.agent_id != identity.agent:
        raise PermissionDenied(
            f"the certificate is that of agent {identity.agent} of the cluster"
            f" {', '.join(identity.clusters or ())}, and not of {hello.agent_id} of {cluster}; each agent"
            " needs a certificate of its own"
        )
    foreign = sorted({node.node for node in hello.nodes} - identity.nodes)
    if foreign:
        more = ", ..." if len(foreign) > SHOWN_NODES else ""
        raise PermissionDenied(
            f"the certificate of agent {identity.agent} does not name the nodes"
            f" {', '.join(foreign[:SHOWN_NODES])}{more}; enrol it again with a join token for them"
        )


def _wake(stream: Subscription, ended: asyncio.Task[None]) -> None:
    """Wake the stream, and retrieve the task's error in case the stream has left."""
    if not ended.cancelled():
        ended.exception()
    stream.wake()
