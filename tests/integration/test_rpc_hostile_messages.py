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
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
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
    reservations_pb2,
    scheduler_pb2,
    tenants_pb2,
    what_if_pb2,
)
from tests.support.api import (
    Api,
    C,
    a_batch,
    a_cell,
    a_cluster,
    a_submit,
    a_tenant,
    a_workload,
    some_cells,
    some_nodes,
    some_tenants,
)
from tests.support.launches import WHOLE_MESSAGE
from tests.support.laws import PROFILE
from tests.support.messages import broken_bytes, mutate, random_message
from tests.support.patience import PATIENCE_S
from tests.support.rpc import CLIENTS_OWN_ERROR, error_details, serving

EXAMPLES: Final = {"fast": 4, "full": 36, "explore": 400}[PROFILE]
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
JOB: Final = f"{C}/jobs/j"
CLOS: Final = (
    "{kind: clos, nodes: [n1, n2], host: a100, tors: 1, aggregations: 1, tor_bytes_per_s: 25e9}"
)
MODEL: Final = (
    "{architecture: transformer, layers: 2, hidden: 64, heads: 2, sequence: 8, vocabulary: 99}"
)
WRONG: Final = frozenset({StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.DEADLINE_EXCEEDED})


def valid_requests() -> dict[str, list[Message]]:
    """Return valid requests by the name of their method; streams have the messages of one call."""
    e, j, n, s, t = estimates_pb2, jobs_pb2, networks_pb2, scheduler_pb2, tenants_pb2
    w = what_if_pb2
    quick = s.RoundOptions(solver="greedy", seed=1)
    layer = e.LayerProfile(
        kind="block",
        layers=2,
        samples=1.0,
        tensor_parallel=1,
        forward_s=1e-3,
        backward_s=2e-3,
        method="timed",
        repeats=3,
        device_s=1.0,
    )
    hello = agents_pb2.Hello(
        parent=C,
        agent_id="agent",
        incarnation="first",
        nodes=[agents_pb2.AgentNode(node=node, gpu_type="a100", gpus=8) for node in ("n1", "n2")],
    )
    gang = agents_pb2.ObservedGang(
        job="j",
        generation=1,
        node="n1",
        phase=agents_pb2.ObservedGang.RUNNING,
        iterations_done=5.0,
        iter_time_s=1.0,
        period_s=1.0,
        sent_bytes=9.0,
    )
    observed = agents_pb2.Observed(revision=1, gangs=[gang], network_remarks=["none"])
    token = access_pb2.Token(name="ana", role="user", tenants=["t"], clusters=["c"])
    join_token = access_pb2.JoinToken(nodes=["n*"], uses=2)
    enrol = agents_pb2.EnrolRequest(
        parent=C,
        agent_id="agent",
        nodes=["n1"],
        join_token="tessera_join_" + 12 * "a" + "_" + 43 * "b",
        signing_request="none",
    )
    return {
        "GetCaller": [access_pb2.GetCallerRequest()],
        "GetServer": [access_pb2.GetServerRequest()],
        "GetLogin": [access_pb2.GetLoginRequest()],
        "CreateToken": [access_pb2.CreateTokenRequest(token=token)],
        "ListTokens": [access_pb2.ListTokensRequest(with_ended=True)],
        "RevokeToken": [access_pb2.RevokeTokenRequest(name="ana")],
        "CreateJoinToken": [access_pb2.CreateJoinTokenRequest(parent=C, join_token=join_token)],
        "ListJoinTokens": [access_pb2.ListJoinTokensRequest(parent=C, with_ended=True)],
        "RevokeJoinToken": [access_pb2.RevokeJoinTokenRequest(parent=C, id=12 * "a")],
        "ListCertificates": [access_pb2.ListCertificatesRequest(parent=C)],
        "RevokeAgent": [access_pb2.RevokeAgentRequest(parent=C, agent="agent")],
        "ListAuditEntries": [access_pb2.ListAuditEntriesRequest(target=C, page_size=2)],
        "Enrol": [enrol],
        "RenewCertificate": [agents_pb2.RenewCertificateRequest(signing_request="none")],
        "UpsertCluster": [a_cluster("a100", "v100")],
        "GetCluster": [clusters_pb2.GetClusterRequest(name=C)],
        "ListClusters": [clusters_pb2.ListClustersRequest(page_size=2)],
        "DeleteCluster": [clusters_pb2.DeleteClusterRequest(name=C, validate_only=True)],
        "DeleteGpuTypes": [
            clusters_pb2.DeleteGpuTypesRequest(
                parent=C, gpu_types=["v100"], allow_missing=True, validate_only=True
            )
        ],
        "DeleteNode": [clusters_pb2.DeleteNodeRequest(name=f"{C}/nodes/n2", validate_only=True)],
        "DeleteNodes": [
            clusters_pb2.DeleteNodesRequest(
                parent=C, names=[f"{C}/nodes/n2"], allow_missing=True, validate_only=True
            )
        ],
        "UpsertNodes": [some_nodes("n1", "n2")],
        "GetNode": [clusters_pb2.GetNodeRequest(name=f"{C}/nodes/n1")],
        "ListNodes": [clusters_pb2.ListNodesRequest(parent=C, page_size=1)],
        "DrainNodes": [clusters_pb2.DrainNodesRequest(parent=C, names=[f"{C}/nodes/n1"])],
        "CreateReservation": [
            reservations_pb2.CreateReservationRequest(
                parent=C,
                reservation=reservations_pb2.Reservation(
                    name=f"{C}/reservations/r",
                    end_time=Timestamp(seconds=4_000_000_000),
                    nodes=["n1"],
                    maintenance=True,
                ),
                validate_only=True,
            )
        ],
        "GetReservation": [reservations_pb2.GetReservationRequest(name=f"{C}/reservations/r")],
        "ListReservations": [reservations_pb2.ListReservationsRequest(parent=C)],
        "UpdateReservation": [
            reservations_pb2.UpdateReservationRequest(name=f"{C}/reservations/r", etag="1")
        ],
        "DeleteReservations": [
            reservations_pb2.DeleteReservationsRequest(
                parent=C, names=[f"{C}/reservations/r"], allow_missing=True
            )
        ],
        "UndrainNodes": [clusters_pb2.UndrainNodesRequest(parent=C, names=[f"{C}/nodes/n1"])],
        "UpsertCells": [
            some_cells(a_cell(2), a_cell(4, sd=0.1), a_cell(8, infeasible=True, iter_time_s=0.0))
        ],
        "DeleteCells": [
            e.DeleteCellsRequest(
                parent=C, workload=a_workload(), gpu_type="a100", gpus=2, validate_only=True
            )
        ],
        "ListCells": [e.ListCellsRequest(parent=C, workload=a_workload())],
        "EstimateCells": [
            e.EstimateCellsRequest(
                parent=C, workload=a_workload(), gpus=[1], gpu_types=["a100"], pipeline_degrees=[1]
            )
        ],
        "UpsertModels": [
            e.UpsertModelsRequest(
                parent=C,
                models=[e.Model(model="m", params="1B", architecture=MODEL, micro_batches=4)],
            )
        ],
        "DeleteModels": [
            e.DeleteModelsRequest(
                parent=C, models=[e.ModelName(model="m", params="1B")], allow_missing=True
            )
        ],
        "ListModels": [e.ListModelsRequest(parent=C, page_size=3, with_published=True)],
        "AddProfiles": [
            e.AddProfilesRequest(
                parent=C,
                workload=a_workload(),
                gpu_type="a100",
                dtype="bf16",
                source="here",
                device="A100",
                task="task",
                date="2026-01-01",
                versions={"jax": "1"},
                layers=[layer],
            )
        ],
        "GetProfiling": [e.GetProfilingRequest(parent=C, workload=a_workload())],
        "SubmitJob": [
            a_submit("k", labels={"a": "b"}, command=["true"], tenant="t", launch=WHOLE_MESSAGE)
        ],
        "SubmitJobs": [a_batch(a_submit("l"), a_submit("m"))],
        "GetJob": [j.GetJobRequest(name=JOB)],
        "ListJobs": [j.ListJobsRequest(parent=C, states=[j.QUEUED], page_size=5)],
        "UpdateJob": [j.UpdateJobRequest(job=j.Job(name=JOB, weight=2.0, priority=3))],
        "ListJobEvents": [j.ListJobEventsRequest(parent=f"{C}/jobs/j")],
        "ExplainJob": [j.ExplainJobRequest(name=JOB), j.ExplainJobRequest(name=JOB, round=1)],
        "CancelJob": [j.CancelJobRequest(name=JOB, validate_only=True)],
        "HoldJob": [j.HoldJobRequest(name=JOB)],
        "ReleaseJob": [j.ReleaseJobRequest(name=JOB)],
        "WatchJob": [j.WatchJobRequest(name=JOB)],
        "ReadLogs": [j.ReadLogsRequest(name=JOB, rank=1, generation=1, offset=-9)],
        "GetJobCurves": [j.GetJobCurvesRequest(name=JOB, gpus=2)],
        "GetArray": [j.GetArrayRequest(name=f"{C}/arrays/a")],
        "ChangeArray": [
            j.ChangeArrayRequest(name=f"{C}/arrays/a", change=j.ChangeArrayRequest.HOLD)
        ],
        "GetTopology": [n.GetTopologyRequest(name=f"{C}/topology")],
        "UpdateTopology": [
            n.UpdateTopologyRequest(topology=n.Topology(name=f"{C}/topology", document=CLOS))
        ],
        "DeleteTopology": [n.DeleteTopologyRequest(name=f"{C}/topology")],
        "GetNetworkPlan": [n.GetNetworkPlanRequest(name=f"{C}/networkPlans/-")],
        "ListNetworkPlans": [n.ListNetworkPlansRequest(parent=C, page_size=2)],
        "PlanNetwork": [n.PlanNetworkRequest(parent=C, dry_run=True)],
        "Schedule": [s.ScheduleRequest(parent=C, options=quick)],
        "GetRound": [s.GetRoundRequest(name=f"{C}/rounds/1")],
        "ListRounds": [s.ListRoundsRequest(parent=C, page_size=1)],
        "ReplayRound": [s.ReplayRoundRequest(name=f"{C}/rounds/1", with_snapshot=True)],
        "WhatIf": [s.WhatIfRequest(parent=C, needed_weight=w.NeededWeightQuestion(job=JOB))],
        "VerifyRound": [s.VerifyRoundRequest(name=f"{C}/rounds/1", with_document=True)],
        "SetPolicy": [s.SetPolicyRequest(parent=C, options=quick, message="m", etag='"0"')],
        "GetPolicy": [s.GetPolicyRequest(parent=C, version=0)],
        "ListPolicies": [s.ListPoliciesRequest(parent=C, page_size=1)],
        "SetShadow": [s.SetShadowRequest(parent=C, options=quick, message="m")],
        "GetShadow": [s.GetShadowRequest(name=f"{C}/shadow", rounds=9, window=Duration(seconds=9))],
        "DeleteShadow": [s.DeleteShadowRequest(name=f"{C}/shadow", allow_missing=True)],
        "UpsertTenants": [some_tenants(a_tenant("t", weight=2.0, quotas={"a100": 1}))],
        "ListTenants": [t.ListTenantsRequest(parent=C)],
        "GetUsage": [t.GetUsageRequest(parent=C, tenants=["t"], group_by=["type", "label:x"])],
        "DeleteTenants": [t.DeleteTenantsRequest(parent=C, names=[f"{C}/tenants/t"])],
        "Sync": [
            agents_pb2.AgentMessage(said_s=1.0, hello=hello),
            agents_pb2.AgentMessage(said_s=2.0, observed=observed),
            agents_pb2.AgentMessage(said_s=3.0),
        ],
    }


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
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
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
    failed = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "rpc_failed"]
    assert not failed
