"""An agent without jobs that answers requests for output from files, and readers of output."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from tessera.service.agent.logreads import answer_read
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.support.agents import until
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import C


class LogAgent:
    """The stream of an agent of one node of the stored cluster.

    While it is ``mute``, it answers no requests.
    """

    def __init__(self, call: Any, node: str, logs: Path) -> None:
        self._call, self.node, self.logs = call, node, logs
        self.mute = False
        self.messages = 0  # desired states
        self.asked = Counter[str]()  # how often each request was sent
        self.reads: list[pb.LogRead] = []  # each once
        self._read_ids = set[str]()
        self._writing = asyncio.Lock()  # gRPC takes one message at a time

    async def run(self) -> None:
        """Answer requests until the stream ends."""
        await self.send(pb.AgentMessage(heartbeat=pb.Heartbeat()))
        while isinstance(message := await self._call.read(), pb.ServerMessage):
            if not message.HasField("desired"):
                continue
            self.messages += 1
            for request in message.desired.log_reads:
                self.asked[request.read_id] += 1
                if request.read_id in self._read_ids:
                    continue
                self._read_ids.add(request.read_id)
                self.reads.append(request)
                if not self.mute:
                    await self.answer(request)
            await self.send(pb.AgentMessage(heartbeat=pb.Heartbeat()))

    async def answer(self, request: pb.LogRead) -> None:
        """Answer a request from the files."""
        answer = await asyncio.to_thread(answer_read, self.logs, request)
        await self.send(pb.AgentMessage(log_answer=answer))

    async def send(self, message: pb.AgentMessage) -> None:
        async with self._writing:
            await self._call.write(message)

    async def is_asked(self, times: int = 1) -> pb.LogRead:
        """Wait until the agent got ``times`` requests, and return the last one."""
        await until(lambda: len(self.reads) >= times)
        return self.reads[times - 1]


@asynccontextmanager
async def log_agent(
    channel: grpc.aio.Channel, node: str, logs: Path, cluster: str = C
) -> AsyncIterator[LogAgent]:
    """Connect the agent of a node of ``tests.support.stored_cluster`` inside the block."""
    call: Any = agents_pb2_grpc.AgentsStub(channel).Sync()
    hello = pb.Hello(
        parent=f"clusters/{cluster}",
        agent_id=f"agent-{node}",
        incarnation="first",
        nodes=[pb.AgentNode(node=node, gpu_type=node.partition("-")[0], gpus=4)],
    )
    await call.write(pb.AgentMessage(hello=hello))
    assert (await call.read()).HasField("welcome")
    agent = LogAgent(call, node, logs)
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        call.cancel()
        ends = (asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError)
        with contextlib.suppress(*ends):  # the last is for a message after the end of the stream
            await task


class OutputStream:
    """A stream of the output of a job of the stored cluster."""

    def __init__(self, channel: grpc.aio.Channel, job: str = "j", **request: Any) -> None:
        name = f"clusters/{C}/jobs/{job}"
        stub = jobs_pb2_grpc.JobsStub(channel)
        self._call: Any = stub.ReadLogs(jobs_pb2.ReadLogsRequest(name=name, **request))
        self.parts: list[jobs_pb2.ReadLogsResponse] = []

    @property
    def data(self) -> bytes:
        """Return what was read so far."""
        return b"".join(part.data for part in self.parts)

    async def next(self) -> jobs_pb2.ReadLogsResponse | None:
        """Return the next part, or None at the end. Raises AioRpcError."""
        async with asyncio.timeout(PATIENCE_S):
            part = await self._call.read()
        if not isinstance(part, jobs_pb2.ReadLogsResponse):
            return None
        self.parts.append(part)
        return part

    async def reads(self, data: bytes) -> None:
        """Read until the output is ``data``."""
        while self.data != data:
            assert data.startswith(self.data)
            assert await self.next() is not None

    async def all(self) -> bytes:
        """Read to the end, and return everything. Raises AioRpcError."""
        while await self.next() is not None:
            continue
        return self.data

    def cancel(self) -> None:
        self._call.cancel()
