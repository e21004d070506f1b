"""Profiling tasks on a real server and agent, where JAX measures a user's step on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tessera.db.schema.engine import Database
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server
from tessera.v1 import (
    clusters_pb2,
    clusters_pb2_grpc,
    estimates_pb2,
    estimates_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tests.support.agent_server import AgentProcess
from tests.support.patience import PATIENCE_S

C = "clusters/c"
HARDWARE = """
hardware:
  - {name: my-cpu, like: a10, flops: {f32: 2e11, f16: 2e11}, memory_bytes_per_s: 1e10}
"""
ARCHITECTURE = """
{architecture: transformer, layers: 2, hidden: 64, heads: 2, sequence: 16, vocabulary: 100, dtype: f32}
"""
STEP = "tests.support.tiny_step:step"
TINY = estimates_pb2.Workload(model="tiny", params="1K", global_batch=64)
TASK = estimates_pb2.ProfilingTask


class User:
    """A user's calls of the API over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)

    async def describe(self, step: str, *arguments: str) -> None:
        model = estimates_pb2.Model(
            model="tiny",
            params="1K",
            architecture=ARCHITECTURE,
            step=step,
            step_arguments=arguments,
        )
        request = estimates_pb2.UpsertModelsRequest(parent=C, models=[model])
        await self.estimates.UpsertModels(request)

    async def submit(self, job: str, **settings: Any) -> None:
        spec = jobs_pb2.Job(workload=TINY, iterations=10**9, **settings)
        await self.jobs.SubmitJob(jobs_pb2.SubmitJobRequest(parent=C, job_id=job, job=spec))

    async def state(self, job: str) -> str:
        record = await self.jobs.GetJob(jobs_pb2.GetJobRequest(name=f"{C}/jobs/{job}"))
        return jobs_pb2.JobState.Name(record.state)

    async def profiling(self) -> estimates_pb2.Profiling:
        request = estimates_pb2.GetProfilingRequest(parent=C, workload=TINY)
        return await self.estimates.GetProfiling(request)

    async def task(self) -> estimates_pb2.ProfilingTask:
        (task,) = (await self.profiling()).tasks
        return task

    async def cells(self) -> list[estimates_pb2.CellEstimate]:
        request = estimates_pb2.ListCellsRequest(parent=C, workload=TINY)
        return list((await self.estimates.ListCells(request)).cells)

    async def schedule(self) -> None:
        await self.scheduler.Schedule(scheduler_pb2.ScheduleRequest(parent=C), timeout=PATIENCE_S)

    async def reaches(self, state: TASK.State.ValueType) -> estimates_pb2.ProfilingTask:
        async def reached() -> bool:
            return (await self.task()).state == state

        await until(reached)
        return await self.task()

    async def is_in(self, job: str, state: str) -> None:
        async def reached() -> bool:
            return await self.state(job) == state

        await until(reached)


async def until(condition: Callable[[], Awaitable[bool]], every_s: float = 0.05) -> None:
    """Poll the condition until it is true, since nothing notifies the caller."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(every_s)


@asynccontextmanager
async def a_system(
    database: Database, folder: Path, *, gpus: int = 2, **settings: Any
) -> AsyncIterator[User]:
    """Yield a user of a server and an agent whose node has ``gpus`` GPUs, which are really this CPU."""
    hardware = folder / "hardware.yaml"
    hardware.write_text(HARDWARE)
    config = Config(
        listen="127.0.0.1:0",
        database_url=database.url,
        period_s=0.0,
        grace_s=2.0,
        hardware=str(hardware),
        heartbeat_s=0.5,
        inspect_s=0.2,
        **({"estimate_counts": "1"} | settings),
    )
    async with (
        run_server(config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        kind = clusters_pb2.GpuType(name="my-cpu", memory_bytes=8 * 2**30)
        clusters = clusters_pb2_grpc.ClustersStub(channel)
        await clusters.UpsertCluster(
            clusters_pb2.UpsertClusterRequest(
                cluster=clusters_pb2.Cluster(name=C, gpu_types=[kind])
            )
        )
        flags = ("--clock-factor", "1000", "--grace-s", "5")
        agent = AgentProcess(folder / "agent", [port], *flags, nodes=[f"n:my-cpu:{gpus}"])
        agent.start()

        async def ready() -> bool:
            listed = await clusters.ListNodes(clusters_pb2.ListNodesRequest(parent=C))
            return any(node.state == clusters_pb2.Node.READY for node in listed.nodes)

        try:
            await until(ready)
            yield User(channel)
        finally:
            agent.clean()


def mean_sd(cells: list[estimates_pb2.CellEstimate]) -> float:
    return sum(cell.sd for cell in cells) / len(cells)


def degrees(cells: list[estimates_pb2.CellEstimate]) -> list[tuple[str, int, int]]:
    """Return the type, count and degree of Cells. Measured times may lead to other plans of them."""
    return sorted((c.cell.gpu_type, c.cell.gpus, c.cell.pipeline_degree) for c in cells)


async def test_a_job_with_a_profiling_request_is_profiled_on_an_idle_gpu_and_its_cells_get_surer(
    database: Database, tmp_path: Path
) -> None:
    async with a_system(database, tmp_path, profile_samples="1, 4", estimate_counts="1,2") as user:
        await user.describe(STEP, "layers=3")
        await user.submit("j", requested_gpus=1, max_gpus=1, profile=True)
        task = await user.reaches(TASK.WAITS)
        assert task.gpu_type == "my-cpu"

        async def has_cells() -> bool:
            return bool(await user.cells())

        await until(has_cells)
        before = await user.cells()
        assert {c.source for c in before} == {estimates_pb2.ANALYTIC}
        await user.schedule()
        await user.is_in("j", "RUNNING")
        done = await user.reaches(TASK.DONE)
        await user.is_in(done.job, "SUCCEEDED")
        profiling = await user.profiling()

        async def is_profiled() -> bool:
            return {c.source for c in await user.cells()} == {estimates_pb2.PROFILED}

        await until(is_profiled)
        after = await user.cells()
        assert await user.state("j") == "RUNNING"
    assert profiling.source == f"{STEP}(layers=3)"
    assert done.records >= 2
    assert done.device_seconds > 0
    assert done.service_gpu_seconds >= done.device_seconds
    assert mean_sd(after) < mean_sd(before)
    assert "profiled on cpu" in after[0].provenance
    assert degrees(after) == degrees(before)


async def test_a_task_gives_up_its_gpu_to_a_job_that_needs_it_and_continues_later(
    database: Database, tmp_path: Path
) -> None:
    async with a_system(database, tmp_path, gpus=1, profile_samples="1,2,4,8,16,32") as user:
        await user.describe(STEP)
        await user.submit("asks", requested_gpus=1, profile=True)
        task = await user.reaches(TASK.WAITS)
        await user.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=f"{C}/jobs/asks"))
        await user.schedule()
        await user.is_in(task.job, "RUNNING")
        await user.jobs.ReleaseJob(jobs_pb2.ReleaseJobRequest(name=f"{C}/jobs/asks"))

        async def has_cells() -> bool:
            return bool(await user.cells())

        await until(has_cells)
        await user.schedule()
        await user.is_in("asks", "RUNNING")
        await user.is_in(task.job, "QUEUED")
        await user.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=f"{C}/jobs/asks"))
        await user.is_in("asks", "HELD")
        await user.schedule()
        done = await user.reaches(TASK.DONE)
        await user.is_in(task.job, "SUCCEEDED")
        job = await user.jobs.GetJob(jobs_pb2.GetJobRequest(name=f"{C}/jobs/{task.job}"))
    assert job.generation == 2
    assert done.records == 6 * (done.records // 6)


async def test_a_step_that_fails_on_the_node_leaves_estimates_analytic_with_a_reason(
    database: Database, tmp_path: Path
) -> None:
    async with a_system(database, tmp_path) as user:
        await user.describe("tests.support.tiny_step:broken")
        await user.submit("j", requested_gpus=1, profile=True)
        await user.reaches(TASK.WAITS)
        await user.schedule()

        async def failed_twice() -> bool:  # it is tried again once, after its back-off
            await user.schedule()
            return (await user.task()).state == TASK.FAILED

        await until(failed_twice, every_s=1.0)
        failed = await user.task()
        await user.is_in("j", "RUNNING")
        cells = await user.cells()
    assert "the data set is not on this node" in failed.problem
    assert {c.source for c in cells} == {estimates_pb2.ANALYTIC}


async def test_a_task_that_reaches_its_limit_leaves_estimates_analytic_and_says_why(
    database: Database, tmp_path: Path
) -> None:
    async with a_system(database, tmp_path, profile_task_gpu_s=0.001) as user:
        await user.describe(STEP)
        await user.submit("j", requested_gpus=1, profile=True)
        await user.reaches(TASK.WAITS)
        await user.schedule()
        limited = await user.reaches(TASK.LIMITED)
        await user.is_in(limited.job, "SUCCEEDED")
        cells = await user.cells()
    assert "(setting profile_task_gpu_s)" in limited.problem
    assert [size.samples for size in limited.left_out] == [1.0, 2.0, 4.0, 8.0]
    assert {c.source for c in cells} == {estimates_pb2.ANALYTIC}


async def test_users_may_not_submit_jobs_of_the_services_own_model(
    database: Database, tmp_path: Path
) -> None:
    async with a_system(database, tmp_path) as user:
        workload = estimates_pb2.Workload(model="tessera.profiling", global_batch=1)
        job = jobs_pb2.Job(workload=workload, iterations=1, requested_gpus=1)
        with pytest.raises(grpc.aio.AioRpcError, match="reserved for profiling tasks"):
            await user.jobs.SubmitJob(jobs_pb2.SubmitJobRequest(parent=C, job=job))
