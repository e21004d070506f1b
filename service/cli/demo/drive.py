"""Actions on a running Tessera: fill it with jobs, schedule it, and wait until it settles."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import islice

from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service.cli.demo.stack import Stack
from tessera.service.server.convert import estimate_to_proto, job_spec_to_proto
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2, scheduler_pb2

CLUSTER = "bench"
PARENT = f"clusters/{CLUSTER}"

UNSETTLED_STATES = [
    jobs_pb2.STARTING,
    jobs_pb2.STOPPING,
    jobs_pb2.HOLDING,
    jobs_pb2.CANCELLING,
    jobs_pb2.FAILING,
]


def make_cluster(
    stack: Stack, types: Iterable[GpuType], nodes: Sequence[NodeSpec], cluster: str = CLUSTER
) -> None:
    """Create a cluster, by default the benchmark's."""
    parent = f"clusters/{cluster}"
    gpu_types = [clusters_pb2.GpuType(name=t.name, memory_bytes=t.memory_bytes) for t in types]
    stack.clusters.UpsertCluster(
        clusters_pb2.UpsertClusterRequest(
            cluster=clusters_pb2.Cluster(name=parent, gpu_types=gpu_types)
        )
    )
    stack.clusters.UpsertNodes(
        clusters_pb2.UpsertNodesRequest(
            parent=parent,
            nodes=[
                clusters_pb2.Node(
                    name=f"{parent}/nodes/{n.name}",
                    gpu_type=n.gpu_type,
                    gpus=n.gpus,
                    rack=n.rack,
                    labels=n.labels,
                )
                for n in nodes
            ],
        )
    )


def add_estimates(
    stack: Stack, estimates: Sequence[EstimateRecord], cluster: str = CLUSTER
) -> None:
    """Send the estimates, all in one call."""
    parent, cells = f"clusters/{cluster}", [estimate_to_proto(e) for e in estimates]
    stack.estimates.UpsertCells(estimates_pb2.UpsertCellsRequest(parent=parent, cells=cells))


def submit_jobs(
    stack: Stack, jobs: Iterable[JobSpec], batch: int = 5000, cluster: str = CLUSTER
) -> None:
    """Submit jobs in batches."""
    rest = iter(jobs)
    while some := list(islice(rest, batch)):
        requests = [
            jobs_pb2.SubmitJobRequest(job_id=spec.name, job=job_spec_to_proto(cluster, spec))
            for spec in some
        ]
        stack.jobs.SubmitJobs(
            jobs_pb2.SubmitJobsRequest(
                parent=f"clusters/{cluster}", requests=requests, request_id=str(uuid.uuid4())
            )
        )


def schedule_round(stack: Stack, deadline_s: float, **options: object) -> scheduler_pb2.Round:
    """Run one round and commit it."""
    return stack.scheduler.Schedule(
        scheduler_pb2.ScheduleRequest(
            parent=PARENT,
            options=scheduler_pb2.RoundOptions(**options),  # type: ignore[arg-type]
            summary_only=True,
            request_id=str(uuid.uuid4()),
        ),
        timeout=deadline_s,
    )


def replay_round(stack: Stack, name: str, **options: object) -> scheduler_pb2.Round:
    """Solve a stored round's snapshot again with other options."""
    request = scheduler_pb2.ReplayRoundRequest(
        name=name,
        options=scheduler_pb2.RoundOptions(**options),  # type: ignore[arg-type]
        summary_only=True,
    )
    return stack.scheduler.ReplayRound(request, timeout=120).round


def wait_until_settled(stack: Stack, ended: Sequence[str] = (), limit_s: float = 60.0) -> None:
    """Wait until every gang has started or stopped, and the jobs in ``ended`` have ended."""
    until, waiting = time.monotonic() + limit_s, list(ended)
    request = jobs_pb2.ListJobsRequest(parent=PARENT, states=UNSETTLED_STATES, page_size=1)
    while time.monotonic() < until:
        waiting = [
            job
            for job in waiting
            if not stack.jobs.GetJob(jobs_pb2.GetJobRequest(name=f"{PARENT}/jobs/{job}")).HasField(
                "end_time"
            )
        ]
        if not waiting and not stack.jobs.ListJobs(request).jobs:
            return
        time.sleep(0.02)
    raise TimeoutError(f"jobs are still starting or stopping after {limit_s} s")
