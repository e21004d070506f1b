"""Calls over a real socket against PostgreSQL: invalid ones change nothing, valid ones are stored."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode

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
from tests.support.rpc import WALL_S


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
    "a job whose Cells all exceed the cluster": (
        lambda a: a.jobs.SubmitJob(a_submit(workload=a_workload("huge"))),
        INVALID,
        "jobs/j.workload",
    ),
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
    "a GPU type that is still used": (
        lambda a: a.clusters.UpsertCluster(a_cluster("v100")),
        INVALID,
        "gpu_types",
    ),
    "a job without GPUs": (
        lambda a: a.jobs.SubmitJobs(a_batch(a_submit("a"), a_submit("b", requested_gpus=0))),
        INVALID,
        "requests[1].job.requested_gpus",
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
    "a job that avoids an unknown node": (
        lambda a: a.jobs.SubmitJobs(
            a_batch(a_submit("a"), a_submit("b", avoid_nodes=[f"{C}/nodes/n9"]))
        ),
        INVALID,
        "jobs/b.avoid_nodes",
    ),
    "an unknown objective": (
        lambda a: a.scheduler.Schedule(a_round(objective="speed")),
        INVALID,
        "options.objective",
    ),
}


async def test_invalid_requests_are_refused_completely(store: PostgresStore) -> None:
    async with api(store) as a:
        await a.estimates.UpsertCells(some_cells(a_cell(32, workload=a_workload("huge"))))
        before = await stored_texts(a)
        for what, (call, code, field) in BAD.items():
            refused, _, wrong = await refusal_of(call(a))
            assert (what, refused, wrong) == (what, code, [field] if field else [])
            assert await stored_texts(a) == before, what


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
        await a.tenants.UpsertTenants(some_tenants(*[a_tenant(f"t{i}") for i in range(5)]))
        for seed in range(5):
            await a.scheduler.Schedule(scheduler_pb2.ScheduleRequest(parent=C))
            options = scheduler_pb2.RoundOptions(seed=seed)
            await a.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(parent=C, options=options))
        lists: list[tuple[Any, type[Message], str]] = [
            (a.jobs.ListJobs, jobs_pb2.ListJobsRequest, "jobs"),
            (a.clusters.ListNodes, clusters_pb2.ListNodesRequest, "nodes"),
            (a.estimates.ListCells, estimates_pb2.ListCellsRequest, "cells"),
            (a.scheduler.ListRounds, scheduler_pb2.ListRoundsRequest, "rounds"),
            (a.scheduler.ListPolicies, scheduler_pb2.ListPoliciesRequest, "policies"),
            (a.tenants.ListTenants, tenants_pb2.ListTenantsRequest, "tenants"),
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
