"""A valid request for each method with one request message and one answer."""

from __future__ import annotations

import uuid
from typing import Final

from google.protobuf.duration_pb2 import Duration
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
    webhooks_pb2,
    what_if_pb2,
)

GPU_TYPE: Final = "a40"


def cluster_name(cluster: str) -> str:
    """Return the cluster's resource name."""
    return f"clusters/{cluster}"


def small_job(gpus: int = 1, weight: float = 1e-6, iterations: int = 10**9) -> jobs_pb2.Job:
    """Return a job of low weight, which waits if better jobs run."""
    return jobs_pb2.Job(
        workload=workload_on(gpus),
        iterations=iterations,
        requested_gpus=gpus,
        weight=weight,
        restart=Duration(seconds=0),
    )


def workload_on(gpus: int) -> estimates_pb2.Workload:
    """Return a workload that runs on exactly this number of GPUs."""
    return estimates_pb2.Workload(model="m", params=f"{gpus}B", global_batch=64)


def cell_of(gpus: int) -> estimates_pb2.CellEstimate:
    """Return the estimate of the workload that runs on this number of GPUs."""
    return estimates_pb2.CellEstimate(
        workload=workload_on(gpus),
        cell=estimates_pb2.Cell(gpu_type=GPU_TYPE, gpus=gpus, pipeline_degree=1),
        nodes=-(-gpus // 2),
        iter_time_s=1.0,
        source=estimates_pb2.MEASURED,
    )


def sample_requests(cluster: str, job: str, node: str = "spare") -> dict[str, Message]:
    """Return a request for each method without streams, by path. No request stops the job."""
    place = cluster_name(cluster)
    jobs, estimates, scheduler = "Jobs", "Estimates", "Scheduler"
    job_name, topology = f"{place}/jobs/{job}", f"{place}/topology"
    gpu_type = clusters_pb2.GpuType(name=GPU_TYPE, memory_bytes=48 << 30)
    spare = clusters_pb2.Node(name=f"{place}/nodes/{node}", gpu_type=GPU_TYPE, gpus=1)
    tenant = tenants_pb2.Tenant(name=f"{place}/tenants/t", weight=1.0)
    heavier = what_if_pb2.JobChange(job=job_name, weight=2.0)
    change = what_if_pb2.HypotheticalChange(job_changed=heavier)
    layer = estimates_pb2.LayerProfile(
        kind="k",
        layers=1,
        samples=1,
        tensor_parallel=1,
        forward_s=1,
        backward_s=1,
        method="wall clock",
        repeats=1,
        device_s=1,
    )
    clos = (
        '{"kind": "clos", "hosts": 4, "host": "a100", "tors": 1, "aggregations": 1,'
        ' "tor_bytes_per_s": 1e10}'
    )
    model = estimates_pb2.Model(
        model="own",
        params="1B",
        architecture="{architecture: transformer, layers: 2, hidden: 64, heads: 2, sequence: 64,"
        " vocabulary: 100, positions: rotary, dtype: bf16}",
    )
    # Names of tokens and agents that do not exist, so that nobody loses access.
    join_token = access_pb2.JoinToken(nodes=["unused-*"])
    result: dict[tuple[str, str], Message] = {
        ("Access", "GetCaller"): access_pb2.GetCallerRequest(),
        ("Access", "GetServer"): access_pb2.GetServerRequest(),
        ("Access", "GetLogin"): access_pb2.GetLoginRequest(),
        ("Access", "CreateToken"): access_pb2.CreateTokenRequest(
            token=access_pb2.Token(name="unused", role="viewer", all_tenants=True)
        ),
        ("Access", "ListTokens"): access_pb2.ListTokensRequest(),
        ("Access", "RevokeToken"): access_pb2.RevokeTokenRequest(name="unused"),
        ("Access", "CreateJoinToken"): access_pb2.CreateJoinTokenRequest(
            parent=place, join_token=join_token
        ),
        ("Access", "ListJoinTokens"): access_pb2.ListJoinTokensRequest(parent=place),
        ("Access", "RevokeJoinToken"): access_pb2.RevokeJoinTokenRequest(parent=place, id="unused"),
        ("Access", "ListCertificates"): access_pb2.ListCertificatesRequest(parent=place),
        ("Access", "RevokeAgent"): access_pb2.RevokeAgentRequest(parent=place, agent="unused"),
        ("Access", "ListAuditEntries"): access_pb2.ListAuditEntriesRequest(page_size=100),
        ("Agents", "Enrol"): agents_pb2.EnrolRequest(
            parent=place,
            agent_id="unused",
            nodes=["unused-0"],
            join_token="tessera_join_" + 12 * "a" + "_" + 43 * "b",
            signing_request="no request",
        ),
        ("Agents", "RenewCertificate"): agents_pb2.RenewCertificateRequest(
            signing_request="no request"
        ),
        ("Clusters", "UpsertCluster"): clusters_pb2.UpsertClusterRequest(
            cluster=clusters_pb2.Cluster(name=place, gpu_types=[gpu_type])
        ),
        ("Clusters", "GetCluster"): clusters_pb2.GetClusterRequest(name=place),
        ("Clusters", "ListClusters"): clusters_pb2.ListClustersRequest(page_size=1000),
        ("Clusters", "UpsertNodes"): clusters_pb2.UpsertNodesRequest(parent=place, nodes=[spare]),
        ("Clusters", "GetNode"): clusters_pb2.GetNodeRequest(name=spare.name),
        ("Clusters", "ListNodes"): clusters_pb2.ListNodesRequest(parent=place, page_size=1000),
        ("Clusters", "CreateReservation"): reservations_pb2.CreateReservationRequest(
            parent=place,
            reservation=reservations_pb2.Reservation(
                name=f"{place}/reservations/r",
                end_time=Timestamp(seconds=4_000_000_000),
                nodes=["n"],
                maintenance=True,
            ),
            validate_only=True,
        ),
        ("Clusters", "GetReservation"): reservations_pb2.GetReservationRequest(
            name=f"{place}/reservations/r"
        ),
        ("Clusters", "ListReservations"): reservations_pb2.ListReservationsRequest(parent=place),
        ("Clusters", "UpdateReservation"): reservations_pb2.UpdateReservationRequest(
            name=f"{place}/reservations/r", end_time=Timestamp(seconds=4_000_000_000)
        ),
        ("Clusters", "DeleteReservations"): reservations_pb2.DeleteReservationsRequest(
            parent=place, names=[f"{place}/reservations/r"], allow_missing=True
        ),
        ("Clusters", "DrainNodes"): clusters_pb2.DrainNodesRequest(
            parent=place, names=[spare.name]
        ),
        ("Clusters", "UndrainNodes"): clusters_pb2.UndrainNodesRequest(
            parent=place, names=[spare.name]
        ),
        # These requests do not affect the nodes, types and jobs of the agent, in whatever order
        # they arrive.
        ("Clusters", "DeleteCluster"): clusters_pb2.DeleteClusterRequest(
            name=place, validate_only=True
        ),
        ("Clusters", "DeleteGpuTypes"): clusters_pb2.DeleteGpuTypesRequest(
            parent=place, gpu_types=[GPU_TYPE], validate_only=True
        ),
        ("Clusters", "DeleteNode"): clusters_pb2.DeleteNodeRequest(name=spare.name),
        ("Clusters", "DeleteNodes"): clusters_pb2.DeleteNodesRequest(
            parent=place, names=[spare.name]
        ),
        (estimates, "DeleteCells"): estimates_pb2.DeleteCellsRequest(
            parent=place, workload=workload_on(1), validate_only=True
        ),
        (estimates, "DeleteModels"): estimates_pb2.DeleteModelsRequest(
            parent=place, models=[estimates_pb2.ModelName(model="own", params="1B")]
        ),
        (estimates, "UpsertCells"): estimates_pb2.UpsertCellsRequest(
            parent=place, cells=[cell_of(gpus) for gpus in (1, 2, 4)]
        ),
        (estimates, "ListCells"): estimates_pb2.ListCellsRequest(parent=place, page_size=1000),
        (estimates, "EstimateCells"): estimates_pb2.EstimateCellsRequest(
            parent=place,
            gpus=[1, 2],
            gpu_types=[GPU_TYPE],
            validate_only=True,
            workload=estimates_pb2.Workload(model="GPT", params="1.3B", global_batch=1024),
        ),
        (estimates, "UpsertModels"): estimates_pb2.UpsertModelsRequest(
            parent=place, models=[model]
        ),
        (estimates, "ListModels"): estimates_pb2.ListModelsRequest(
            parent=place, page_size=1000, with_published=True
        ),
        (estimates, "AddProfiles"): estimates_pb2.AddProfilesRequest(
            parent=place,
            workload=workload_on(1),
            gpu_type=GPU_TYPE,
            task="t",
            source="s:f",
            dtype="bf16",
            device="d",
            layers=[layer],
            date="2026-01-01",
        ),
        (estimates, "GetProfiling"): estimates_pb2.GetProfilingRequest(
            parent=place, workload=workload_on(1)
        ),
        (jobs, "SubmitJob"): jobs_pb2.SubmitJobRequest(parent=place, job=small_job()),
        (jobs, "SubmitJobs"): submit_request(cluster, 10),
        (jobs, "GetJob"): jobs_pb2.GetJobRequest(name=job_name),
        (jobs, "ListJobs"): jobs_pb2.ListJobsRequest(parent=place, page_size=1000),
        (jobs, "UpdateJob"): jobs_pb2.UpdateJobRequest(
            job=jobs_pb2.Job(name=job_name, labels={"x": "y"})
        ),
        (jobs, "ListJobEvents"): jobs_pb2.ListJobEventsRequest(parent=job_name),
        (jobs, "ExplainJob"): jobs_pb2.ExplainJobRequest(name=job_name),
        (jobs, "GetJobCurves"): jobs_pb2.GetJobCurvesRequest(name=job_name),
        (jobs, "CancelJob"): jobs_pb2.CancelJobRequest(name=job_name, validate_only=True),
        (jobs, "HoldJob"): jobs_pb2.HoldJobRequest(name=job_name, validate_only=True),
        (jobs, "ReleaseJob"): jobs_pb2.ReleaseJobRequest(name=job_name, validate_only=True),
        (jobs, "GetArray"): jobs_pb2.GetArrayRequest(name=f"{place}/arrays/swarm"),
        (jobs, "ChangeArray"): jobs_pb2.ChangeArrayRequest(
            name=f"{place}/arrays/swarm",
            change=jobs_pb2.ChangeArrayRequest.CANCEL,
            validate_only=True,
        ),
        ("Networks", "GetTopology"): networks_pb2.GetTopologyRequest(name=topology),
        ("Networks", "UpdateTopology"): networks_pb2.UpdateTopologyRequest(
            topology=networks_pb2.Topology(name=topology, document=clos)
        ),
        ("Networks", "DeleteTopology"): networks_pb2.DeleteTopologyRequest(name=topology),
        ("Networks", "GetNetworkPlan"): networks_pb2.GetNetworkPlanRequest(
            name=f"{place}/networkPlans/-"
        ),
        ("Networks", "ListNetworkPlans"): networks_pb2.ListNetworkPlansRequest(parent=place),
        ("Networks", "PlanNetwork"): networks_pb2.PlanNetworkRequest(parent=place),
        (scheduler, "Schedule"): scheduler_pb2.ScheduleRequest(parent=place, summary_only=True),
        (scheduler, "GetRound"): scheduler_pb2.GetRoundRequest(name=f"{place}/rounds/1"),
        (scheduler, "ListRounds"): scheduler_pb2.ListRoundsRequest(parent=place, page_size=100),
        (scheduler, "WhatIf"): scheduler_pb2.WhatIfRequest(
            parent=place, hypothesis=scheduler_pb2.Hypothesis(changes=[change])
        ),
        (scheduler, "ReplayRound"): scheduler_pb2.ReplayRoundRequest(name=f"{place}/rounds/1"),
        (scheduler, "VerifyRound"): scheduler_pb2.VerifyRoundRequest(
            name=f"{place}/rounds/1", with_document=True
        ),
        (scheduler, "SetPolicy"): scheduler_pb2.SetPolicyRequest(
            parent=place, options=scheduler_pb2.RoundOptions(objective="jct"), message="m"
        ),
        (scheduler, "GetPolicy"): scheduler_pb2.GetPolicyRequest(parent=place),
        (scheduler, "ListPolicies"): scheduler_pb2.ListPoliciesRequest(parent=place),
        ("Tenants", "UpsertTenants"): tenants_pb2.UpsertTenantsRequest(
            parent=place, tenants=[tenant]
        ),
        ("Tenants", "ListTenants"): tenants_pb2.ListTenantsRequest(parent=place),
        ("Tenants", "GetUsage"): tenants_pb2.GetUsageRequest(
            parent=place, group_by=["tenant", "type", "day", "label:x"]
        ),
        ("Tenants", "DeleteTenants"): tenants_pb2.DeleteTenantsRequest(
            parent=place, names=[tenant.name]
        ),
        ("Webhooks", "CreateWebhook"): webhooks_pb2.CreateWebhookRequest(
            parent=place,
            webhook_id="w",
            webhook=webhooks_pb2.Webhook(url="https://hooks.invalid/w"),
            validate_only=True,
        ),
        ("Webhooks", "ListWebhooks"): webhooks_pb2.ListWebhooksRequest(parent=place),
        ("Webhooks", "DeleteWebhook"): webhooks_pb2.DeleteWebhookRequest(
            name=f"{place}/webhooks/w", validate_only=True
        ),
        ("Webhooks", "TestWebhook"): webhooks_pb2.TestWebhookRequest(name=f"{place}/webhooks/w"),
    }
    return {f"/tessera.v1.{service}/{name}": request for (service, name), request in result.items()}


def submit_request(
    cluster: str, jobs: int, *, validate_only: bool = False
) -> jobs_pb2.SubmitJobsRequest:
    """Return a request that submits this number of jobs, with names chosen by the server."""
    one = jobs_pb2.SubmitJobRequest(job=small_job())
    return jobs_pb2.SubmitJobsRequest(
        parent=cluster_name(cluster), requests=[one] * jobs, validate_only=validate_only
    )


def request_id() -> str:
    """Return an id that makes a call repeatable."""
    return str(uuid.uuid4())
