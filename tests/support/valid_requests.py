"""A valid request of every method but those of webhooks, for tests that change its bytes."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

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

Requests = dict[str, list[Message]]
"""Requests by the name of their method. Streams have the messages of one call."""

JOB: Final = f"{C}/jobs/j"
CLOS: Final = (
    "{kind: clos, nodes: [n1, n2], host: a100, tors: 1, aggregations: 1, tor_bytes_per_s: 25e9}"
)
MODEL: Final = (
    "{architecture: transformer, layers: 2, hidden: 64, heads: 2, sequence: 8, vocabulary: 99}"
)


def valid_requests() -> Requests:
    """Return the requests of all services."""
    return {
        **access_requests(),
        **agent_requests(),
        **cluster_requests(),
        **estimate_requests(),
        **job_requests(),
        **network_requests(),
        **scheduler_requests(),
        **tenant_requests(),
    }


def access_requests() -> Requests:
    """Return the requests of the service Access."""
    token = access_pb2.Token(name="ana", role="user", tenants=["t"], clusters=["c"])
    join_token = access_pb2.JoinToken(nodes=["n*"], uses=2)
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
    }


def agent_requests() -> Requests:
    """Return the requests of the service Agents."""
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
    enrol = agents_pb2.EnrolRequest(
        parent=C,
        agent_id="agent",
        nodes=["n1"],
        join_token="tessera_join_" + 12 * "a" + "_" + 43 * "b",
        signing_request="none",
    )
    return {
        "Enrol": [enrol],
        "RenewCertificate": [agents_pb2.RenewCertificateRequest(signing_request="none")],
        "Sync": [
            agents_pb2.AgentMessage(sent_at_s=1.0, hello=hello),
            agents_pb2.AgentMessage(sent_at_s=2.0, observed=observed),
            agents_pb2.AgentMessage(sent_at_s=3.0),
        ],
    }


def cluster_requests() -> Requests:
    """Return the requests of the service Clusters."""
    return {
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
    }


def estimate_requests() -> Requests:
    """Return the requests of the service Estimates."""
    layer = estimates_pb2.LayerProfile(
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
    return {
        "UpsertCells": [
            some_cells(a_cell(2), a_cell(4, sd=0.1), a_cell(8, infeasible=True, iter_time_s=0.0))
        ],
        "DeleteCells": [
            estimates_pb2.DeleteCellsRequest(
                parent=C, workload=a_workload(), gpu_type="a100", gpus=2, validate_only=True
            )
        ],
        "ListCells": [estimates_pb2.ListCellsRequest(parent=C, workload=a_workload())],
        "EstimateCells": [
            estimates_pb2.EstimateCellsRequest(
                parent=C, workload=a_workload(), gpus=[1], gpu_types=["a100"], pipeline_degrees=[1]
            )
        ],
        "UpsertModels": [
            estimates_pb2.UpsertModelsRequest(
                parent=C,
                models=[
                    estimates_pb2.Model(model="m", params="1B", architecture=MODEL, micro_batches=4)
                ],
            )
        ],
        "DeleteModels": [
            estimates_pb2.DeleteModelsRequest(
                parent=C,
                models=[estimates_pb2.ModelName(model="m", params="1B")],
                allow_missing=True,
            )
        ],
        "ListModels": [estimates_pb2.ListModelsRequest(parent=C, page_size=3, with_published=True)],
        "AddProfiles": [
            estimates_pb2.AddProfilesRequest(
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
        "GetProfiling": [estimates_pb2.GetProfilingRequest(parent=C, workload=a_workload())],
    }


def job_requests() -> Requests:
    """Return the requests of the service Jobs."""
    return {
        "SubmitJob": [
            a_submit("k", labels={"a": "b"}, command=["true"], tenant="t", launch=WHOLE_MESSAGE)
        ],
        "SubmitJobs": [a_batch(a_submit("l"), a_submit("m"))],
        "GetJob": [jobs_pb2.GetJobRequest(name=JOB)],
        "ListJobs": [jobs_pb2.ListJobsRequest(parent=C, states=[jobs_pb2.QUEUED], page_size=5)],
        "UpdateJob": [
            jobs_pb2.UpdateJobRequest(job=jobs_pb2.Job(name=JOB, weight=2.0, priority=3))
        ],
        "ListJobEvents": [jobs_pb2.ListJobEventsRequest(parent=f"{C}/jobs/j")],
        "ExplainJob": [
            jobs_pb2.ExplainJobRequest(name=JOB),
            jobs_pb2.ExplainJobRequest(name=JOB, round=1),
        ],
        "CancelJob": [jobs_pb2.CancelJobRequest(name=JOB, validate_only=True)],
        "HoldJob": [jobs_pb2.HoldJobRequest(name=JOB)],
        "ReleaseJob": [jobs_pb2.ReleaseJobRequest(name=JOB)],
        "WatchJob": [jobs_pb2.WatchJobRequest(name=JOB)],
        "ReadLogs": [jobs_pb2.ReadLogsRequest(name=JOB, rank=1, generation=1, offset=-9)],
        "GetJobCurves": [jobs_pb2.GetJobCurvesRequest(name=JOB, gpus=2)],
        "GetArray": [jobs_pb2.GetArrayRequest(name=f"{C}/arrays/a")],
        "ChangeArray": [
            jobs_pb2.ChangeArrayRequest(
                name=f"{C}/arrays/a", change=jobs_pb2.ChangeArrayRequest.HOLD
            )
        ],
    }


def network_requests() -> Requests:
    """Return the requests of the service Networks."""
    return {
        "GetTopology": [networks_pb2.GetTopologyRequest(name=f"{C}/topology")],
        "UpdateTopology": [
            networks_pb2.UpdateTopologyRequest(
                topology=networks_pb2.Topology(name=f"{C}/topology", document=CLOS)
            )
        ],
        "DeleteTopology": [networks_pb2.DeleteTopologyRequest(name=f"{C}/topology")],
        "GetNetworkPlan": [networks_pb2.GetNetworkPlanRequest(name=f"{C}/networkPlans/-")],
        "ListNetworkPlans": [networks_pb2.ListNetworkPlansRequest(parent=C, page_size=2)],
        "PlanNetwork": [networks_pb2.PlanNetworkRequest(parent=C, dry_run=True)],
    }


def scheduler_requests() -> Requests:
    """Return the requests of the service Scheduler."""
    quick = scheduler_pb2.RoundOptions(solver="greedy", seed=1)
    return {
        "Schedule": [scheduler_pb2.ScheduleRequest(parent=C, options=quick)],
        "GetRound": [scheduler_pb2.GetRoundRequest(name=f"{C}/rounds/1")],
        "ListRounds": [scheduler_pb2.ListRoundsRequest(parent=C, page_size=1)],
        "ReplayRound": [scheduler_pb2.ReplayRoundRequest(name=f"{C}/rounds/1", with_snapshot=True)],
        "WhatIf": [
            scheduler_pb2.WhatIfRequest(
                parent=C,
                hypothesis=scheduler_pb2.Hypothesis(
                    changes=[
                        what_if_pb2.HypotheticalChange(
                            job_changed=what_if_pb2.JobChange(job=JOB, weight=2.0)
                        )
                    ]
                ),
            )
        ],
        "VerifyRound": [scheduler_pb2.VerifyRoundRequest(name=f"{C}/rounds/1", with_document=True)],
        "SetPolicy": [
            scheduler_pb2.SetPolicyRequest(parent=C, options=quick, message="m", etag='"0"')
        ],
        "GetPolicy": [scheduler_pb2.GetPolicyRequest(parent=C, version=0)],
        "ListPolicies": [scheduler_pb2.ListPoliciesRequest(parent=C, page_size=1)],
    }


def tenant_requests() -> Requests:
    """Return the requests of the service Tenants."""
    return {
        "UpsertTenants": [some_tenants(a_tenant("t", weight=2.0, quotas={"a100": 1}))],
        "ListTenants": [tenants_pb2.ListTenantsRequest(parent=C)],
        "GetUsage": [
            tenants_pb2.GetUsageRequest(parent=C, tenants=["t"], group_by=["type", "label:x"])
        ],
        "DeleteTenants": [tenants_pb2.DeleteTenantsRequest(parent=C, names=[f"{C}/tenants/t"])],
    }
