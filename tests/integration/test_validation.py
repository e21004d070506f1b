"""A call that only validates is the call itself, rolled back: the same refusals, and no change."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc.aio
import numpy as np
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from typer.testing import CliRunner

from tessera.db import limits
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.service.cli import main
from tessera.service.cli.client import Exit
from tessera.service.rpc.servicers import SERVICES
from tessera.service.wiring import run_server
from tessera.v1 import clusters_pb2, clusters_pb2_grpc, webhooks_pb2
from tests.support.api import C, a_cluster, a_node, a_submit, a_tenant, api
from tests.support.database import digest_tables
from tests.support.laws import scaled
from tests.support.messages import mutate
from tests.support.methods import methods_of
from tests.support.patience import PATIENCE_S
from tests.support.rpc import serving
from tests.support.running_server import settings
from tests.support.valid_requests import valid_requests

M = TypeVar("M", bound=Message)

EXAMPLES: Final = scaled(25)
"""The number of changed requests for each method."""

METHODS: Final = {
    path: method
    for path, method in methods_of(*SERVICES).items()
    if "validate_only" in method.input_type.fields_by_name
}
RESOURCES: Final = ("UpsertTenants", "UpdateTopology", "UpsertModels", "SetShadow", "Schedule")
"""The methods whose valid requests make what other requests name."""


def requests_of(name: str) -> list[Message]:
    """Return the valid requests of a method."""
    own = {
        "CreateWebhook": webhooks_pb2.CreateWebhookRequest(
            parent=C, webhook_id="w", webhook=webhooks_pb2.Webhook(url="https://example.com/")
        ),
        "DeleteWebhook": webhooks_pb2.DeleteWebhookRequest(name=f"{C}/webhooks/w"),
    }
    return [own[name]] if name in own else valid_requests()[name]


def changed(request: M, **values: Any) -> M:
    """Return a copy of a request with some fields set."""
    copy = type(request)()
    copy.CopyFrom(request)
    for field, value in values.items():
        copy.ClearField(field)
        copy.MergeFrom(type(request)(**{field: value}))
    return copy


async def outcome(channel: grpc.aio.Channel, path: str, request: Message) -> tuple[StatusCode, str]:
    """Make a call, and return its code and message."""
    answer = GetMessageClass(methods_of(*SERVICES)[path].output_type)
    call: Any = channel.unary_unary(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    try:
        await call(request, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return StatusCode.OK, ""


@pytest.mark.parametrize("path", METHODS)
async def test_a_call_that_is_refused_or_only_validates_changes_nothing(
    store: PostgresStore, database: Database, path: str
) -> None:
    rng, name = np.random.default_rng(zlib.crc32(path.encode())), path.rpartition("/")[2]
    async with api(store) as a, serving(store) as (channel, _):
        await a.clusters.UpsertCluster(a_cluster("a100", "v100"))
        await a.jobs.SubmitJob(a_submit(request_id="used"))
        for made in RESOURCES:
            way = next(way for way in methods_of(*SERVICES) if way.endswith(f"/{made}"))
            for request in valid_requests()[made]:
                assert (await outcome(channel, way, request))[0] is StatusCode.OK
        for valid in requests_of(name):
            requests = [mutate(valid, rng) for _ in range(EXAMPLES)]
            if "request_id" in valid.DESCRIPTOR.fields_by_name:
                requests.append(changed(valid, request_id="used"))
            before = await asyncio.to_thread(digest_tables, database)
            for request in (*requests, valid, valid):
                checked = await outcome(channel, path, changed(request, validate_only=True))
                assert await asyncio.to_thread(digest_tables, database) == before, request
                called = await outcome(channel, path, changed(request, validate_only=False))
                assert checked == called, request
                after = await asyncio.to_thread(digest_tables, database)
                assert called[0] is StatusCode.OK or after == before, request
                before = after


NODE: Final = a_node("n1")
BAD: Final[dict[str, dict[str, Any]]] = {
    "a node of an unknown GPU type": {"nodes": [NODE, a_node("n2", gpu_type="h100")]},
    "a name that no node may have": {"nodes": [NODE, a_node("b 1")]},
    "a node named twice": {"nodes": [NODE, NODE]},
    "a node of another cluster": {"nodes": [clusters_pb2.Node(name="clusters/d/nodes/n1")]},
    "quotas beyond the nodes": {"nodes": [NODE], "tenants": [a_tenant("t", quotas={"a100": 9})]},
    "a tenant named twice": {"nodes": [NODE], "tenants": [a_tenant("t"), a_tenant("t")]},
    "a parent that is missing": {"nodes": [NODE], "tenants": [a_tenant("t", parent="none")]},
}


async def test_a_refused_description_of_a_new_cluster_leaves_nothing_of_it(
    store: PostgresStore, database: Database
) -> None:
    before = await asyncio.to_thread(digest_tables, database)
    path = "/tessera.v1.Clusters/UpsertCluster"
    async with serving(store) as (channel, _):
        for what, described in BAD.items():
            outcomes = {
                await outcome(channel, path, a_cluster(validate_only=validate_only, **described))
                for validate_only in (True, False)
            }
            assert (what, [code for code, _ in outcomes]) == (what, [StatusCode.INVALID_ARGUMENT])
            assert await asyncio.to_thread(digest_tables, database) == before, what


async def test_estimates_that_would_be_too_many_are_refused_by_validation_too(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_ESTIMATES_PER_WORKLOAD", 2)
    path, (request,) = "/tessera.v1.Estimates/EstimateCells", requests_of("EstimateCells")
    async with api(store), serving(store) as (channel, _):
        outcomes = [
            await outcome(channel, path, changed(request, gpus=[2], validate_only=validate_only))
            for validate_only in (True, False)
        ]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] is StatusCode.RESOURCE_EXHAUSTED


async def test_a_cluster_is_created_with_its_nodes_and_tenants(store: PostgresStore) -> None:
    described = a_cluster(nodes=[NODE], tenants=[a_tenant("t", quotas={"a100": 8})])
    async with serving(store) as (channel, _):
        stub = clusters_pb2_grpc.ClustersStub(channel)
        answers = [
            await stub.UpsertCluster(changed(described, validate_only=validate_only))
            for validate_only in (True, False)
        ]
    assert [(answer.nodes, answer.gpus) for answer in answers] == [(1, 8), (1, 8)]
    assert [tenant.quotas for tenant in store.list_tenants("c")] == [{"a100": 8}]


async def test_the_command_that_applies_a_cluster_validates_what_it_would_do(
    database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gpu_types: {a100: 40GiB}\nnodes: [{name: 'b 1', gpu_type: a100, gpus: 8}]\n")
    before = await asyncio.to_thread(digest_tables, database)
    async with run_server(settings(database, estimate_cells=False)) as port:
        words = ["cluster", "apply", "-f", str(file), "--server", f"127.0.0.1:{port}"]
        outputs = []
        for options in (["--validate-only"], []):
            done = await asyncio.to_thread(CliRunner().invoke, main.app, [*words, *options])
            assert done.exit_code == Exit.REFUSED
            outputs.append(done.output)
    assert outputs[0] == outputs[1]
    assert "nodes[0].name" in outputs[0]
    assert await asyncio.to_thread(digest_tables, database) == before
