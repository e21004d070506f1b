"""A server that is started as by its command, on the test's own database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from tessera.client import PLAIN_TEXT, open_async_channel
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.store import Store
from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server

JOB = JobSpec(
    name="j",
    workload=Workload(model="m", params="", global_batch=8),
    iterations=10,
    requested_gpus=1,
)


CELL = EstimateRecord(
    workload=JOB.workload,
    cell=Cell(gpu_type="a100", gpus=1, pipeline_degree=1, nodes=1),
    iter_time_s=1.0,
    source=EstimateSource.MEASURED,
)


def a_cluster(store: Store, name: str = "c") -> None:
    nodes = [NodeSpec(name="n", gpu_type="a100", gpus=8)]
    store.change(upsert_cluster, name, [GpuType(name="a100", memory_bytes=2**35)], None, nodes)
    store.change(submit_jobs, name, [JOB])
    store.change(upsert_estimates, name, [CELL])


def settings(database: Database, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "database_url": database.url,
        "period_s": 0.0,
        "poll_s": 60.0,
        "heartbeat_s": 7.0,
        "grace_s": 2.0,
        "store_threads": 4,
    }
    return Config(**(values | changes))


@asynccontextmanager
async def channel_to(config: Config) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        run_server(config) as port,
        open_async_channel(f"127.0.0.1:{port}", PLAIN_TEXT) as channel,
    ):
        yield channel
