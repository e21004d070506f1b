"""The submissions of a trace's jobs, and which of them a cluster does not have yet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.client import Client
from tessera.formulation.base.values import Workload
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.names import full_name, short_name
from tessera.simulator.traces.dependencies import order_by_dependencies
from tessera.simulator.traces.trace import Arrival
from tessera.v1 import estimates_pb2, jobs_pb2


def make_submissions(
    to: str, arrivals: Sequence[Arrival], tenant: str, at: Timestamp
) -> list[jobs_pb2.SubmitJobRequest]:
    """Return the submissions to the cluster ``to``, each behind those of jobs that it waits for.

    Deadlines count from ``at``. If ``tenant`` is not empty, all jobs are its jobs.
    """
    return [_submission(to, arrival, tenant, at) for arrival in order_by_dependencies(arrivals)]


def missing_submissions(
    client: Client, to: str, requests: Sequence[jobs_pb2.SubmitJobRequest]
) -> list[jobs_pb2.SubmitJobRequest]:
    """Return the submissions whose jobs the cluster does not have, in any state.

    Raises:
        CallFailed: the cluster has a different job of the same name.
    """
    request_all = jobs_pb2.ListJobsRequest(parent=to, page_size=10_000)
    jobs = client.pages(client.stubs.jobs.ListJobs, request_all, lambda page: page.jobs)
    stored_jobs = {short_name(job.name): job for job in jobs}
    missing = []
    for request in requests:
        stored = stored_jobs.get(request.job_id)
        if stored is None:
            missing.append(request)
        elif _traced_properties(stored) != _traced_properties(request.job):
            raise CallFailed(
                f"{stored.name} already exists and differs from the job in the trace;"
                " rename the job in the file, or import into another cluster with --cluster",
                Exit.REFUSED,
            )
    return missing


def drop_dependencies_on_others(
    batch: Sequence[jobs_pb2.SubmitJobRequest],
) -> list[jobs_pb2.SubmitJobRequest]:
    """Return submissions without dependencies on jobs of other batches, which may not be stored."""
    ids, checked = {request.job_id for request in batch}, []
    for request in batch:
        copy = jobs_pb2.SubmitJobRequest()
        copy.CopyFrom(request)
        kept = [d for d in request.job.after if short_name(d.job) in ids]
        del copy.job.after[:]
        copy.job.after.extend(kept)
        checked.append(copy)
    return checked


def _traced_properties(job: jobs_pb2.Job) -> tuple[object, ...]:
    """Return the properties of a job that a trace defines.

    A deadline counts from the import, so only its existence is compared.
    """
    w = job.workload
    return (
        w.model,
        w.params,
        w.global_batch,
        job.iterations,
        job.requested_gpus,
        job.requested_gpu_type,
        job.tenant,
        job.guaranteed,
        job.HasField("deadline"),
        [(dependency.job, dependency.condition) for dependency in job.after],
    )


def _submission(to: str, arrival: Arrival, tenant: str, at: Timestamp) -> jobs_pb2.SubmitJobRequest:
    spec = arrival.spec
    job = jobs_pb2.Job(
        workload=workload_message(spec.workload),
        iterations=spec.iterations,
        requested_gpus=spec.requested_gpus,
        requested_gpu_type=spec.requested_gpu_type,
        tenant=tenant or spec.tenant,
        guaranteed=spec.guaranteed,
        labels=spec.labels,
        requested_cpus=spec.requested_cpus,
        after=[
            jobs_pb2.Dependency(
                job=full_name(to, "jobs", dependency.job),
                condition=jobs_pb2.Dependency.Condition.Value(dependency.condition.name),
            )
            for dependency in spec.after
        ],
    )
    if math.isfinite(spec.deadline_s):
        job.deadline.FromNanoseconds(at.ToNanoseconds() + round(spec.deadline_s * 1e9))
    return jobs_pb2.SubmitJobRequest(job_id=spec.name, job=job)


def workload_message(value: Workload) -> estimates_pb2.Workload:
    """Return the message of a workload."""
    return estimates_pb2.Workload(
        model=value.model, params=value.params, global_batch=value.global_batch
    )
