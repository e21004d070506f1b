"""A valid request of every method but those of webhooks, for tests that change its bytes."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.v1 import agents_pb2, jobs_pb2, networks_pb2, reservations_pb2, scheduler_pb2
from tests.support.api import (
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
from tests.support.sample_requests import sample_requests

Requests = dict[str, list[Message]]
"""Requests by the name of their method. Streams have the messages of one call."""

JOB: Final = f"{C}/jobs/j"
CLOS: Final = (
    "{kind: clos, nodes: [n1, n2], host: a100, tors: 1, aggregations: 1, tor_bytes_per_s: 25e9}"
)
GPU_TYPE: Final = "a100"


def valid_requests() -> Requests:
    """Return the requests of all services, for the cluster, nodes and jobs of ``api``."""
    samples = sample_requests("c", "j", node="n2").items()
    requests: Requests = {
        path.rpartition("/")[2]: [request]
        for path, request in samples
        if not path.startswith("/tessera.v1.Webhooks/")
    }
    for (request,) in requests.values():
        fields = request.DESCRIPTOR.fields_by_name
        if "gpu_type" in fields:
            request.MergeFrom(type(request)(gpu_type=GPU_TYPE))
        if "workload" in fields:
            request.MergeFrom(type(request)(workload=a_workload()))
    return requests | _detailed_requests()


def _detailed_requests() -> Requests:
    """Return the requests that state more fields than the samples, and the messages of streams."""
    quick = scheduler_pb2.RoundOptions(solver="greedy", seed=1)
    return {
        "Sync": _agent_messages(),
        "UpsertCluster": [a_cluster("a100", "v100")],
        "UpsertNodes": [some_nodes("n1", "n2")],
        "CreateReservation": [
            reservations_pb2.CreateReservationRequest(
                parent=C,
                reservation=reservations_pb2.Reservation(
                    name=f"{C}/reservations/r",
                    end_time=Timestamp(seconds=4_000_000_000),
                    nodes=["n1"],
                    maintenance=True,
                ),
            )
        ],
        "UpsertCells": [
            some_cells(a_cell(2), a_cell(4, sd=0.1), a_cell(8, infeasible=True, iter_time_s=0.0))
        ],
        "UpsertTenants": [some_tenants(a_tenant("t", weight=2.0, quotas={"a100": 1}))],
        "UpdateTopology": [
            networks_pb2.UpdateTopologyRequest(
                topology=networks_pb2.Topology(name=f"{C}/topology", document=CLOS)
            )
        ],
        "PlanNetwork": [networks_pb2.PlanNetworkRequest(parent=C, dry_run=True)],
        "SubmitJob": [
            a_submit("k", labels={"a": "b"}, command=["true"], tenant="t", launch=WHOLE_MESSAGE)
        ],
        "SubmitJobs": [a_batch(a_submit("l"), a_submit("m"))],
        "ListJobs": [jobs_pb2.ListJobsRequest(parent=C, states=[jobs_pb2.QUEUED], page_size=5)],
        "UpdateJob": [
            jobs_pb2.UpdateJobRequest(job=jobs_pb2.Job(name=JOB, weight=2.0, priority=3))
        ],
        "ExplainJob": [
            jobs_pb2.ExplainJobRequest(name=JOB),
            jobs_pb2.ExplainJobRequest(name=JOB, round=1),
        ],
        "HoldJob": [jobs_pb2.HoldJobRequest(name=JOB)],
        "ReleaseJob": [jobs_pb2.ReleaseJobRequest(name=JOB)],
        "WatchJob": [jobs_pb2.WatchJobRequest(name=JOB)],
        "ReadLogs": [jobs_pb2.ReadLogsRequest(name=JOB, rank=1, generation=1, offset=-9)],
        "GetJobCurves": [jobs_pb2.GetJobCurvesRequest(name=JOB, gpus=2)],
        "Schedule": [scheduler_pb2.ScheduleRequest(parent=C, options=quick)],
        "SetPolicy": [
            scheduler_pb2.SetPolicyRequest(parent=C, options=quick, message="m", etag='"0"')
        ],
    }


def _agent_messages() -> list[Message]:
    """Return what an agent of both nodes sends on its stream."""
    nodes = [agents_pb2.AgentNode(node=node, gpu_type=GPU_TYPE, gpus=8) for node in ("n1", "n2")]
    hello = agents_pb2.Hello(parent=C, agent_id="agent", incarnation="first", nodes=nodes)
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
    return [
        agents_pb2.AgentMessage(sent_at_s=1.0, hello=hello),
        agents_pb2.AgentMessage(sent_at_s=2.0, observed=observed),
        agents_pb2.AgentMessage(sent_at_s=3.0),
    ]
