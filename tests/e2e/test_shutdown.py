"""A server ends within its grace, whatever its threads do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.store import Store
from tessera.formulation.base.values import GpuType
from tessera.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.patience import PATIENCE_S

GRACE_S = 1.0

SERVER = """
import asyncio, logging, sys, threading
from tessera.db.store.store import Store
from tessera.formulation.base.logs import make_handler
from tessera.service.server import wiring
from tessera.service.server.settings.config import Config

def wait_for_ever(self, cluster, use_half_life_s):
    print("begun", flush=True)
    threading.Event().wait()

Store.snapshot = wait_for_ever
logging.basicConfig(handlers=[make_handler()])
config = Config(
    listen="127.0.0.1:0", database_url=sys.argv[1], period_s=0.0, grace_s=%r, estimate_cells=False
)
asyncio.run(wiring.serve_until_signal(config, lambda port: print(port, flush=True)))
"""


@contextmanager
def a_server(database: Database, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER % GRACE_S, database.url],
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
        )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, log.read_text()
        yield process, f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def test_a_stuck_thread_does_not_keep_the_process_alive(
    database: Database, store: Store, tmp_path: Path
) -> None:
    store.change(upsert_cluster, "c", [GpuType(name="a100", memory_bytes=2**35)], None)
    log = tmp_path / "log"
    with a_server(database, log) as (process, address), grpc.insecure_channel(address) as channel:
        stub, request = scheduler_pb2_grpc.SchedulerStub(channel), scheduler_pb2.ScheduleRequest
        call = stub.Schedule.future(
            request(parent="clusters/c", dry_run=True), timeout=2 * PATIENCE_S
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert not call.done()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        (line,) = [line for line in log.read_text().splitlines() if " calls_abandoned " in line]
        assert line.endswith(' calls="Schedule of c"')
