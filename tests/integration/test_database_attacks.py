"""A database that is stopped, full, out of connections, restarted under load or restored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import grpc.aio
import psutil
import psycopg2
import pytest
import sqlalchemy as sa
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema import embedded, migrate, pgserver
from tessera.db.schema.engine import Database, connect_database
from tessera.db.store.reads import get_cluster, list_jobs
from tessera.db.store.store import Connection, Store
from tessera.formulation.base.errors import TesseraError, Unavailable
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.store import Request
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server
from tessera.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.support.embedded_places import folder, new_place, place
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    commit,
    job,
    run,
    start,
    submit,
)
from tests.support.waiting import until

__all__ = ["folder", "new_place", "place"]  # fixtures

MOUNT_MIB = 192


def connect_migrated(url: str) -> Database:
    database = connect_database(url)
    migrate.upgrade_schema(database)
    return database


def freeze_server(place: Path) -> list[psutil.Process]:
    """Suspend every process of the server, and return them.

    The first one is suspended before the others are listed, so that it starts no further one.
    """
    first = psutil.Process(int((place / "postmaster.pid").read_text().split()[0]))
    first.suspend()
    until(lambda: first.status() == psutil.STATUS_STOPPED, "the database is as expected")
    others = first.children(recursive=True)
    for process in others:
        process.suspend()
    return [first, *others]


@contextlib.contextmanager
def stop_server(place: Path) -> Iterator[None]:
    """Suspend every process of the server inside the block."""
    frozen = freeze_server(place)
    try:
        yield
    finally:
        for process in frozen:
            process.resume()


async def until_health_is(stub: health_pb2_grpc.HealthStub, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await stub.Check(health_pb2.HealthCheckRequest())).status != status:
            await asyncio.sleep(0.05)


async def test_a_stopped_database_is_reported_and_delays_no_call_with_a_deadline(
    place: Path,
) -> None:
    database = connect_migrated(embedded.start_server(place))
    store = Store(database)
    a_cluster(store)
    submit(store, a_spec("a"))
    config = Config(
        listen="127.0.0.1:0",
        database_url=database.url,
        period_s=0.0,
        health_period_s=0.5,
        estimate_cells=False,
        heartbeat_s=0.5,
    )
    answers = health_pb2.HealthCheckResponse
    async with (
        run_server(config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        jobs, health = jobs_pb2_grpc.JobsStub(channel), health_pb2_grpc.HealthStub(channel)
        stream = agents_pb2_grpc.AgentsStub(channel).Sync()
        node = agents_pb2.AgentNode(node="new", gpu_type="a100", gpus=4)
        hello = agents_pb2.Hello(
            parent=f"clusters/{C}", agent_id="new", incarnation="1", nodes=[node]
        )
        await stream.write(agents_pb2.AgentMessage(hello=hello))
        welcome = await stream.read()
        assert isinstance(welcome, agents_pb2.ServerMessage)
        assert welcome.HasField("welcome")
        request = jobs_pb2.GetJobRequest(name=f"clusters/{C}/jobs/a")
        with stop_server(place):
            await until_health_is(health, answers.NOT_SERVING)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await jobs.GetJob(request, timeout=1.0)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_health_is(health, answers.SERVING)
        assert (await jobs.GetJob(request, timeout=PATIENCE_S)).state == jobs_pb2.QUEUED
        await stream.write(agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat()))
        async with asyncio.timeout(PATIENCE_S):
            message = await stream.read()
        assert isinstance(message, agents_pb2.ServerMessage)  # the stream has outlived the outage
        assert message.HasField("desired")
        stream.cancel()
    database.engine.dispose()


def test_a_database_without_a_free_connection_is_reported_and_used_again_later(place: Path) -> None:
    url = embedded.start_server(place)
    database = connect_migrated(url)
    store = Store(database)
    a_cluster(store)
    database.engine.dispose()
    hogs = []
    with contextlib.suppress(psycopg2.OperationalError):
        while True:
            hogs.append(psycopg2.connect(url))
    with pytest.raises(Unavailable, match="has no connection left; close some, raise its max_conn"):
        store.read(get_cluster, C)
    for hog in hogs:
        hog.close()
    until(lambda: is_available(lambda: store.read(get_cluster, C)), "the database is as expected")
    assert store.read(get_cluster, C).name == C
    database.engine.dispose()


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a separate, small file system."""
    disk = folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_MIB}m,mode=0711", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield disk
    embedded.stop_server(disk / "pg")
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_database_disk_is_reported_and_the_service_continues_once_there_is_room(
    small_disk: Path,
) -> None:
    place = small_disk / "pg"
    database = connect_migrated(embedded.start_server(place))
    store = Store(database)
    a_cluster(store)
    ballast, acknowledged, errors = small_disk / "ballast", [], []
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 18))
    for number in range(400):
        name = f"job-{number}"
        try:
            submit(store, a_spec(name, command=("x" * 60_000,)))
            acknowledged.append(name)
        except TesseraError as error:
            errors.append(error)
            break
    assert errors, "the disk was never full"
    assert isinstance(errors[0], Unavailable)
    ballast.unlink()
    embedded.start_server(place)  # the server may have stopped when it could not write its log
    until(
        lambda: is_available(lambda: submit(store, a_spec("after"))), "the database is as expected"
    )
    stored = {j.spec.name for j in store.read(list_jobs, C, [], 0, 1000)[0]}
    assert stored >= {*acknowledged, "after"}
    assert stored <= {*acknowledged, "after", f"job-{len(acknowledged)}"}
    database.engine.dispose()


def test_a_database_restarted_hard_under_load_loses_and_duplicates_nothing(place: Path) -> None:
    database = connect_migrated(embedded.start_server(place))
    store = Store(database)
    a_cluster(store)
    over, acknowledged, failures, unexpected = threading.Event(), [], [], []

    def load(worker: int) -> None:
        for number in range(100_000):
            if over.is_set():
                return
            name, request = f"w{worker}-{number}", Request(id=str(uuid4()), method="m", digest="d")
            while True:  # a client repeats a call with the same request id
                try:
                    store.write(request, partial(_submit, name=name))
                    acknowledged.append(name)
                    break
                except Unavailable as error:
                    failures.append(error)
                    over.wait(0.05)
                except TesseraError as error:
                    unexpected.append(error)
                    return

    workers = [threading.Thread(target=load, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for how in ("immediate", "fast", "immediate"):
        wait_for_more(acknowledged)
        pgserver.stop_server(place, [how])
        embedded.start_server(place)
    wait_for_more(acknowledged)
    over.set()
    for worker in workers:
        worker.join()
    assert unexpected == []
    assert failures, "no call was interrupted"
    names = [j.spec.name for j in store.read(list_jobs, C, [], 0, 10_000)[0]]
    assert sorted(names) == sorted(acknowledged)
    database.engine.dispose()


def _submit(connection: Connection, name: str) -> bytes:
    submit_jobs(connection, C, [a_spec(name)])
    return b"done"


def wait_for_more(acknowledged: list[str]) -> None:
    """Wait until twenty more calls have been acknowledged."""
    enough = len(acknowledged) + 20
    until(lambda: len(acknowledged) >= enough, "the database is as expected")


def is_available(call: Callable[[], object]) -> bool:
    """Make a call, and return whether the database could answer it."""
    try:
        call()
    except Unavailable:
        return False
    return True


HOLDERS = """
    SELECT count(*) FROM (SELECT node_id, gpu FROM allocations WHERE hold IN ('held', 'releasing')
    GROUP BY 1, 2 HAVING count(*) > 1) AS twice
"""


def test_a_database_restored_to_an_older_state_converges_with_its_agents(place: Path) -> None:
    server = embedded.start_server(place)
    admin = sa.create_engine(
        connect_database(server).engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    )

    def copy(source: str, target: str) -> None:
        with admin.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE IF EXISTS {target} WITH (FORCE)"))
            connection.execute(sa.text(f"CREATE DATABASE {target} TEMPLATE {source}"))

    copy("template1", "live")
    url = sa.make_url(server).set(database="live").render_as_string(hide_password=False)
    database = connect_migrated(url)
    store = Store(database)
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[("a100-0", [0])])
    old = store.snapshot(C)
    database.engine.dispose()
    copy("live", "backup")
    snapshot = store.snapshot(C)  # after it, a moves, b takes its place, and c is submitted
    commit(
        store,
        snapshot,
        start(snapshot, "a", [("a100-1", [0])]),
        start(snapshot, "b", [("a100-0", [0])]),
    )
    agents_report(store)
    submit(store, a_spec("c"))
    late = [
        (agent, store.read(load_desired_gangs, C, agent))
        for agent in ("agent-a100-0", "agent-a100-1")
    ]
    database.engine.dispose()
    copy("backup", "live")
    store.ready()

    for agent, desired in late:  # the agents still report the state before the restore
        gangs = [
            ObservedGang(
                job=g.spec.name,
                generation=g.generation,
                node=agent.removeprefix("agent-"),
                phase="running",
                iterations_done=1.0,
            )
            for g in desired.gangs
        ]
        store.update(record_observation, C, agent, "first", gangs, desired.revision)
    assert (job(store, "a").state, job(store, "a").generation) == (JobState.RUNNING, 1)
    agents_report(store)  # the agents follow the restored state
    again = store.snapshot(C)
    assert (again.epoch, again.round_number) == (old.epoch, old.round_number)
    record = commit(store, again, start(again, "b", [("a100-1", [0])]))
    assert record.summary.number == old.round_number
    agents_report(store)
    assert (job(store, "a").state, job(store, "b").state) == (JobState.RUNNING, JobState.RUNNING)
    with database.read() as connection:
        assert connection.execute(sa.text(HOLDERS)).scalar_one() == 0
    database.engine.dispose()
    admin.dispose()
