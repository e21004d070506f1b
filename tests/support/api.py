"""The whole API over a socket, with requests for its methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc import StatusCode

from tessera.db.store.store import Store
from tessera.formulation.records.clusters import NodeSpec
from tessera.v1 import (
    clusters_pb2,
    clusters_pb2_grpc,
    estimates_pb2,
    estimates_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
)
from tests.support.rpc import error_details, serving

C = "clusters/c"


class Api:
    """The stubs of all services."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.clusters = clusters_pb2_grpc.ClustersStub(channel)
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        self.tenants = tenants_pb2_grpc.TenantsStub(channel)


@asynccontextmanager
async def api(store: Store, **settings: Any) -> AsyncIterator[Api]:
    """Yield stubs of a server with a cluster of two nodes of one type, and one workload's Cells."""
    async with serving(store, **settings) as (channel, _):
        found = Api(channel)
        await found.clusters.UpsertCluster(a_cluster())
        await found.clusters.UpsertNodes(some_nodes("n1", "n2"))
        await found.estimates.UpsertCells(some_cells(a_cell(1), a_cell(8)))
        yield found


@asynccontextmanager
async def api_with_agent(store: Store, **settings: Any) -> AsyncIterator[Api]:
    """Yield the stubs of ``api``, whose two nodes have been heard."""
    async with api(store, **settings) as found:
        connect_agent(store)
        yield found


def connect_agent(store: Store, *nodes: str) -> None:
    """Connect an agent for nodes of 8 GPUs, usually for both nodes of ``api``."""
    specs = [NodeSpec(name=name, gpu_type="a100", gpus=8) for name in nodes or ("n1", "n2")]
    store.hello("c", "agent", "first", specs)


def a_cluster(*types: str, **rest: Any) -> clusters_pb2.UpsertClusterRequest:
    gpu_types = [clusters_pb2.GpuType(name=t, memory_bytes=2**35) for t in types or ("a100",)]
    cluster = clusters_pb2.Cluster(name=C, gpu_types=gpu_types, etag=rest.pop("etag", ""))
    return clusters_pb2.UpsertClusterRequest(cluster=cluster, **rest)


def a_node(name: str, **changes: Any) -> clusters_pb2.Node:
    values: dict[str, Any] = {"gpu_type": "a100", "gpus": 8} | changes
    return clusters_pb2.Node(name=f"{C}/nodes/{name}", **values)


def some_nodes(*names: str, **rest: Any) -> clusters_pb2.UpsertNodesRequest:
    return clusters_pb2.UpsertNodesRequest(parent=C, nodes=[a_node(n) for n in names], **rest)


def a_cell(gpus: int, **changes: Any) -> estimates_pb2.CellEstimate:
    values: dict[str, Any] = {
        "workload": a_workload(),
        "cell": estimates_pb2.Cell(gpu_type="a100", gpus=gpus, pipeline_degree=1),
        "iter_time_s": 1.0 / gpus,
        "source": estimates_pb2.MEASURED,
    }
    chosen = {k: v for k, v in (values | changes).items() if v is not None}
    return estimates_pb2.CellEstimate(**chosen)


def some_cells(*cells: estimates_pb2.CellEstimate) -> estimates_pb2.UpsertCellsRequest:
    return estimates_pb2.UpsertCellsRequest(parent=C, cells=cells)


def a_workload(model: str = "bert") -> estimates_pb2.Workload:
    return estimates_pb2.Workload(model=model, params="1.3B", global_batch=256)


def a_submit(job_id: str = "j", **changes: Any) -> jobs_pb2.SubmitJobRequest:
    outer = {k: changes.pop(k) for k in ("request_id", "validate_only") if k in changes}
    values: dict[str, Any] = {"workload": a_workload(), "iterations": 1000, "requested_gpus": 4}
    job = jobs_pb2.Job(**(values | changes))
    return jobs_pb2.SubmitJobRequest(parent=C, job_id=job_id, job=job, **outer)


def a_batch(*inner: jobs_pb2.SubmitJobRequest) -> jobs_pb2.SubmitJobsRequest:
    for request in inner:
        request.ClearField("parent")
    return jobs_pb2.SubmitJobsRequest(parent=C, requests=inner)


def a_tenant(name: str, **settings: Any) -> tenants_pb2.Tenant:
    return tenants_pb2.Tenant(name=f"{C}/tenants/{name}", **settings)


def some_tenants(*tenants: tenants_pb2.Tenant, **rest: Any) -> tenants_pb2.UpsertTenantsRequest:
    return tenants_pb2.UpsertTenantsRequest(parent=C, tenants=tenants, **rest)


def a_round(**options: Any) -> scheduler_pb2.ScheduleRequest:
    return scheduler_pb2.ScheduleRequest(parent=C, options=scheduler_pb2.RoundOptions(**options))


async def refusal_of(call: Awaitable[Message]) -> tuple[StatusCode, str, list[str]]:
    """Return the code, reason and invalid fields of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    info, wrong = error_details(caught.value)
    return caught.value.code(), info.reason, wrong


INVALID = StatusCode.INVALID_ARGUMENT
