"""tessera.v1.Agents: certificates of agents, and a stream for each with its desired state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any, Final

import grpc.aio

from tessera.formulation.base.access import AUDITED, IDENTITY, Identity
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import InvalidInput, PermissionDenied
from tessera.formulation.base.logs import add_ids
from tessera.service.server.convert import names
from tessera.service.server.rpc.agents.agentsession import AgentCalls, AgentSession
from tessera.service.server.rpc.agents.enrolment import Enrolment
from tessera.service.server.settings.streams import AgentTiming
from tessera.service.server.tasks.calls import StreamPlaces, Wakeups
from tessera.service.server.tasks.lanes import CALLER
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import agents_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_Messages = AsyncIterator[pb.AgentMessage]

SHOWN_NODES: Final = 5
"""The number of nodes that an error names."""


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
        add_ids(cluster=session.cluster, agent=first.hello.agent_id)
        with (
            self._wakeups.listen(session.cluster) as stream,
            self._wakeups.listen(session.logs.key, stream) as asked,
        ):
            await session.register()
            t = self._timing
            yield pb.ServerMessage(
                welcome=pb.Welcome(
                    lease_s=t.lease_s,
                    heartbeat_s=t.heartbeat_s,
                    inspect_s=t.inspect_s,
                    margin_s=t.margin_s,
                ),
                lease_start_s=session.lease_start_s,
            )
            # One task reads the agent's messages while this one records them and sends the desired
            # state.
            filling = session.inbox.fill(request_iterator, stream, self._clock)
            reader = asyncio.create_task(filling)
            try:
                while not reader.done():
                    session.logs.note_asked(asked.take_changed())
                    if (desired := await session.step(stream)) is not None:
                        yield pb.ServerMessage(desired=desired, lease_start_s=session.lease_start_s)
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
