"""Calls over a real socket against PostgreSQL: invalid ones change nothing, valid ones are stored."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.db.engine import connect_database
from tessera.db.store import PostgresStore
from tessera.v1 import (
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    scheduler_pb2,
    tenants_pb2,
)
from tests.support.api import (
    INVALID,
    Api,
    C,
    a_batch,
    a_cell,
    a_cluster,
    a_node,
    a_round,
    a_submit,
    a_tenant,
    a_workload,
    api,
    refusal_of,
    some_cells,
    some_nodes,
    some_tenants,
)
from tests.support.patience import PATIENCE_S
from tests.support.rpc import WALL_S, serving


async def stored_texts(api: Api) -> list[str]:
    """Return all stored resources as texts, without the answers to repeated calls."""
    answers: list[Message] = [
        await api.clusters.ListClusters(clusters_pb2.ListClustersRequest()),
        await api.clusters.ListNodes(clusters_pb2.ListNodesRequest(parent=C)),
        await api.estimates.ListCells(estimates_pb2.ListCellsRequest(parent=C)),
        await api.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C)),
        await api.scheduler.ListRounds(scheduler_pb2.ListRoundsRequest(parent=C)),
        await api.tenants.ListTenants(tenants_pb2.ListTenantsRequest(parent=C)),
    ]
    return [str(answer) for answer in answers]


Call = Callable[[Api], Awaitable[Message]]

BAD: dict[str, tuple[Call, StatusCode, str]] = {
    "a node of an unknown GPU type": (
        lambda a: a.clusters.UpsertNodes(
            clusters_pb2.UpsertNodesRequest(
                parent=C, nodes=[a_node("n3"), a_node("n4", gpu_type="h100")]
            )
        ),
        INVALID,
        "gpu_type",
    ),
    "a Cell of an unknown GPU type": (
        lambda a: a.estimates.UpsertCells(
            some_cells(a_cell(2), a_cell(4, cell=estimates_pb2.Cell(gpu_type="h100", gpus=4)))
        ),
        INVALID,
        "gpu_type",
    ),
    "a job that asks for an unknown GPU type": (
        lambda a: a.jobs.SubmitJob(a_submit(requested_gpu_type="h100")),
        INVALID,
        "gpu_type",
    ),
    "a job that asks for more GPUs than there are": (
        lambda a: a.jobs.SubmitJobs(a_batch(a_submit("a"), a_submit("b", requested_gpus=17))),
        INVALID,
        "jobs/b.requested_gpus",
    ),
    "a node without GPUs": (
        lambda a: a.clusters.UpsertNodes(
            clusters_pb2.UpsertNodesRequest(parent=C, nodes=[a_node("n3"), a_node("n4", gpus=0)])
        ),
        INVALID,
        "nodes[1].gpus",
    ),
    "a node with more GPUs than any has": (
        lambda a: a.clusters.UpsertNodes(
            clusters_pb2.UpsertNodesRequest(parent=C, nodes=[a_node("n3", gpus=65)])
        ),
        INVALID,
        "nodes[0].gpus",
    ),
    "a GPU type without memory": (
        lambda a: a.clusters.UpsertCluster(
            clusters_pb2.UpsertClusterRequest(
                cluster=clusters_pb2.Cluster(name=C, gpu_types=[clusters_pb2.GpuType(name="x")])
            )
        ),
        INVALID,
        "cluster.gpu_types[0].memory_bytes",
    ),
    "a GPU type that is still used": (
        lambda a: a.clusters.UpsertCluster(a_cluster("v100")),
        INVALID,
        "gpu_types",
    ),
    "a job without iterations": (
        lambda a: a.jobs.SubmitJob(a_submit(iterations=0)),
        INVALID,
        "job.iterations",
    ),
    "a job without GPUs": (
        lambda a: a.jobs.SubmitJobs(a_batch(a_submit("a"), a_submit("b", requested_gpus=0))),
        INVALID,
        "requests[1].job.requested_gpus",
    ),
    "a job with too many iterations": (
        lambda a: a.jobs.SubmitJob(a_submit(iterations=10**13)),
        INVALID,
        "job.iterations",
    ),
    "a job whose weight is not a number": (
        lambda a: a.jobs.SubmitJob(a_submit(weight=math.nan)),
        INVALID,
        "job.weight",
    ),
    "a job whose restart is negative": (
        lambda a: a.jobs.SubmitJob(a_submit(restart=Duration(seconds=-1))),
        INVALID,
        "job.restart",
    ),
    "a job whose deadline has passed": (
        lambda a: a.jobs.SubmitJob(a_submit(deadline=Timestamp(seconds=int(WALL_S)))),
        INVALID,
        "job.deadline",
    ),
    "a batch that names a job twice": (
        lambda a: a.jobs.SubmitJobs(a_batch(a_submit("a"), a_submit("a"))),
        INVALID,
        "requests[1].job_id",
    ),
    "an empty batch": (lambda a: a.jobs.SubmitJobs(a_batch()), INVALID, "requests"),
    "a batch that is too large": (
        lambda a: a.jobs.SubmitJobs(a_batch(*[a_submit(f"j{i}") for i in range(10_001)])),
        INVALID,
        "requests",
    ),
    "a batch whose inner request has a request id": (
        lambda a: a.jobs.SubmitJobs(a_batch(a_submit("a", request_id="x"))),
        INVALID,
        "requests[0].request_id",
    ),
    "an estimate that is not a number": (
        lambda a: a.estimates.UpsertCells(some_cells(a_cell(2), a_cell(4, iter_time_s=math.nan))),
        INVALID,
        "cells[1].iter_time_s",
    ),
    "a negative estimate": (
        lambda a: a.estimates.UpsertCells(some_cells(a_cell(2), a_cell(4, iter_time_s=-1.0))),
        INVALID,
        "cells[1].iter_time_s",
    ),
    "a Cell named twice": (
        lambda a: a.estimates.UpsertCells(some_cells(a_cell(2), a_cell(2))),
        INVALID,
        "cells[1]",
    ),
    "a Cell of a missing job": (
        lambda a: a.estimates.UpsertCells(
            some_cells(a_cell(2), a_cell(4, workload=None, job=f"{C}/jobs/missing"))
        ),
        StatusCode.NOT_FOUND,
        "",
    ),
    "a Cell of another cluster's job": (
        lambda a: a.estimates.UpsertCells(
            some_cells(a_cell(4, workload=None, job="clusters/d/jobs/j"))
        ),
        INVALID,
        "cells[0].job",
    ),
    "a node of another cluster": (
        lambda a: a.clusters.DrainNodes(
            clusters_pb2.DrainNodesRequest(parent=C, names=[f"{C}/nodes/n1", "clusters/d/nodes/n2"])
        ),
        INVALID,
        "names[1]",
    ),
    "a drain of a missing node": (
        lambda a: a.clusters.DrainNodes(
            clusters_pb2.DrainNodesRequest(parent=C, names=[f"{C}/nodes/n1", f"{C}/nodes/n9"])
        ),
        StatusCode.NOT_FOUND,
        "",
    ),
    "a node with a stale etag": (
        lambda a: a.clusters.UpsertNodes(
            clusters_pb2.UpsertNodesRequest(
                parent=C, nodes=[a_node("n3"), a_node("n1", gpus=4, etag='"99"')]
            )
        ),
        StatusCode.ABORTED,
        "",
    ),
    "a cluster with a stale etag": (
        lambda a: a.clusters.UpsertCluster(a_cluster("a100", "v100", etag='"99"')),
        StatusCode.ABORTED,
        "",
    ),
    "a job that does not exist": (
        lambda a: a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=f"{C}/jobs/missing")),
        StatusCode.NOT_FOUND,
        "",
    ),
    "a cluster that does not exist": (
        lambda a: a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent="clusters/d")),
        StatusCode.NOT_FOUND,
        "",
    ),
    "a round that does not exist": (
        lambda a: a.scheduler.GetRound(scheduler_pb2.GetRoundRequest(name=f"{C}/rounds/9")),
        StatusCode.NOT_FOUND,
        "",
    ),
    "a name that is not a full name": (
        lambda a: a.jobs.GetJob(jobs_pb2.GetJobRequest(name="j")),
        INVALID,
        "name",
    ),
    "a negative page size": (
        lambda a: a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C, page_size=-1)),
        INVALID,
        "page_size",
    ),
    "a page token that was never given": (
        lambda a: a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C, page_token="x")),
        INVALID,
        "page_token",
    ),
    "an unknown solver": (
        lambda a: a.scheduler.Schedule(
            scheduler_pb2.ScheduleRequest(
                parent=C, options=scheduler_pb2.RoundOptions(solver="magic")
            )
        ),
        INVALID,
        "options.solver",
    ),
    "a tenant whose quota exceeds the cluster": (
        lambda a: a.tenants.UpsertTenants(
            some_tenants(a_tenant("nlp", weight=2.0), a_tenant("vision", quotas={"a100": 17}))
        ),
        INVALID,
        "quotas",
    ),
    "tenants whose quotas of any type together exceed the cluster": (
        lambda a: a.tenants.UpsertTenants(
            some_tenants(a_tenant("nlp", quotas={"": 9}), a_tenant("vision", quotas={"": 8}))
        ),
        INVALID,
        "quotas",
    ),
    "a quota of an unknown GPU type": (
        lambda a: a.tenants.UpsertTenants(
            some_tenants(a_tenant("nlp"), a_tenant("vision", quotas={"h100": 1}))
        ),
        INVALID,
        "gpu_type",
    ),
    "a tenant that is named twice": (
        lambda a: a.tenants.UpsertTenants(some_tenants(a_tenant("nlp"), a_tenant("nlp"))),
        INVALID,
        "tenants[1].name",
    ),
    "a tenant of another cluster": (
        lambda a: a.tenants.UpsertTenants(
            some_tenants(tenants_pb2.Tenant(name="clusters/d/tenants/nlp"))
        ),
        INVALID,
        "tenants[0].name",
    ),
    "no tenants": (lambda a: a.tenants.UpsertTenants(some_tenants()), INVALID, "tenants"),
    "a tenant without settings to forget": (
        lambda a: a.tenants.DeleteTenants(
            tenants_pb2.DeleteTenantsRequest(parent=C, names=[f"{C}/tenants/nlp"])
        ),
        StatusCode.NOT_FOUND,
        "",
    ),
    "a pin of a type that is not named": (
        lambda a: a.jobs.SubmitJob(a_submit(pinned_gpu_type=True)),
        INVALID,
        "job.pinned_gpu_type",
    ),
    "a job that avoids an unknown node": (
        lambda a: a.jobs.SubmitJobs(
            a_batch(a_submit("a"), a_submit("b", avoid_nodes=[f"{C}/nodes/n9"]))
        ),
        INVALID,
        "jobs/b.avoid_nodes",
    ),
    "a job that avoids a node of another cluster": (
        lambda a: a.jobs.SubmitJob(a_submit(avoid_nodes=["clusters/d/nodes/n1"])),
        INVALID,
        "job.avoid_nodes[0]",
    ),
    "GPUs that cost less than nothing": (
        lambda a: a.clusters.UpsertCluster(
            clusters_pb2.UpsertClusterRequest(
                cluster=clusters_pb2.Cluster(
                    name=C,
                    gpu_types=[
                        clusters_pb2.GpuType(name="a100", memory_bytes=1, dollars_per_hour=-1.0)
                    ],
                )
            )
        ),
        INVALID,
        "cluster.gpu_types[0].dollars_per_hour",
    ),
    "an unknown objective": (
        lambda a: a.scheduler.Schedule(a_round(objective="speed")),
        INVALID,
        "options.objective",
    ),
    "an objective whose weights are all zero": (
        lambda a: a.scheduler.Schedule(a_round(objective="0*throughput")),
        INVALID,
        "options.objective",
    ),
    "an unknown published policy": (
        lambda a: a.scheduler.Schedule(a_round(scheduler="magic")),
        INVALID,
        "options.scheduler",
    ),
    "parameters without a published scheduler": (
        lambda a: a.scheduler.Schedule(a_round(scheduler_parameters="depth=5")),
        INVALID,
        "options.scheduler_parameters",
    ),
    "a parameter that the scheduler does not have": (
        lambda a: a.scheduler.Schedule(a_round(scheduler="sia", scheduler_parameters="depth=5")),
        INVALID,
        "options.scheduler_parameters",
    ),
    "a parameter out of range": (
        lambda a: a.scheduler.Schedule(
            a_round(scheduler="arena", scheduler_parameters="max_upgrades=-1")
        ),
        INVALID,
        "options.scheduler_parameters",
    ),
    "a parameter that is set twice": (
        lambda a: a.scheduler.Schedule(
            a_round(scheduler="arena", scheduler_parameters="depth=5, depth=5")
        ),
        INVALID,
        "options.scheduler_parameters",
    ),
    "opportunism without an order of queues": (
        lambda a: a.scheduler.Schedule(a_round(opportunistic=True)),
        INVALID,
        "options.opportunistic",
    ),
    "a gap that is not a number": (
        lambda a: a.scheduler.Schedule(
            scheduler_pb2.ScheduleRequest(
                parent=C, options=scheduler_pb2.RoundOptions(gap=math.nan)
            )
        ),
        INVALID,
        "options.gap",
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_an_invalid_request_is_refused_completely(store: PostgresStore, what: str) -> None:
    call, code, field = BAD[what]
    async with api(store) as a:
        before = await stored_texts(a)
        got_code, _, wrong = await refusal_of(call(a))
        assert (got_code, wrong) == (code, [field] if field else [])
        assert await stored_texts(a) == before


async def test_a_job_whose_cells_all_exceed_the_cluster_is_refused(store: PostgresStore) -> None:
    async with api(store) as a:
        big = a_cell(32, workload=a_workload("huge"))
        await a.estimates.UpsertCells(some_cells(big))
        code, _, wrong = await refusal_of(a.jobs.SubmitJob(a_submit(workload=a_workload("huge"))))
        assert (code, wrong) == (INVALID, ["jobs/j.workload"])
        assert not (await a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs


async def test_a_repeated_request_gets_the_same_answer_and_another_body_is_refused(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        first = await a.jobs.SubmitJob(a_submit("", request_id="r1"))
        assert await a.jobs.SubmitJob(a_submit("", request_id="r1")) == first
        code, reason, wrong = await refusal_of(a.jobs.SubmitJob(a_submit("k", request_id="r1")))
        assert (code, reason, wrong) == (INVALID, "REQUEST_ID_REUSED", ["request_id"])
        code, reason, _ = await refusal_of(
            a.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=first.name, request_id="r1"))
        )
        assert (code, reason) == (INVALID, "REQUEST_ID_REUSED")
        jobs = (await a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs
        assert [job.name for job in jobs] == [first.name]


async def test_a_validating_call_stores_nothing(store: PostgresStore) -> None:
    async with api(store) as a:
        before = await stored_texts(a)
        job = await a.jobs.SubmitJob(a_submit(validate_only=True, request_id="r1"))
        assert job.state == jobs_pb2.QUEUED
        await a.clusters.UpsertNodes(some_nodes("n9", validate_only=True))
        assert await stored_texts(a) == before
        assert (await a.jobs.SubmitJob(a_submit(request_id="r1"))).name == f"{C}/jobs/j"


async def test_a_job_is_updated_held_released_and_cancelled_by_etag(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit(labels={"k": "v"}))
        change = jobs_pb2.Job(name=job.name, etag=job.etag, weight=2.0, pinned=True, priority=3)
        request = jobs_pb2.UpdateJobRequest(
            job=change, update_mask=FieldMask(paths=["weight", "pinned"])
        )
        changed = await a.jobs.UpdateJob(request)
        assert (changed.weight, changed.pinned, changed.priority) == (2.0, True, 1)
        assert dict(changed.labels) == {"k": "v"}
        code, reason, _ = await refusal_of(a.jobs.UpdateJob(request))
        assert (code, reason) == (StatusCode.ABORTED, "STALE_ETAG")
        held = await a.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=job.name, etag=changed.etag))
        assert held.state == jobs_pb2.HELD
        code, _, _ = await refusal_of(a.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=job.name)))
        assert code is StatusCode.FAILED_PRECONDITION
        released = await a.jobs.ReleaseJob(jobs_pb2.ReleaseJobRequest(name=job.name))
        assert released.state == jobs_pb2.QUEUED
        cancelled = await a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=job.name))
        assert cancelled.state == jobs_pb2.CANCELLED
        assert await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=job.name)) == cancelled


async def test_only_mutable_fields_can_be_changed(store: PostgresStore) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit())
        for mask, change, field in (
            (["iterations"], {"iterations": 5}, "update_mask"),
            (["colour"], {}, "update_mask"),
            ([], {"iterations": 5}, "update_mask"),
            (["weight"], {"weight": math.inf}, "job.weight"),
            (["deadline"], {"deadline": Timestamp(seconds=1)}, "job.deadline"),
        ):
            request = jobs_pb2.UpdateJobRequest(
                job=jobs_pb2.Job(name=job.name, **change), update_mask=FieldMask(paths=mask)
            )
            assert await refusal_of(a.jobs.UpdateJob(request)) == (
                INVALID,
                "INVALID_INPUT",
                [field],
            )
        assert await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=job.name)) == job


async def test_pages_of_every_list_cover_each_item_once(store: PostgresStore) -> None:
    async with api(store) as a:
        await a.jobs.SubmitJobs(a_batch(*[a_submit(f"j{i}") for i in range(5)]))
        await a.clusters.UpsertNodes(some_nodes("n3", "n4", "n5"))
        await a.estimates.UpsertCells(some_cells(*[a_cell(k) for k in (2, 3, 4)]))
        for _ in range(5):
            await a.scheduler.Schedule(scheduler_pb2.ScheduleRequest(parent=C))
        lists: list[tuple[Any, type[Message], str]] = [
            (a.jobs.ListJobs, jobs_pb2.ListJobsRequest, "jobs"),
            (a.clusters.ListNodes, clusters_pb2.ListNodesRequest, "nodes"),
            (a.estimates.ListCells, estimates_pb2.ListCellsRequest, "cells"),
            (a.scheduler.ListRounds, scheduler_pb2.ListRoundsRequest, "rounds"),
        ]
        for call, request, field in lists:
            whole = await call(request(parent=C))
            assert len(getattr(whole, field)) == 5
            assert not whole.next_page_token
            items, token = [], ""
            for size in (2, 2, 1):
                page = await call(request(parent=C, page_size=2, page_token=token))
                items += getattr(page, field)
                token = page.next_page_token
                assert len(getattr(page, field)) == size
            assert (items, token) == (list(getattr(whole, field)), "")


async def test_a_cell_of_a_job_is_kept_under_its_workload(store: PostgresStore) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit(workload=a_workload("new")))
        await a.estimates.UpsertCells(some_cells(a_cell(4, workload=None, job=job.name)))
        request = estimates_pb2.ListCellsRequest(parent=C, workload=a_workload("new"))
        (cell,) = (await a.estimates.ListCells(request)).cells
        assert (cell.workload, cell.cell.gpus, cell.nodes) == (a_workload("new"), 4, 1)


async def test_a_round_is_decided_kept_and_repeated(store: PostgresStore) -> None:
    async with api(store) as a:
        await a.jobs.SubmitJob(a_submit())
        dry = scheduler_pb2.ScheduleRequest(parent=C, dry_run=True, request_id="r")
        assert (await a.scheduler.Schedule(dry)).name == f"{C}/rounds/0"
        request = scheduler_pb2.ScheduleRequest(parent=C, request_id="r")
        done = await a.scheduler.Schedule(request, timeout=PATIENCE_S)
        assert (done.name, done.outcome, done.verified) == (f"{C}/rounds/1", "committed", True)
        assert [d.job for d in done.decisions] == [f"{C}/jobs/j"]
        assert (await a.scheduler.Schedule(request)).name == done.name
        # A dry run keeps no request id.
        assert (await a.scheduler.Schedule(dry)).name == f"{C}/rounds/0"
        name = scheduler_pb2.GetRoundRequest(name=done.name)
        assert (await a.scheduler.GetRound(name)).decisions == done.decisions
        name.summary_only = True
        assert not (await a.scheduler.GetRound(name)).decisions
        again = await a.scheduler.ReplayRound(scheduler_pb2.ReplayRoundRequest(name=done.name))
        assert again.same_decisions
        cluster = await a.clusters.GetCluster(clusters_pb2.GetClusterRequest(name=C))
        assert (cluster.last_round, cluster.nodes, cluster.gpus) == (done.name, 2, 16)


async def test_a_deadline_that_is_too_short_changes_nothing(store: PostgresStore) -> None:
    async with api(store, default_deadline_s=1e-6) as a:
        await a.jobs.SubmitJob(a_submit())
        request = scheduler_pb2.ScheduleRequest(parent=C, request_id="r")
        code, reason, _ = await refusal_of(a.scheduler.Schedule(request))
        assert (code, reason) == (StatusCode.DEADLINE_EXCEEDED, "DEADLINE_TOO_SHORT")
        assert not (await a.scheduler.ListRounds(scheduler_pb2.ListRoundsRequest(parent=C))).rounds
        assert (await a.scheduler.Schedule(request, timeout=PATIENCE_S)).outcome == "committed"


async def test_a_database_without_tesseras_schema_is_not_served(postgres_url: str) -> None:
    database = connect_database(postgres_url)
    try:
        async with serving(PostgresStore(database)) as (channel, _):
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            code, reason, _ = await refusal_of(
                Api(channel).clusters.ListClusters(clusters_pb2.ListClustersRequest())
            )
            assert (code, reason) == (StatusCode.UNAVAILABLE, "NOT_MIGRATED")
    finally:
        database.engine.dispose()


async def test_a_cluster_shows_the_latest_time_of_its_next_round(store: PostgresStore) -> None:
    async with api(store, period_s=300.0, real_time=True) as a:
        get = clusters_pb2.GetClusterRequest(name=C)
        unseen = await a.clusters.GetCluster(get)
        assert unseen.round_period.seconds == 300
        now = Timestamp()
        now.GetCurrentTime()
        assert unseen.next_round_time.seconds <= now.seconds  # no round yet, so it begins at once
        done = await a.scheduler.Schedule(
            scheduler_pb2.ScheduleRequest(parent=C), timeout=PATIENCE_S
        )
        after = await a.clusters.GetCluster(get)
        assert after.next_round_time.seconds - done.create_time.seconds in (300, 301)
    async with api(store, period_s=0.0) as a:
        never = await a.clusters.GetCluster(get)
        assert never.HasField("round_period")
        assert not never.HasField("next_round_time")


async def test_a_cluster_shows_the_gpu_count_of_its_largest_nodes(store: PostgresStore) -> None:
    async with api(store) as a:
        await a.clusters.UpsertCluster(a_cluster("a100", "v100"))
        await a.clusters.UpsertNodes(some_nodes("n1", "n2"))
        cluster = await a.clusters.GetCluster(clusters_pb2.GetClusterRequest(name=C))
        assert {kind.name: kind.node_gpus for kind in cluster.gpu_types} == {"a100": 8, "v100": 0}
