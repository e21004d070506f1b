"""A temporary Tessera for the demo and benchmarks: a database, server processes and stubs."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.client import PLAIN_TEXT, ChannelSettings, open_channel
from tessera.db.schema import embedded
from tessera.db.schema.engine import connect_database
from tessera.db.schema.migrate import upgrade_schema
from tessera.service.cli.servers.database import store_admin_token
from tessera.v1 import clusters_pb2_grpc, estimates_pb2_grpc, jobs_pb2_grpc, scheduler_pb2_grpc

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
]


TOKEN_S: Final = 86_400.0
"""The lifetime in seconds of the administrator's token of a temporary Tessera."""


@dataclass(slots=True, kw_only=True)
class ServerProcess:
    """A server process with its own address. It may be killed and started again."""

    address: str
    log: Path
    environment: Mapping[str, str]
    period_s: float = 0.0
    channel: ChannelSettings = PLAIN_TEXT
    """What a channel to the server needs."""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Start the server."""
        self.start()

    def start(self) -> None:
        """Start the process. ``wait`` returns once it serves."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tessera.service.cli.main",
                    "serve",
                    "--listen",
                    self.address,
                    "--period",
                    f"{self.period_s:g}s",
                ],
                env={**os.environ, **self.environment},
                stdout=out,
                stderr=out,
            )

    def wait(self) -> None:
        """Wait until the server serves. Raises RuntimeError."""
        with open_channel(self.address, self.channel, CHANNEL_OPTIONS) as channel:
            _wait_until_serving(channel, self.process, self.log)

    def kill(self) -> None:
        """Kill the process immediately, without any cleanup."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the process gracefully, or kill it after 20 s."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running Tessera and its stubs, which call the first of the servers."""

    servers: tuple[ServerProcess, ...]
    database_url: str
    folder: Path
    jobs: jobs_pb2_grpc.JobsStub
    clusters: clusters_pb2_grpc.ClustersStub
    estimates: estimates_pb2_grpc.EstimatesStub
    scheduler: scheduler_pb2_grpc.SchedulerStub
    channel: ChannelSettings = PLAIN_TEXT
    """What a channel to the servers needs."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the replicas."""
        return tuple(server.address for server in self.servers)


def _say_nothing(_step: str) -> None:
    return None


@contextmanager
def run_stack(
    replicas: int = 1,
    settings: Mapping[str, str] | None = None,
    report: Callable[[str], None] = _say_nothing,
    database_url: str = "",
    tls: Path | None = None,
    period_s: float = 0.0,
) -> Iterator[Stack]:
    """Start a database and servers in a temporary folder; stop and remove them at the end.

    ``settings`` adds to the servers' environment, e.g. ``{"TESSERA_LEASE_S": "6"}``. ``report`` is
    called with each step as it begins. If ``period_s`` is 0, rounds run only on request, and
    otherwise also after events. If ``database_url`` is not "", it names a migrated database
    to use instead of a new one.
    With ``tls``, a directory of ``tessera ca init`` for 127.0.0.1 and the addresses after it, the
    servers use TLS and the stubs have an administrator's token. Each server then has an address of
    its own, because agents expect all servers to listen for them on the same port.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-bench-")))
        url = database_url
        if not url:
            report("starting PostgreSQL")
            url = embedded.start_server(folder / "pg")
            stack.callback(embedded.stop_server, folder / "pg")
            upgrade_schema(connect_database(url))
        report("starting a server; the first start on a machine compiles code for up to a minute")
        servers, channel_settings = [], PLAIN_TEXT
        environment = {"TESSERA_DATABASE_URL": url, **(settings or {})}
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(replicas)]
        if tls is not None:
            environment["TESSERA_TLS_DIRECTORY"] = str(tls)
            database = connect_database(url)
            stack.callback(database.engine.dispose)
            token = store_admin_token(database, "stack", TOKEN_S)
            channel_settings = ChannelSettings(authorities=str(tls / "ca.pem"), token=token)
            port = free_ports([f"127.0.0.{k + 1}" for k in range(replicas)])
            addresses = [f"127.0.0.{k + 1}:{port}" for k in range(replicas)]
        for k, address in enumerate(addresses):
            server = ServerProcess(
                address=address,
                log=folder / f"server-{k}.log",
                environment=environment,
                period_s=period_s,
                channel=channel_settings,
            )
            stack.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.wait()
        channel = stack.enter_context(
            open_channel(servers[0].address, channel_settings, CHANNEL_OPTIONS)
        )
        yield Stack(
            servers=tuple(servers),
            database_url=url,
            folder=folder,
            jobs=jobs_pb2_grpc.JobsStub(channel),
            clusters=clusters_pb2_grpc.ClustersStub(channel),
            estimates=estimates_pb2_grpc.EstimatesStub(channel),
            scheduler=scheduler_pb2_grpc.SchedulerStub(channel),
            channel=channel_settings,
        )


def free_port() -> int:
    """Return a TCP port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(hosts: Sequence[str]) -> int:
    """Return a TCP port that was free a moment ago on all hosts, as was the next one."""
    while True:
        port = free_port()
        try:
            for host, number in itertools.product(hosts, (port, port + 1)):
                with socket.socket() as probe:
                    probe.bind((host, number))
        except (OSError, OverflowError):  # taken, or beyond the last port
            continue
        return port


def _wait_until_serving(
    channel: grpc.Channel, process: subprocess.Popen[bytes], log: Path, limit_s: float = 600.0
) -> None:
    stub, until = health_pb2_grpc.HealthStub(channel), time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
