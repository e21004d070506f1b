"""The parts together, as `tessera serve` runs them: replicas, worker processes, an embedded database."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc.aio
import pytest

from tessera.db.schema import embedded
from tessera.db.schema.engine import Database, connect_database
from tessera.db.schema.migrate import upgrade_schema
from tessera.db.store.store import Store
from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.tasks import embedded_watch
from tessera.service.server.wiring import run_server
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
    database: Database, store: Store
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


async def test_a_round_with_enough_jobs_is_decided_in_a_worker_and_committed_by_the_server(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    async with channel_to(settings(database, solve_process_from_jobs=1)) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        decided = await stub.Schedule(
            scheduler_pb2.ScheduleRequest(parent="clusters/c"),
            timeout=PATIENCE_S,
            wait_for_ready=True,
        )
        again = await stub.ReplayRound(
            scheduler_pb2.ReplayRoundRequest(name=decided.name), timeout=PATIENCE_S
        )
    assert (decided.outcome, decided.waiting) == ("committed", 1)
    assert "transfer" in decided.seconds
    assert again.same_decisions
    assert store.get_round("c", 1).summary.verified
