"""A throw-away Tessera for a benchmark: its own database, a real server process, stubs to call it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from db import embedded
from db.engine import connect
from db.migrate import upgrade
from tessera.v1 import clusters_pb2_grpc, estimates_pb2_grpc, jobs_pb2_grpc, scheduler_pb2_grpc

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running Tessera and its stubs."""

    addresses: tuple[str, ...]  # of the replicas; the stubs call the first
    database_url: str
    folder: Path
    jobs: jobs_pb2_grpc.JobsStub
    clusters: clusters_pb2_grpc.ClustersStub
    estimates: estimates_pb2_grpc.EstimatesStub
    scheduler: scheduler_pb2_grpc.SchedulerStub


@contextmanager
def running(replicas: int = 1) -> Iterator[Stack]:
    """Start a database and servers in a temporary folder; stop and remove them at the end."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                # PostgreSQL stops when this process ends, so it may still write while its files go
                tempfile.TemporaryDirectory(prefix="tessera-bench-", ignore_cleanup_errors=True)
            )
        )
        url = embedded.start(folder / "pg")
        upgrade(connect(url))
        channels = []
        for k in range(replicas):
            address, log = f"127.0.0.1:{free_port()}", folder / f"server-{k}.log"
            process = stack.enter_context(_server(address, url, log))
            channel = stack.enter_context(grpc.insecure_channel(address, options=OPTIONS))
            _wait_until_serving(channel, process, log)
            channels.append((address, channel))
        channel = channels[0][1]
        yield Stack(
            addresses=tuple(address for address, _ in channels), database_url=url, folder=folder,
            jobs=jobs_pb2_grpc.JobsStub(channel),
            clusters=clusters_pb2_grpc.ClustersStub(channel),
            estimates=estimates_pb2_grpc.EstimatesStub(channel),
            scheduler=scheduler_pb2_grpc.SchedulerStub(channel),
        )  # fmt: skip


@contextmanager
def _server(address: str, url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.cli.main", "serve", "--listen", address, "--period", "0"],
            env={**os.environ, "TESSERA_DATABASE_URL": url}, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a TCP port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_serving(
    channel: grpc.Channel, process: subprocess.Popen[bytes], log: Path, limit_s: float = 60.0
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
    raise RuntimeError(f"the server did not come up:\n{log.read_text()[-2000:]}")
