"""tessera.v1.Jobs: the jobs that users submit, and their state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import grpc.aio

from tessera.db.estimates.derived_estimates import list_models
from tessera.db.jobs.job_changes import apply_event, update_job
from tessera.db.jobs.submission import submit_jobs
from tessera.db.store.reads import get_job, job_history, list_jobs, list_model_names
from tessera.db.store.store import Connection, Store
from tessera.formulation.base import limits
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput, NotFound
from tessera.formulation.job.lifecycle import TERMINAL, JobEvent
from tessera.formulation.job.runtime_offers import RuntimeLack, needed_runtime
from tessera.formulation.job.runtimes import REPLAY
from tessera.formulation.records.jobs import JobRecord, JobSpec
from tessera.formulation.records.store import Request
from tessera.service import fields
from tessera.service.server.convert import jobs as convert
from tessera.service.server.convert import names
from tessera.service.server.estimates.model_names import (
    NO_REMARKS,
    NameRemarks,
    name_key,
    remark_names,
)
from tessera.service.server.estimates.plan_remarks import remark_plans
from tessera.service.server.estimates.stated_plans import read_job_plan
from tessera.service.server.rounds.standing_policy import StandingPolicies, unheeded_wishes
from tessera.service.server.rpc.arrays import (
    ArrayCalls,
    expand_array,
    ranges_of,
    require_schedulable_deadline,
)
from tessera.service.server.rpc.curves import CurveReader
from tessera.service.server.rpc.explanations import ExplanationCalls
from tessera.service.server.rpc.logs import OutputReader
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.rpc.sharing import SharedReads
from tessera.service.server.tasks.calls import StreamPlaces, Wakeups
from tessera.service.server.tasks.lanes import CALLER, Lane, SizedCalls
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import jobs_pb2 as pb
from tessera.v1 import jobs_pb2_grpc

JOBS_PER_POLL: Final = 100
"""Approximate number of watched jobs that are read in each ``poll_s``."""
_Context = grpc.aio.ServicerContext[Any, Any]
_Event = pb.CancelJobRequest | pb.HoldJobRequest | pb.ReleaseJobRequest


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """The servicer of jobs, from the store.

    ``new_id`` chooses ids for jobs that have none. ``wall_s`` returns seconds since 1970, for
    refusing deadlines that have passed. ``poll_s`` is the time after which a watched job is read
    even without a wake-up. Batches and pages are heavy calls if they are large, and ``watches``
    limits the number of watchers. ``output`` reads what jobs write, and ``curves`` reads their
    sensitivity curves in the lane ``estimates``. ``explanations`` explains rounds' decisions.
    ``policies`` are those of periodic rounds: answers warn of wishes that they ignore.
    """

    def __init__(
        self,
        store: Store,
        calls: SizedCalls,
        wakeups: Wakeups,
        *,
        watches: StreamPlaces,
        output: OutputReader,
        explanations: ExplanationCalls,
        curves: CurveReader,
        estimates: Lane,
        new_id: Callable[[], str],
        wall_s: Callable[[], float],
        poll_s: float,
        policies: StandingPolicies,
    ) -> None:
        self._policies = policies
        self._store, self._calls, self._wakeups = store, calls, wakeups
        self._watches, self._output = watches, output
        self._curves, self._estimates = curves, estimates
        self._new_id, self._wall_s, self._poll_s = new_id, wall_s, poll_s
        self._explanations = explanations
        self._watched = SharedReads(self._read_watched)
        self._arrays = ArrayCalls(store)

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: _Context) -> pb.Job:
        """Queue a job."""
        return await self._calls.run(self._submit_job, request)

    async def SubmitJobs(
        self, request: pb.SubmitJobsRequest, context: _Context
    ) -> pb.SubmitJobsResponse:
        """Queue jobs, all or none."""
        return await self._calls.run_by_size(self._submit_jobs, request)

    async def GetJob(self, request: pb.GetJobRequest, context: _Context) -> pb.Job:
        """Return a job."""
        cluster, job = names.parse_job("name", request.name)
        return _shown(await self._calls.run(self._store.read, get_job, cluster, job))

    async def GetJobCurves(
        self, request: pb.GetJobCurvesRequest, context: _Context
    ) -> pb.JobCurves:
        """Return a job's sensitivity curves."""
        names.parse_job("name", request.name)
        return await self._estimates.run(
            CALLER.get(),
            f"GetJobCurves of {request.name}",
            lambda turn: self._curves.read(request, turn.is_over),
        )

    async def ListJobEvents(
        self, request: pb.ListJobEventsRequest, context: _Context
    ) -> pb.ListJobEventsResponse:
        """Return the events of a job, oldest first."""
        cluster, job = names.parse_job("parent", request.parent)
        history = await self._calls.run(self._store.read, job_history, cluster, job)
        sees_tenant = IDENTITY.get().sees_tenant
        return pb.ListJobEventsResponse(events=[convert.of_event(e, sees_tenant) for e in history])

    async def ListJobs(self, request: pb.ListJobsRequest, context: _Context) -> pb.ListJobsResponse:
        """Return a page of jobs, in order of submission."""
        return await self._calls.run_by_size(self._list_jobs, request)

    async def UpdateJob(self, request: pb.UpdateJobRequest, context: _Context) -> pb.Job:
        """Change the fields of a job that may change after its submission."""
        return await self._calls.run(self._update_job, request)

    async def CancelJob(self, request: pb.CancelJobRequest, context: _Context) -> pb.Job:
        """End a job."""
        key = fields.request_key(request, request.request_id)
        return await self._calls.run(self._job_event, request, key, JobEvent.CANCEL)

    async def HoldJob(self, request: pb.HoldJobRequest, context: _Context) -> pb.Job:
        """Keep a job out of rounds."""
        key = fields.request_key(request, request.request_id)
        return await self._calls.run(self._job_event, request, key, JobEvent.HOLD)

    async def ReleaseJob(self, request: pb.ReleaseJobRequest, context: _Context) -> pb.Job:
        """Let a held job into rounds again."""
        key = fields.request_key(request, request.request_id)
        return await self._calls.run(self._job_event, request, key, JobEvent.RELEASE)

    async def GetArray(self, request: pb.GetArrayRequest, context: _Context) -> pb.JobArray:
        """Return an array of jobs."""
        return await self._calls.run(self._arrays.get, request)

    async def ChangeArray(self, request: pb.ChangeArrayRequest, context: _Context) -> pb.JobArray:
        """Cancel, hold or release the jobs of an array."""
        return await self._calls.run(self._arrays.change, request)

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: _Context
    ) -> AsyncIterator[pb.Job]:
        """Send the job now and after each change, until it has ended.

        Slow readers skip versions. A change of ``service_gpu_s`` and ``run_s`` alone, while the job
        holds GPUs, does not count. The more streams watch, the less often each is read: together they read
        about ``JOBS_PER_POLL`` jobs in ``poll_s``.
        """
        cluster, job = names.parse_job("name", request.name)
        sent: JobRecord | None = None
        with (
            self._watches.take(CALLER.get().client),
            self._wakeups.listen(cluster) as changes,
        ):
            while True:
                record = await self._watched.get((cluster, job))
                if not IDENTITY.get().sees_tenant(record.spec.tenant):  # another job of this name
                    raise NotFound(names.job_name(cluster, job))
                compared = replace(record, service_gpu_s=0.0, run_s=0.0)
                if compared != sent:
                    yield _shown(record)
                    sent = compared
                if record.state in TERMINAL:
                    return
                await changes.wait(self._poll_s * max(1.0, self._watches.taken() / JOBS_PER_POLL))

    async def ReadLogs(
        self, request: pb.ReadLogsRequest, context: _Context
    ) -> AsyncIterator[pb.ReadLogsResponse]:
        """Send the output of a rank, oldest first."""
        async with contextlib.aclosing(self._output.read(request)) as parts:
            async for part in parts:
                yield part

    async def ExplainJob(
        self, request: pb.ExplainJobRequest, context: _Context
    ) -> pb.ExplainJobResponse:
        """Explain a round's decision on a job, and try steps that would help it."""
        return await self._explanations.explain(request, context)

    async def _read_watched(self, key: tuple[str, str]) -> JobRecord:
        cluster, job = key
        return await self._calls.run(self._store.read, get_job, cluster, job)

    def _submit_job(self, request: pb.SubmitJobRequest) -> pb.Job:
        cluster = names.parse_cluster("parent", request.parent)
        if request.HasField("array"):
            raise InvalidInput("array", "is for SubmitJobs, which returns several jobs; call that")
        spec = self._spec("", cluster, request, self._plan_reader(cluster))
        key = fields.request_key(request, request.request_id)

        standing = self._policy_on(cluster, [spec])
        remarks = self._remark_names(cluster, [spec])
        lacks = self._find_lacks(cluster, [spec])

        def work(connection: Connection) -> bytes:
            self._require_future("job.deadline", spec)
            _require_name("job", spec, remarks)
            (record,) = submit_jobs(connection, cluster, [spec], IDENTITY.get().tenants)
            return _warned(record, standing, remarks, lacks).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Job.FromString(kept)

    def _policy_on(self, cluster: str, specs: Sequence[JobSpec]) -> RoundOptions | None:
        """Return the standing policy if it may ignore a wish of the jobs, else None."""
        wishes = any(math.isfinite(spec.deadline_s) for spec in specs)
        return self._policies.of(cluster).options if wishes else None

    def _submit_jobs(self, request: pb.SubmitJobsRequest) -> pb.SubmitJobsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("requests", len(request.requests), limits.MAX_JOBS)
        read_plan = self._plan_reader(cluster)
        ranges = ranges_of(request.requests, limits.MAX_JOBS)
        stated = [
            self._inner_spec(i, cluster, inner, read_plan)
            for i, inner in enumerate(request.requests)
        ]
        expanded = [
            [spec] if indices is None else expand_array(f"requests[{i}]", spec, indices)
            for i, (spec, indices) in enumerate(zip(stated, ranges, strict=True))
        ]
        specs = list(chain.from_iterable(expanded))
        fields.require_distinct(
            (f"requests[{i}].job_id", spec.name) for i, own in enumerate(expanded) for spec in own
        )
        fields.require_distinct(
            (f"requests[{i}].job_id", spec.name) for i, spec in enumerate(stated)
        )
        key = fields.request_key(request, request.request_id)
        standing = self._policy_on(cluster, specs)
        remarks = self._remark_names(cluster, stated)
        lacks = self._find_lacks(cluster, stated)

        def work(connection: Connection) -> bytes:
            for i, spec in enumerate(stated):
                self._require_future(f"requests[{i}].job.deadline", spec)
                _require_name(f"requests[{i}].job", spec, remarks)
            stored = submit_jobs(connection, cluster, specs, IDENTITY.get().tenants)
            jobs = [_warned(record, standing, remarks, lacks) for record in stored]
            return pb.SubmitJobsResponse(jobs=jobs).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.SubmitJobsResponse.FromString(kept)

    def _remark_names(self, cluster: str, specs: Sequence[JobSpec]) -> NameRemarks:
        """Return the remarks on the names of the jobs' models."""
        return remark_names(specs, partial(self._store.read, list_model_names, cluster))

    def _find_lacks(self, cluster: str, specs: Sequence[JobSpec]) -> dict[str, RuntimeLack]:
        """Return the runtimes that jobs need and no node offers, by name."""
        runtimes = {_needed_runtime(spec) for spec in specs} - {REPLAY}
        return self._store.find_lacks(cluster, runtimes) if runtimes else {}

    def _plan_reader(self, cluster: str) -> convert.PlanReader:
        """Return the reader of the plans of one request, for which models are listed at most once."""
        return partial(read_job_plan, models=cache(partial(self._store.read, list_models, cluster)))

    def _inner_spec(
        self, i: int, cluster: str, inner: pb.SubmitJobRequest, read_plan: convert.PlanReader
    ) -> JobSpec:
        for name in ("parent", "validate_only", "request_id"):
            if getattr(inner, name):
                raise InvalidInput(f"requests[{i}].{name}", "set it on the outer request only")
        return self._spec(f"requests[{i}].", cluster, inner, read_plan)

    def _spec(
        self,
        prefix: str,
        cluster: str,
        request: pb.SubmitJobRequest,
        read_plan: convert.PlanReader,
    ) -> JobSpec:
        name = names.require_identifier(f"{prefix}job_id", request.job_id or self._new_id())
        return convert.to_job_spec(f"{prefix}job", cluster, name, request.job, read_plan)

    def _require_future(self, field: str, spec: JobSpec) -> None:
        """Refuse a deadline that has passed.

        This is called inside the transaction, so that a repeated call succeeds.
        """
        if spec.deadline_s <= self._wall_s():
            raise InvalidInput(field, "has passed; set a later one, or none")

    def _list_jobs(self, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=10_000, counts=True)
        states = convert.to_states("states", list(request.states))
        found, cursor = self._store.read(
            list_jobs, cluster, states, page.number, page.size, tenants=IDENTITY.get().tenants
        )
        return pb.ListJobsResponse(jobs=map(_shown, found), next_page_token=page.token(cursor))

    def _update_job(self, request: pb.UpdateJobRequest) -> pb.Job:
        cluster, job = names.parse_job("job.name", request.job.name)
        paths = fields.mask_paths("update_mask", request.update_mask, convert.CHANGEABLE)
        paths = paths or convert.populated_fields(request.job)
        if not paths:
            raise InvalidInput(
                "update_mask",
                f"names no field to change; it can name: {', '.join(convert.CHANGEABLE)}",
            )
        changes = convert.to_changes("job", cluster, request.job)
        version = fields.version_of(request.job.etag)
        key = fields.request_key(request, request.request_id)
        spec = replace(self._store.read(get_job, cluster, job).spec, **changes)
        if "deadline" in paths:
            require_schedulable_deadline("job.deadline", spec)
        if "pinned_gpu_type" in paths:
            convert.require_type_of_pin("job", spec)
        if "allowed_gpu_types" in paths:
            convert.require_allowed_types("job", spec)
        if {"min_gpus", "max_gpus"} & set(paths):
            convert.require_bounds("job", spec)
        if "preemptible" in paths:
            convert.require_no_guarantee("job", spec)

        standing = self._policy_on(cluster, [spec]) if "deadline" in paths else None

        def work(connection: Connection) -> bytes:
            if "deadline" in paths:
                self._require_future("job.deadline", spec)
            changed = [convert.CHANGEABLE[path] for path in paths]
            record = update_job(connection, cluster, spec, changed, version)
            return _warned(record, standing).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Job.FromString(kept)

    def _job_event(self, request: _Event, key: Request | None, event: JobEvent) -> pb.Job:
        cluster, job = names.parse_job("name", request.name)
        version = fields.version_of(request.etag)

        def work(connection: Connection) -> bytes:
            return _shown(apply_event(connection, cluster, job, event, version)).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Job.FromString(kept)


def _require_name(field: str, spec: JobSpec, remarks: NameRemarks) -> None:
    """Refuse a job whose model is misspelt. Like a deadline, it is refused inside the transaction."""
    remark = remarks.get(name_key(spec))
    if remark is not None and remark.refused:
        raise InvalidInput(f"{field}.workload.model", remark.text)


def _needed_runtime(spec: JobSpec) -> str:
    return needed_runtime(spec.runtime, spec.launch.env)


def _warned(
    record: JobRecord,
    standing: RoundOptions | None,
    remarks: NameRemarks = NO_REMARKS,
    lacks: Mapping[str, RuntimeLack] = MappingProxyType({}),
) -> pb.Job:
    """Return the message of a stored job, with warnings.

    They are of what the ``standing`` policy ignores, of a model that nobody knows, and of a runtime
    that no node offers, or that can run no plan of the model.
    """
    message = _shown(record)
    if (lack := lacks.get(_needed_runtime(record.spec))) is not None:
        message.warnings.append(f"{lack.message}; the job waits until one does: {lack.next_step}")
    if remark := remark_plans(record.spec):
        message.warnings.append(remark)
    if (name_remark := remarks.get(name_key(record.spec))) is not None:
        message.warnings.append(name_remark.text)
    if standing is not None:
        message.warnings.extend(unheeded_wishes(record, standing))
    return message


def _shown(record: JobRecord) -> pb.Job:
    """Return the message of a stored job, with what its caller may see."""
    return convert.of_job(record, IDENTITY.get().sees_tenant)
