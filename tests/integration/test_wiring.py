"""The parts together, as `tessera serve` runs them: notifications, periodic rounds, an address in use."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc.aio
import pytest

from tessera.db import embedded
from tessera.db.engine import Database, connect_database
from tessera.db.migrate import upgrade_schema
from tessera.db.store import PostgresStore
from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.service import embedded_watch
from tessera.service.loop import RoundLoop
from tessera.service.periodic import PeriodicRounds
from tessera.service.rpc.calls import Calls
from tessera.service.wiring import run_server
from tessera.solvers.rounds.plan import RoundOptions
from tessera.v1 import (
    agents_pb2,
    agents_pb2_grpc,
    clusters_pb2,
    clusters_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tests.support.data_directories import MakeDataDirectory
from tests.support.hand_clock import HandClock
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.running_server import a_cluster, channel_to, settings
from tests.support.system import kill_postgres

HELLO = agents_pb2.AgentMessage(
    hello=agents_pb2.Hello(
        parent="clusters/c",
        agent_id="a",
        incarnation="1",
        nodes=[agents_pb2.AgentNode(node="n", gpu_type="a100", gpus=8)],
    )
)


async def test_a_round_at_one_replica_notifies_a_watcher_and_an_agent_at_another(
    database: Database, store: PostgresStore
) -> None:
    a_cluster(store)
    config = settings(database)
    async with channel_to(config) as first, channel_to(config) as second:
        call = agents_pb2_grpc.AgentsStub(first).Sync()
        await call.write(HELLO)
        assert cast(agents_pb2.ServerMessage, await call.read()).HasField("welcome")
        assert not cast(agents_pb2.ServerMessage, await call.read()).desired.gangs
        request = jobs_pb2.WatchJobRequest(name="clusters/c/jobs/j")
        watch = jobs_pb2_grpc.JobsStub(first).WatchJob(request)
        assert cast(jobs_pb2.Job, await watch.read()).state == jobs_pb2.QUEUED
        await scheduler_pb2_grpc.SchedulerStub(second).Schedule(
            scheduler_pb2.ScheduleRequest(parent="clusters/c"), timeout=PATIENCE_S
        )
        async with asyncio.timeout(PATIENCE_S):
            assert cast(jobs_pb2.Job, await watch.read()).state == jobs_pb2.STARTING
            desired = cast(agents_pb2.ServerMessage, await call.read()).desired
        assert [gang.job for gang in desired.gangs] == ["j"]
        watch.cancel()
        await call.done_writing()


async def test_an_address_in_use_is_an_error(database: Database) -> None:
    async with run_server(settings(database)) as port:
        with pytest.raises(InvalidInput, match="another program may use it"):
            async with run_server(settings(database, listen=f"127.0.0.1:{port}")):
                raise AssertionError("two servers on one port")


@asynccontextmanager
async def a_replica(
    store: PostgresStore, clock: HandClock, holder: str
) -> AsyncIterator[PeriodicRounds]:
    calls, round_calls = Calls(1, "store"), Calls(1, "round")
    periodic = PeriodicRounds(
        store,
        RoundLoop(store, clock),
        clock,
        calls=calls,
        round_calls=round_calls,
        holder=holder,
        spacing_s=3.0,
        period_s=300.0,
        deadline_s=60.0,
    )
    yield periodic
    await periodic.stop()
    await asyncio.gather(calls.close(), round_calls.close())


async def test_one_replica_commits_one_round_in_each_period(store: PostgresStore) -> None:
    clock = HandClock()
    a_cluster(store, "c")
    a_cluster(store, "d")

    async def rounds_after_ticks() -> list[int]:
        for replica in (first, second):
            await replica.tick()
            await asyncio.gather(*replica.begun())
        return [len(store.list_rounds(cluster, 0, 100)) for cluster in ("c", "d")]

    async with a_replica(store, clock, "one") as first, a_replica(store, clock, "other") as second:
        assert await rounds_after_ticks() == [1, 1]
        clock.now_s += 299.0
        assert await rounds_after_ticks() == [1, 1]
        clock.now_s += 2.0
        assert await rounds_after_ticks() == [2, 2]


async def test_a_requested_round_restarts_the_period(store: PostgresStore) -> None:
    clock = HandClock()
    a_cluster(store)
    async with a_replica(store, clock, "one") as replica:
        await replica.tick()
        await asyncio.gather(*replica.begun())
        clock.now_s += 200.0
        loop = RoundLoop(store, clock)
        await asyncio.to_thread(_schedule_round, loop)
        for step_s in (1.0, 298.0):
            clock.now_s += step_s
            await replica.tick()
            await asyncio.gather(*replica.begun())
            assert len(store.list_rounds("c", 0, 100)) == 2
        clock.now_s += 2.0
        await replica.tick()
        await asyncio.gather(*replica.begun())
        assert len(store.list_rounds("c", 0, 100)) == 3


def _schedule_round(rounds: RoundLoop) -> None:
    rounds.schedule(
        "c",
        RoundOptions(),
        remaining_s=lambda: 60.0,
        dry_run=False,
        request=None,
        cancelled=lambda: False,
    )


async def test_an_unreachable_store_is_logged_once_and_not_at_each_tick(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks, enough = 0, asyncio.Event()

    async def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks >= 6:
            enough.set()
        if ticks != 4:
            raise Unavailable("no database")

    async with a_replica(store, HandClock(), "one") as replica:
        monkeypatch.setattr(replica, "tick", tick)
        monkeypatch.setattr(replica, "_tick_s", 0.0)
        replica.start()
        async with asyncio.timeout(PATIENCE_S):
            await enough.wait()
    lines = logged_lines(caplog, "rounds_not_begun")
    # There is a warning before and after the fourth tick, which succeeds.
    assert [line.partition("error=")[2] for line in lines] == ['"no database"'] * 2


async def test_a_server_starts_its_embedded_database_again(
    make_data_directory: MakeDataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_watch, "WATCH_S", 0.05)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = make_data_directory(Path(folder) / "pg")
        database = connect_database(directory=place)
        await asyncio.to_thread(upgrade_schema, database)
        config = replace(settings(database), database_url="", database_directory=str(place))
        async with channel_to(config) as channel:
            stub, request = (
                clusters_pb2_grpc.ClustersStub(channel),
                clusters_pb2.ListClustersRequest(),
            )
            await stub.ListClusters(request)
            killed = embedded.find_process(place)
            await asyncio.to_thread(kill_postgres, place)
            refusals, answered = list[grpc.aio.AioRpcError](), False
            async with asyncio.timeout(PATIENCE_S):
                while not answered:
                    try:
                        await stub.ListClusters(request)
                        answered = True
                    except grpc.aio.AioRpcError as error:
                        refusals.append(error)
            assert {error.code() for error in refusals} <= {grpc.StatusCode.UNAVAILABLE}
            assert not [e for e in refusals if "TESSERA_DATABASE_URL" in (e.details() or "")]
            assert embedded.find_process(place) != killed
        database.engine.dispose()
        await asyncio.to_thread(embedded.stop_server, place)
