"""A job that nobody profiled, from submission to GPUs, through the API of a complete server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc.aio

from tessera.db.engine import Database
from tessera.service.config import Config
from tessera.service.wiring import run_server
from tessera.v1 import (
    agents_pb2,
    agents_pb2_grpc,
    clusters_pb2,
    clusters_pb2_grpc,
    estimates_pb2,
    estimates_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tests.support.patience import PATIENCE_S

C = "clusters/c"
TYPES = ("a100", "v100")
HELLO = agents_pb2.AgentMessage(
    hello=agents_pb2.Hello(
        parent=C,
        agent_id="a",
        incarnation="1",
        nodes=[agents_pb2.AgentNode(node=f"{t}-n", gpu_type=t, gpus=4) for t in TYPES],
    )
)
ARCHITECTURE = (
    "{architecture: transformer, layers: 4, hidden: 256, heads: 4, sequence: 128, vocabulary: 1000}"
)


class User:
    """A user's calls of the API over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)

    async def submit(self, job: str, model: str, params: str = "") -> None:
        workload = estimates_pb2.Workload(model=model, params=params, global_batch=256)
        spec = jobs_pb2.Job(workload=workload, iterations=1000, requested_gpus=2)
        await self.jobs.SubmitJob(jobs_pb2.SubmitJobRequest(parent=C, job_id=job, job=spec))

    async def job(self, job: str) -> jobs_pb2.Job:
        return await self.jobs.GetJob(jobs_pb2.GetJobRequest(name=f"{C}/jobs/{job}"))

    async def wait_for_a_reason(self, job: str) -> None:
        """Wait until the background has said why the job has no estimates."""

        async def has_a_reason() -> bool:
            return (await self.job(job)).HasField("reason")

        await until(has_a_reason)

    async def cells(self, model: str, params: str = "") -> list[estimates_pb2.CellEstimate]:
        workload = estimates_pb2.Workload(model=model, params=params, global_batch=256)
        page = await self.estimates.ListCells(
            estimates_pb2.ListCellsRequest(parent=C, workload=workload)
        )
        return list(page.cells)

    async def schedule(self) -> None:
        await self.scheduler.Schedule(scheduler_pb2.ScheduleRequest(parent=C), timeout=PATIENCE_S)


@asynccontextmanager
async def a_system(database: Database, **settings: Any) -> AsyncIterator[User]:
    """Yield a user of a server whose cluster has only nodes and their agent."""
    config = Config(
        listen="127.0.0.1:0", database_url=database.url, period_s=0.0, grace_s=2.0, **settings
    )
    async with (
        run_server(config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        types = [clusters_pb2.GpuType(name=t, memory_bytes=40 * 2**30) for t in TYPES]
        cluster = clusters_pb2.Cluster(name=C, gpu_types=types)
        await clusters_pb2_grpc.ClustersStub(channel).UpsertCluster(
            clusters_pb2.UpsertClusterRequest(cluster=cluster)
        )
        agent = agents_pb2_grpc.AgentsStub(channel).Sync()
        await agent.write(HELLO)
        assert cast(agents_pb2.ServerMessage, await agent.read()).HasField("welcome")
        yield User(channel)
        await agent.done_writing()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll the condition until it is true, since nothing notifies the caller."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_a_job_of_a_published_model_gets_cells_and_is_scheduled(database: Database) -> None:
    async with a_system(database) as user:
        await user.submit("j", "bert", "1.3B")

        async def has_cells() -> bool:
            return bool(await user.cells("bert", "1.3B"))

        await until(has_cells)
        cells = await user.cells("bert", "1.3B")
        assert {(c.cell.gpu_type, c.cell.gpus) for c in cells} == {
            (t, n) for t in TYPES for n in (1, 2, 4)
        }
        await user.schedule()
        job = await user.job("j")
    assert job.state == jobs_pb2.STARTING
    best = min((c for c in cells if c.cell.gpus == 4), key=lambda c: c.iter_time_s)
    assert job.allocation.cell == best.cell


async def test_a_job_of_an_unknown_model_says_what_to_do_and_runs_once_the_model_is_added(
    database: Database,
) -> None:
    async with a_system(database) as user:
        await user.submit("j", "sphinx")
        await user.wait_for_a_reason("j")
        reason = (await user.job("j")).reason
        assert reason.code == "NO_ESTIMATE"
        assert "the model sphinx is unknown" in reason.message
        assert "describe it with `tessera models add` (Estimates.UpsertModels)" in reason.next_step
        await user.schedule()
        assert (await user.job("j")).reason.message == reason.message
        model = estimates_pb2.Model(model="sphinx", architecture=ARCHITECTURE)
        await user.estimates.UpsertModels(
            estimates_pb2.UpsertModelsRequest(parent=C, models=[model])
        )

        async def has_cells() -> bool:
            return bool(await user.cells("sphinx"))

        await until(has_cells)
        assert "estimated since the last round" in (await user.job("j")).reason.message
        await user.schedule()
        assert (await user.job("j")).state == jobs_pb2.STARTING


async def test_a_server_with_estimation_off_estimates_nothing(database: Database) -> None:
    async with a_system(database, estimate_cells=False) as user:
        await user.submit("j", "bert", "1.3B")
        await user.wait_for_a_reason("j")
        await user.schedule()
        job = await user.job("j")
        assert await user.cells("bert", "1.3B") == []
    assert "bert/1.3B/256 has no estimates: the server derives none" in job.reason.message
