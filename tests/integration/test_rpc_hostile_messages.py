"""Hostile messages to every method over a real socket.

Each gets an answer, or a canonical error other than INTERNAL and UNKNOWN, in bounded time. The
server continues to serve, and the stored data stays valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Final

import grpc.aio
import numpy as np
import pytest
import sqlalchemy as sa
from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode

from tessera.db.access_store import PostgresAccessStore
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.service.rpc.servicers import SERVICES
from tessera.v1 import (
    access_pb2,
    agents_pb2,
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    networks_pb2,
    scheduler_pb2,
    tenants_pb2,
)
from tests.support.api import (
    Api,
    a_cell,
    a_cluster,
    a_submit,
    some_cells,
    some_nodes,
)
from tests.support.laws import TIER
from tests.support.logged import logged_lines
from tests.support.messages import broken_bytes, mutate, random_message
from tests.support.patience import PATIENCE_S
from tests.support.rpc import CLIENTS_OWN_ERROR, error_details, serving
from tests.support.valid_requests import valid_requests

EXAMPLES: Final = {"quick": 1, "full": 4, "night": 36, "explore": 400}[TIER]
"""The number of messages of each sort for each method."""
SEED: Final = int(os.environ.get("HOSTILE_SEED", "0"))
MODULES: Final = (
    access_pb2,
    agents_pb2,
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    networks_pb2,
    scheduler_pb2,
    tenants_pb2,
)
METHODS: Final[dict[str, MethodDescriptor]] = {
    f"/{service.full_name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
WRONG: Final = frozenset({StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.DEADLINE_EXCEEDED})


def test_every_method_has_a_valid_request_here() -> None:
    assert {name.rpartition("/")[2] for name in METHODS} == set(valid_requests())
    others = {"tessera.v1.Webhooks"}  # the benchmark of hostile clients calls it
    assert {name.split("/")[1] for name in METHODS} == set(SERVICES) - others


async def call_raw(channel: Any, path: str, messages: list[bytes]) -> StatusCode:
    """Make a call with raw bytes, and return its code. For a watched job, the first answer is enough."""
    method = METHODS[path]
    if method.client_streaming:
        return await _stream(channel.stream_stream(path)(timeout=PATIENCE_S), path, messages)
    try:
        if not method.server_streaming:
            await channel.unary_unary(path)(messages[0], timeout=PATIENCE_S)
            return StatusCode.OK
        answers = channel.unary_stream(path)(messages[0], timeout=PATIENCE_S)
        async for _ in answers:
            answers.cancel()
            break
    except grpc.aio.AioRpcError as error:
        _check_error(path, error)
        return error.code()
    return StatusCode.OK


async def _stream(stream: Any, path: str, messages: list[bytes]) -> StatusCode:
    """Send messages until the server ends the stream or no message is left, and return its code."""
    # The errors mean that the server has ended the stream.
    ended = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
    with contextlib.suppress(*ended):
        for message in messages:
            await stream.write(message)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            continue
    code: StatusCode = await stream.code()
    details = await stream.details()
    # The server ended the stream first. Its log says how, which the test checks at its end.
    if details == CLIENTS_OWN_ERROR:
        return StatusCode.CANCELLED
    assert code not in WRONG, (path, code, details)
    return code


def _check_error(path: str, error: grpc.aio.AioRpcError) -> None:
    assert error.code() not in WRONG, (path, error.code(), error.details())
    info, _ = error_details(error)
    assert info.domain == "tessera"
    assert info.reason


async def make_resources(api: Api, channel: grpc.aio.Channel) -> None:
    """Create the resources of the valid requests, such as a cluster, a job, a round and a topology."""
    await api.clusters.UpsertCluster(a_cluster("a100", "v100"))
    await api.clusters.UpsertNodes(some_nodes("n1", "n2"))
    await api.estimates.UpsertCells(some_cells(a_cell(1), a_cell(8)))
    await api.jobs.SubmitJob(a_submit())
    for name in ("UpdateTopology", "UpsertTenants", "Schedule"):
        path = next(path for path in METHODS if path.endswith(f"/{name}"))
        (request,) = valid_requests()[name]
        assert await call_raw(channel, path, [request.SerializeToString()]) is StatusCode.OK


MIXED_JOBS: Final = """
SELECT a.job_id FROM allocations a JOIN nodes n ON n.id = a.node_id
GROUP BY a.job_id, a.generation HAVING count(DISTINCT n.gpu_type_id) > 1
"""
HELD_TWICE: Final = """
SELECT node_id, gpu FROM allocations WHERE hold IN ('held', 'releasing')
GROUP BY node_id, gpu HAVING count(*) > 1
"""
REALS: Final = """
SELECT table_name, column_name FROM information_schema.columns
WHERE table_schema = 'public' AND data_type = 'double precision'
"""


def check_rows(database: Database) -> None:
    """Check all stored rows as far as SQL can."""
    with database.engine.connect() as connection:
        for query in (MIXED_JOBS, HELD_TWICE):
            assert not connection.execute(sa.text(query)).all(), query
        for table, column in connection.execute(sa.text(REALS)).all():
            query = f"SELECT count(*) FROM {table} WHERE {column} = 'NaN'"
            assert not connection.execute(sa.text(query)).scalar_one(), (table, column)


async def check_service(channel: Any) -> None:
    """Check that the server still serves, and can read everything that is stored."""
    for name in (
        "ListClusters",
        "ListNodes",
        "ListCells",
        "ListModels",
        "ListJobs",
        "ListRounds",
        "ListTenants",
        "GetTopology",
        "GetCluster",
    ):
        path = next(path for path in METHODS if path.endswith(f"/{name}"))
        (request,) = valid_requests()[name]
        code = await call_raw(channel, path, [request.SerializeToString()])
        assert code in (StatusCode.OK, StatusCode.NOT_FOUND), (name, code)


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.rpartition("/")[2])
async def test_hostile_messages_are_answered_and_do_no_harm(
    store: PostgresStore, database: Database, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS[path]
    rng = np.random.default_rng([SEED, *path.encode()])
    access = PostgresAccessStore(database)
    async with serving(store, default_deadline_s=20.0, access=access) as (channel, _):
        await make_resources(Api(channel), channel)
        for _ in range(EXAMPLES):
            valid = valid_requests()[method.name]
            at = int(rng.integers(len(valid)))
            for sort in (
                random_message(method.input_type, rng),
                mutate(valid[at], rng),
                mutate(valid[at], rng, most=1),
            ):
                messages = [*valid[:at], sort, *valid[at + 1 :]]
                await call_raw(channel, path, [message.SerializeToString() for message in messages])
            raw = [message.SerializeToString() for message in valid]
            raw[at] = broken_bytes(valid[at], rng)
            await call_raw(channel, path, raw)
        await check_service(channel)
    await asyncio.to_thread(check_rows, database)
    assert not logged_lines(caplog, "rpc_failed")
