"""The client of programs with asyncio. ``scripts/protos.py`` generates the other one from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc.aio

from tessera.client import requests
from tessera.client.channels import open_async_channel
from tessera.client.errors import to_error
from tessera.client.requests import JobFields, JobRef, Page, Paged
from tessera.client.retries import Patience
from tessera.client.settings import ChannelSettings
from tessera.v1 import (
    access_pb2,
    access_pb2_grpc,
    clusters_pb2,
    clusters_pb2_grpc,
    estimates_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    networks_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
    webhooks_pb2_grpc,
    what_if_pb2,
)

_Q = TypeVar("_Q")
_R = TypeVar("_R")
_I = TypeVar("_I")
_P = TypeVar("_P", bound=Page)
_PQ = TypeVar("_PQ", bound=Paged)


class AsyncStubs:
    """The generated stubs of all services that users call, over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.access = access_pb2_grpc.AccessStub(channel)
        self.clusters = clusters_pb2_grpc.ClustersStub(channel)
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.networks = networks_pb2_grpc.NetworksStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        self.tenants = tenants_pb2_grpc.TenantsStub(channel)
        self.webhooks = webhooks_pb2_grpc.WebhooksStub(channel)


class AsyncClient:
    """A client of a server, for one cluster. It belongs to one event loop.

    Without ``token``, ``authorities`` and ``settings``, it uses the environment variables of the
    command line, or else its login at the server. A call lasts at most ``deadline_s`` seconds. If no
    server answers, it is tried again for ``retry_s`` seconds. What changes something carries a
    request id, so that it happens once.

    Raises:
        ChannelRefused: the settings do not allow a channel, e.g. a token in plain text.
    """

    def __init__(
        self,
        address: str = "",
        cluster: str = "",
        *,
        token: str = "",
        authorities: str = "",
        settings: ChannelSettings | None = None,
        deadline_s: float = 60.0,
        retry_s: float = 15.0,
    ) -> None:
        self.address = requests.choose_address(address)
        self.cluster = requests.choose_cluster(cluster)
        self.settings = requests.choose_settings(self.address, token, authorities, settings)
        self.deadline_s, self.retry_s = deadline_s, retry_s
        self._channel = open_async_channel(self.address, self.settings, requests.CHANNEL_OPTIONS)
        self.stubs = AsyncStubs(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel. Open streams end."""
        await self._channel.close()

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Q, _R],
        request: _Q,
        deadline_s: float | None = None,
    ) -> _R:
        """Call any method of ``stubs``, with retries. Raises CallError."""
        sent, repeatable = requests.prepare(request)
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        patience = Patience(limit_s, self.retry_s, repeatable=repeatable)
        while True:
            try:
                return await method(sent, timeout=patience.left_s())
            except grpc.RpcError as failure:
                error = to_error(failure, self.address, limit_s)
                await asyncio.sleep(patience.pause_s(error))

    async def stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[_Q, _R],
        request: _Q,
        timeout_s: float | None = None,
        *,
        is_resumed: bool = False,
    ) -> AsyncIterator[_R]:
        """Yield the answers of any method of ``stubs`` that streams them. Raises CallError.

        It is tried again until its first answer. If ``is_resumed``, a stream that breaks is also begun
        again.
        """
        patience = Patience(timeout_s, self.retry_s, repeatable=True)
        has_begun = False
        while True:
            try:
                async for answer in method(request, timeout=patience.left_s()):
                    has_begun = True
                    patience.answered()
                    yield answer
                return
            except grpc.RpcError as failure:
                error = to_error(failure, self.address, timeout_s)
                if has_begun and not is_resumed:
                    raise error from failure
                await asyncio.sleep(patience.pause_s(error))

    async def pages(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_PQ, _P],
        request: _PQ,
        items: Callable[[_P], Iterable[_I]],
    ) -> AsyncIterator[_I]:
        """Yield the items of all pages of a list. Raises CallError."""
        request.page_size = request.page_size or requests.PAGE_SIZE
        while True:
            page = await self.call(method, request)
            for item in items(page):
                yield item
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def submit(
        self,
        job: jobs_pb2.Job | None = None,
        *,
        name: str = "",
        validate_only: bool = False,
        **fields: Unpack[JobFields],
    ) -> jobs_pb2.Job:
        """Submit a job, from a message or from fields; return it as it is stored.

        Without ``name``, the server chooses an id. Raises CallError, and TypeError for an unknown field.
        """
        request = jobs_pb2.SubmitJobRequest(
            parent=self.cluster,
            job_id=name,
            job=requests.describe_job(self.cluster, job, fields),
            validate_only=validate_only,
        )
        return await self.call(self.stubs.jobs.SubmitJob, request)

    async def submit_many(self, jobs: Iterable[tuple[str, jobs_pb2.Job]]) -> Sequence[jobs_pb2.Job]:
        """Submit up to 10,000 jobs with their names, all or none. Raises CallError."""
        inner = [jobs_pb2.SubmitJobRequest(job_id=name, job=job) for name, job in jobs]
        request = jobs_pb2.SubmitJobsRequest(parent=self.cluster, requests=inner)
        answer = await self.call(self.stubs.jobs.SubmitJobs, request)
        return answer.jobs

    async def get_job(self, job: JobRef) -> jobs_pb2.Job:
        """Return a job as it is now. Raises CallError."""
        return await self.call(self.stubs.jobs.GetJob, jobs_pb2.GetJobRequest(name=self._job(job)))

    def list_jobs(self, states: Iterable[str] = ()) -> AsyncIterator[jobs_pb2.Job]:
        """Yield the jobs in ``states``, e.g. ``["queued"]``, in order of submission.

        Without states, all jobs. Raises CallError.
        """
        request = requests.list_jobs(self.cluster, states)
        return self.pages(self.stubs.jobs.ListJobs, request, lambda page: page.jobs)

    async def update_job(self, job: jobs_pb2.Job, paths: Iterable[str]) -> jobs_pb2.Job:
        """Set the fields ``paths`` of a stored job, e.g. ``["weight"]``. Raises CallError.

        If somebody else changed the job since it was read, the error is a Conflict.
        """
        return await self.call(self.stubs.jobs.UpdateJob, requests.update_job(job, paths))

    async def cancel(self, job: JobRef) -> jobs_pb2.Job:
        """End a job. Raises CallError."""
        request = jobs_pb2.CancelJobRequest(name=self._job(job))
        return await self.call(self.stubs.jobs.CancelJob, request)

    async def hold(self, job: JobRef) -> jobs_pb2.Job:
        """Keep a job out of rounds. Raises CallError."""
        return await self.call(
            self.stubs.jobs.HoldJob, jobs_pb2.HoldJobRequest(name=self._job(job))
        )

    async def release(self, job: JobRef) -> jobs_pb2.Job:
        """Let a held job into rounds again. Raises CallError."""
        request = jobs_pb2.ReleaseJobRequest(name=self._job(job))
        return await self.call(self.stubs.jobs.ReleaseJob, request)

    async def explain(
        self,
        job: JobRef,
        *,
        number: int = 0,
        steps: bool = True,
        recorded: bool = False,
        deadline_s: float | None = None,
    ) -> jobs_pb2.ExplainJobResponse:
        """Return why a job waits, runs or was changed in round ``number``, and what would help.

        0 stands for now. Without ``steps``, nothing is tried. With ``recorded``, no round is
        decided either: the answer is quick, and has only what is recorded. Raises CallError.
        """
        request = jobs_pb2.ExplainJobRequest(
            name=self._job(job), round=number, without_steps=not steps, recorded_only=recorded
        )
        return await self.call(self.stubs.jobs.ExplainJob, request, deadline_s)

    async def list_events(self, job: JobRef) -> Sequence[jobs_pb2.JobEvent]:
        """Return the history of a job, oldest first. Raises CallError."""
        request = jobs_pb2.ListJobEventsRequest(parent=self._job(job))
        answer = await self.call(self.stubs.jobs.ListJobEvents, request)
        return answer.events

    async def watch(
        self, job: JobRef, timeout_s: float | None = None
    ) -> AsyncIterator[jobs_pb2.Job]:
        """Yield a job now and after each change, until it has ended.

        If the server goes away, the watch continues with the next one. Raises CallError.
        """
        request = jobs_pb2.WatchJobRequest(name=self._job(job))
        last = None
        async for update in self.stream(
            self.stubs.jobs.WatchJob, request, timeout_s, is_resumed=True
        ):
            if update != last:
                yield update
            last = update

    async def wait(
        self, job: JobRef, timeout_s: float | None = None, *, check: bool = False
    ) -> jobs_pb2.Job:
        """Wait until a job has ended, and return it.

        Raises:
            JobNotSucceeded: it has not succeeded, and ``check`` is set.
            DeadlineExceeded: it goes on after ``timeout_s`` seconds. It is a TimeoutError, too.
            CallError: another call failed.
        """
        last = jobs_pb2.Job()
        async for update in self.watch(job, timeout_s):
            last = update
        return requests.require_success(last) if check else last

    def read_logs(
        self, job: JobRef, *, rank: int = 0, generation: int = 0, follow: bool = False
    ) -> AsyncIterator[jobs_pb2.ReadLogsResponse]:
        """Yield parts of a rank's output, oldest first; -1 stands for the launcher.

        With ``follow``, it goes on until the job ends. Raises CallError.
        """
        request = jobs_pb2.ReadLogsRequest(
            name=self._job(job), rank=rank, generation=generation, follow=follow
        )
        return self.stream(self.stubs.jobs.ReadLogs, request)

    async def get_cluster(self) -> clusters_pb2.Cluster:
        """Return the cluster. Raises CallError."""
        request = clusters_pb2.GetClusterRequest(name=self.cluster)
        return await self.call(self.stubs.clusters.GetCluster, request)

    def list_nodes(self) -> AsyncIterator[clusters_pb2.Node]:
        """Yield the nodes of the cluster. Raises CallError."""
        request = clusters_pb2.ListNodesRequest(parent=self.cluster)
        return self.pages(self.stubs.clusters.ListNodes, request, lambda page: page.nodes)

    async def drain(
        self, nodes: Iterable[str | clusters_pb2.Node], reason: str = ""
    ) -> Sequence[clusters_pb2.Node]:
        """Take nodes out of rounds, and return them. Raises CallError."""
        request = requests.drain_nodes(self.cluster, nodes, reason)
        answer = await self.call(self.stubs.clusters.DrainNodes, request)
        return answer.nodes

    async def undrain(
        self, nodes: Iterable[str | clusters_pb2.Node]
    ) -> Sequence[clusters_pb2.Node]:
        """Take drained nodes back into rounds, and return them. Raises CallError."""
        names = requests.full_names(self.cluster, "nodes", nodes)
        request = clusters_pb2.UndrainNodesRequest(parent=self.cluster, names=names)
        answer = await self.call(self.stubs.clusters.UndrainNodes, request)
        return answer.nodes

    async def schedule(
        self,
        options: scheduler_pb2.RoundOptions | None = None,
        *,
        dry_run: bool = False,
        deadline_s: float | None = None,
    ) -> scheduler_pb2.Round:
        """Decide a round now. Raises CallError."""
        request = requests.schedule(self.cluster, options, dry_run=dry_run)
        return await self.call(self.stubs.scheduler.Schedule, request, deadline_s)

    async def what_if(
        self,
        *changes: what_if_pb2.HypotheticalChange,
        options: scheduler_pb2.RoundOptions | None = None,
        hours: float = 0.0,
        futures: int = 0,
        deadline_s: float | None = None,
    ) -> what_if_pb2.WhatIfResponse:
        """Return what changes would do that nobody has made. Nothing is changed.

        The answer is about the next round and, with ``hours``, about the hours that follow, from at
        most ``futures`` pairs of futures (0: 32). ``options`` decide its round. Raises CallError.
        """
        request = requests.what_if(self.cluster, changes, options, hours, futures)
        return await self.call(self.stubs.scheduler.WhatIf, request, deadline_s)

    async def get_round(self, number: int | str) -> scheduler_pb2.Round:
        """Return a round with its decisions. Raises CallError."""
        name = requests.full_name(self.cluster, "rounds", number)
        return await self.call(
            self.stubs.scheduler.GetRound, scheduler_pb2.GetRoundRequest(name=name)
        )

    def list_rounds(self) -> AsyncIterator[scheduler_pb2.Round]:
        """Yield the rounds that are kept, newest first. Raises CallError."""
        request = scheduler_pb2.ListRoundsRequest(parent=self.cluster, page_size=100)
        return self.pages(self.stubs.scheduler.ListRounds, request, lambda page: page.rounds)

    def list_tenants(self) -> AsyncIterator[tenants_pb2.Tenant]:
        """Yield the tenants with settings, by name. Raises CallError."""
        request = tenants_pb2.ListTenantsRequest(parent=self.cluster)
        return self.pages(self.stubs.tenants.ListTenants, request, lambda page: page.tenants)

    async def get_caller(self) -> access_pb2.Caller:
        """Return who you are to the server. Raises CallError."""
        return await self.call(self.stubs.access.GetCaller, access_pb2.GetCallerRequest())

    async def get_server(self) -> access_pb2.Server:
        """Return the server's release, schema and clock. Raises CallError."""
        return await self.call(self.stubs.access.GetServer, access_pb2.GetServerRequest())

    def _job(self, job: JobRef) -> str:
        return requests.full_name(self.cluster, "jobs", job)
