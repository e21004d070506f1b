"""Two servers on one database: one with TLS that asks callers who they are, one without."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

import grpc

from tessera.client import ChannelSettings, open_channel
from tessera.service.agent.keys import NewKey, make_key
from tessera.service.cli.authority import make_authority
from tessera.service.cli.demo.drive import PARENT
from tessera.service.cli.demo.stack import CHANNEL_OPTIONS, Stack, run_stack
from tessera.service.security.key_files import write_private, write_public
from tessera.v1 import (
    access_pb2,
    access_pb2_grpc,
    agents_pb2,
    agents_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

CALL_S: Final = 60.0
THREADS: Final = 4
"""Number of threads that call at the same time, where several do."""


_OWN_CONNECTION: Final = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledServer:
    """A server as a client reaches it."""

    address: str
    channel: ChannelSettings

    @contextmanager
    def connect(self) -> Iterator[grpc.Channel]:
        """Open a connection of its own."""
        with open_channel(self.address, self.channel, _OWN_CONNECTION) as channel:
            yield channel


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurePair:
    """Both servers. ``folder`` has the files of TLS."""

    plain: CalledServer
    secure: CalledServer
    stack: Stack
    folder: Path

    def servers(self) -> tuple[CalledServer, CalledServer]:
        """Return both servers, the one without TLS first."""
        return self.plain, self.secure

    def time_schedule_calls(self, calls: int) -> tuple[list[float], list[float]]:
        """Return the seconds of whole Schedule calls to each server, which alternate.

        Which server is called first alternates, too.
        """
        request = scheduler_pb2.ScheduleRequest(
            parent=PARENT, summary_only=True, options=scheduler_pb2.RoundOptions(solver="greedy")
        )
        took: tuple[list[float], list[float]] = ([], [])
        with ExitStack() as left:
            stubs = [
                scheduler_pb2_grpc.SchedulerStub(left.enter_context(server.connect()))
                for server in self.servers()
            ]
            for stub in stubs:
                stub.Schedule(request, timeout=CALL_S)
            for k in range(calls):
                for which in (0, 1) if k % 2 else (1, 0):
                    started_s = time.perf_counter()
                    stubs[which].Schedule(request, timeout=CALL_S)
                    took[which].append(time.perf_counter() - started_s)
        return took

    def time_submissions(self, jobs: Sequence[jobs_pb2.Job], turns: int) -> tuple[float, float]:
        """Return the seconds in which each server takes ``turns`` times these jobs, one in a call.

        Several threads submit, each on a connection of its own, and the servers take turns.
        """
        took = [0.0, 0.0]
        with ExitStack() as left:
            pool = left.enter_context(ThreadPoolExecutor(THREADS))
            stubs = [
                [
                    jobs_pb2_grpc.JobsStub(left.enter_context(server.connect()))
                    for _ in range(THREADS)
                ]
                for server in self.servers()
            ]
            for turn in range(2 * turns + 2):
                which = (turn + turn // 2) % 2
                started_s = time.perf_counter()
                list(pool.map(_submit, cycle(stubs[which]), jobs))
                if turn >= 2:  # the first turns open the connections
                    took[which] += time.perf_counter() - started_s
        return took[0], took[1]

    def time_enrolments(self, agents: int) -> tuple[float, ChannelSettings]:
        """Return the seconds of enrolling agents from several threads, and what the last one got.

        Their keys are made before.
        """
        text = self._create_join_token(agents)
        keys = [make_key(f"agent-{k}") for k in range(agents)]
        anonymous = ChannelSettings(authorities=self.secure.channel.authorities)
        server = CalledServer(address=self.secure.address, channel=anonymous)
        with ExitStack() as left:
            pool = left.enter_context(ThreadPoolExecutor(THREADS))
            stubs = [
                agents_pb2_grpc.AgentsStub(left.enter_context(server.connect()))
                for _ in range(THREADS)
            ]

            def enrol(stub: agents_pb2_grpc.AgentsStub, number: int) -> agents_pb2.EnrolResponse:
                request = agents_pb2.EnrolRequest(
                    parent=PARENT,
                    agent_id=f"agent-{number}",
                    nodes=[f"node-{number}"],
                    join_token=text,
                    signing_request=keys[number].signing_request,
                )
                return stub.Enrol(request, timeout=CALL_S)

            started_s = time.perf_counter()
            answers = list(pool.map(enrol, cycle(stubs), range(agents)))
            took_s = time.perf_counter() - started_s
        return took_s, self._write_identity(keys[-1], answers[-1])

    def time_first_calls(
        self, connections: int, certificate: ChannelSettings
    ) -> dict[str, list[float]]:
        """Return the seconds from opening a connection to the answer of a small call, by kind.

        ``certificate`` is what an agent shows.
        """
        host, _, port = self.secure.address.rpartition(":")
        servers = {
            "plain": self.plain,
            "token": self.secure,
            "certificate": CalledServer(address=f"{host}:{int(port) + 1}", channel=certificate),
        }
        took: dict[str, list[float]] = {kind: [] for kind in servers}
        for _ in range(connections):
            for kind, server in servers.items():
                started_s = time.perf_counter()
                with server.connect() as channel:
                    stub = access_pb2_grpc.AccessStub(channel)
                    stub.GetCaller(access_pb2.GetCallerRequest(), timeout=CALL_S)
                    took[kind].append(time.perf_counter() - started_s)
        return took

    def _create_join_token(self, uses: int) -> str:
        request = access_pb2.CreateJoinTokenRequest(
            parent=PARENT, join_token=access_pb2.JoinToken(nodes=["node-*"], uses=uses)
        )
        with self.secure.connect() as channel:
            return access_pb2_grpc.AccessStub(channel).CreateJoinToken(request).text

    def _write_identity(self, key: NewKey, answer: agents_pb2.EnrolResponse) -> ChannelSettings:
        certificate, secret = self.folder / "agent.pem", self.folder / "agent.key"
        write_public(certificate, answer.certificate.encode())
        write_private(secret, key.key.encode())
        return ChannelSettings(
            authorities=self.secure.channel.authorities, certificate=certificate, key=secret
        )


def _submit(stub: jobs_pb2_grpc.JobsStub, job: jobs_pb2.Job) -> None:
    stub.SubmitJob(
        jobs_pb2.SubmitJobRequest(parent=PARENT, job=job, request_id=str(uuid.uuid4())),
        timeout=CALL_S,
    )


@contextmanager
def run_pair(report: Callable[[str], None]) -> Iterator[SecurePair]:
    """Start a database and both servers; end them after the block."""
    with ExitStack() as left:
        folder = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="tessera-tls-")))
        make_authority(folder / "tls", ["127.0.0.1"])
        plain = left.enter_context(run_stack(report=report))
        secure = left.enter_context(
            run_stack(report=report, database_url=plain.database_url, tls=folder / "tls")
        )
        yield SecurePair(
            plain=CalledServer(address=plain.addresses[0], channel=plain.channel),
            secure=CalledServer(address=secure.addresses[0], channel=secure.channel),
            stack=plain,
            folder=folder,
        )
