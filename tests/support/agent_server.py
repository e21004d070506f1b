"""A small server of the Agents service on a real socket, and an agent in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from tessera.v1 import agents_pb2 as pb
from tessera.v1 import agents_pb2_grpc
from tests.support.agents import is_running, process_of, until

NODES = ("n0:a100:8", "n1:a100:8")

LONG: Final = 1e12
"""Iterations that no test waits for."""

RUNNING: Final = ("a", 1, "n0", "RUNNING")
"""What a server sees of the first generation of the job "a" on n0."""


@dataclass
class FakeServer(agents_pb2_grpc.AgentsServicer):
    """A server that sends a desired state and records the observed one."""

    lease_s: float = 30.0
    margin_s: float = 15.0
    heartbeat_s: float = 0.2
    inspect_s: float = 0.3
    port: int = 0
    desired: pb.Desired = field(default_factory=pb.Desired)
    observed: pb.Observed | None = None
    hellos: list[pb.Hello] = field(default_factory=list)
    heartbeats: int = 0
    log_answers: list[pb.LogAnswer] = field(default_factory=list)
    sent_at_s: float = 0.0
    sent: int = 0
    mute: bool = False
    refused: grpc.StatusCode | None = None  # the code with which streams end after the welcome
    has_cluster: bool = True  # if False, hellos are answered with NOT_FOUND
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: Any = None

    async def start(self) -> None:
        """Listen, on the previous port if there was one."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        agents_pb2_grpc.add_AgentsServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.observed = None
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def ask(self, *requests: pb.LogRead) -> None:
        """Ask the agent for output, from now on."""
        del self.desired.log_reads[:]
        self.desired.log_reads.extend(requests)
        self._changed.set()

    def want(self, revision: int, *gangs: pb.DesiredGang) -> None:
        self.desired = pb.Desired(revision=revision, gangs=gangs)
        self._changed.set()

    def seen(self, revision: int) -> list[tuple[str, int, str, str]] | None:
        """Return (job, generation, node, phase) of the gangs last observed under ``revision``."""
        if self.observed is None or self.observed.revision != revision:
            return None
        return [
            (g.job, g.generation, g.node, pb.ObservedGang.Phase.Name(g.phase))
            for g in self.observed.gangs
        ]

    async def sees(self, revision: int, *gangs: tuple[str, int, str, str]) -> None:
        """Wait until exactly ``gangs`` are observed under ``revision``."""
        await until(lambda: self.seen(revision) == list(gangs))

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server signs no certificates")
        raise AssertionError("unreachable")

    async def RenewCertificate(
        self, request: pb.RenewCertificateRequest, context: Any
    ) -> pb.RenewCertificateResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server signs no certificates")
        raise AssertionError("unreachable")

    async def Sync(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ServerMessage]:
        first = await anext(request_iterator)
        self.hellos.append(first.hello)
        self.sent_at_s = first.sent_at_s
        if not self.has_cluster:
            await context.abort(grpc.StatusCode.NOT_FOUND, "clusters/c does not exist")
        yield pb.ServerMessage(
            welcome=pb.Welcome(
                lease_s=self.lease_s,
                heartbeat_s=self.heartbeat_s,
                inspect_s=self.inspect_s,
                margin_s=self.margin_s,
            ),
            lease_start_s=self.sent_at_s,
        )
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while not reader.done():
                if self.refused is not None:
                    await context.abort(self.refused, "a newer incarnation has taken over")
                if not self.mute:
                    yield pb.ServerMessage(desired=self.desired, lease_start_s=self.sent_at_s)
                    self.sent += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self.heartbeat_s)
                self._changed.clear()
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _read(self, messages: Any) -> None:
        async for message in messages:
            self.sent_at_s = message.sent_at_s
            if message.HasField("observed"):
                self.observed = message.observed
            if message.HasField("heartbeat"):
                self.heartbeats += 1
            if message.HasField("log_answer"):
                self.log_answers.append(message.log_answer)


class AgentProcess:
    """A separate process that runs ``tessera-agent``."""

    def __init__(
        self, data_dir: Path, ports: Sequence[int], *flags: str, nodes: Sequence[str] = NODES
    ):
        self.data_dir = data_dir
        self.ports = ports
        self.flags = flags
        self.nodes = nodes
        self.log = data_dir.with_suffix(".log")
        self._children: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "tessera.service.agent.main", "--cluster=c"]
        argv += ["--agent-id=agent", f"--data-dir={self.data_dir}"]
        argv += [word for port in self.ports for word in ("--server", f"127.0.0.1:{port}")]
        argv += [word for node in self.nodes for word in ("--node", node)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*argv, *self.flags], stderr=log, env={**os.environ, "PYTHONPATH": path}
            )

    def pid_of(self, job: str, generation: int = 1) -> int:
        """Return the id of a job's process, which is ended with the test."""
        pid = process_of(self.data_dir, job, generation)
        self._children.add(pid)
        return pid

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit status."""
        self.send(number)
        return await self.ended()

    async def ended(self) -> int:
        process = self._process
        assert process is not None
        await until(lambda: process.poll() is not None)
        return process.returncode

    def clean(self) -> None:
        """End the agent and all its processes."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for path in self.data_dir.glob("gangs/*@*"):
            job, _, generation = path.name.rpartition("@")
            with contextlib.suppress(FileNotFoundError):  # it never started
                self.pid_of(job, int(generation))
        for pid in self._children:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


MakeAgent = Callable[..., AgentProcess]


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """Yield a server that listens."""
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def make_agent(tmp_path: Path, server: FakeServer) -> Iterator[MakeAgent]:
    """Yield a function that starts an agent, at ``server`` unless it names another port."""
    agents: list[AgentProcess] = []

    def make(
        *flags: str, folder: Path | None = None, port: int = 0, nodes: Sequence[str] = NODES
    ) -> AgentProcess:
        folder = folder or tmp_path / f"agent-{len(agents)}"
        agent = AgentProcess(folder, [port or server.port], *flags, nodes=nodes)
        agents.append(agent)
        agent.start()
        return agent

    yield make
    for agent in agents:
        agent.clean()
