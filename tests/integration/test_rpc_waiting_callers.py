"""Callers that wait for one cluster's row delay neither the callers nor the agents of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.v1 import agents_pb2, agents_pb2_grpc, estimates_pb2, jobs_pb2, jobs_pb2_grpc
from tests.support.agents import until
from tests.support.patience import PATIENCE_S
from tests.support.rpc import serving
from tests.support.stored_cluster import BERT, C, a_cluster

CROWDED, CALLERS = "crowded", 40


@asynccontextmanager
async def hold_cluster_row(database: Database, cluster: str) -> AsyncIterator[None]:
    """Hold a cluster's row, as a slow transaction does."""
    with database.engine.connect() as connection, connection.begin():
        lock = sa.text("SELECT 1 FROM clusters WHERE name = :name FOR UPDATE")
        await asyncio.to_thread(connection.execute, lock, {"name": cluster})
        yield


def count_waiting(database: Database) -> int:
    """Return the number of transactions that wait for a lock."""
    question = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with database.engine.connect() as connection:
        return int(connection.execute(question).scalar_one())


def a_job(cluster: str) -> jobs_pb2.SubmitJobRequest:
    workload = estimates_pb2.Workload(
        model=BERT.model, params=BERT.params, global_batch=BERT.global_batch
    )
    job = jobs_pb2.Job(workload=workload, iterations=10, requested_gpus=1)
    return jobs_pb2.SubmitJobRequest(parent=f"clusters/{cluster}", job=job)


async def join_agent(channel: grpc.aio.Channel, cluster: str, node: str) -> Any:
    """Open an agent's stream, and say hello."""
    stub: Any = agents_pb2_grpc.AgentsStub(channel)
    call = stub.Sync()
    hello = agents_pb2.Hello(
        parent=f"clusters/{cluster}",
        agent_id=f"agent-{node}",
        incarnation="1",
        nodes=[agents_pb2.AgentNode(node=node, gpu_type="a100", gpus=4)],
    )
    await call.write(agents_pb2.AgentMessage(hello=hello))
    return call


@pytest.fixture
async def channel(store: PostgresStore) -> AsyncIterator[grpc.aio.Channel]:
    a_cluster(store)
    a_cluster(store, name=CROWDED)
    async with serving(store, store_threads=4, lease_s=6.0, heartbeat_s=1.0, margin_s=3.0) as (
        channel,
        _,
    ):
        yield channel


async def test_callers_waiting_for_one_cluster_leave_threads_to_others(
    channel: grpc.aio.Channel, database: Database
) -> None:
    jobs = jobs_pb2_grpc.JobsStub(channel)
    async with hold_cluster_row(database, CROWDED):
        crowd = [asyncio.ensure_future(jobs.SubmitJob(a_job(CROWDED))) for _ in range(CALLERS)]
        await until(lambda: count_waiting(database))
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await jobs.SubmitJob(a_job(C))
        assert not any(call.done() for call in crowd)
    await asyncio.gather(*crowd)


async def test_agents_waiting_for_one_cluster_cost_no_other_agent_its_lease(
    channel: grpc.aio.Channel, store: PostgresStore, database: Database
) -> None:
    async with AsyncExitStack() as left, hold_cluster_row(database, CROWDED):
        crowd = [await join_agent(channel, CROWDED, f"forged-{k}") for k in range(CALLERS)]
        for call in crowd:
            left.callback(call.cancel)
        async with asyncio.timeout(PATIENCE_S):
            call = await join_agent(channel, C, "late")
            left.callback(call.cancel)
            assert (await call.read()).HasField("welcome")
        before = await until(lambda: store.get_node(C, "late").silent_s)
        await until(lambda: store.get_node(C, "late").silent_s > before + 1.0)
        await call.write(agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(), said_s=5.0))
        await until(lambda: store.get_node(C, "late").silent_s < before + 1.0)
