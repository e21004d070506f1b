"""Calls over a real socket against PostgreSQL: invalid ones change nothing, valid ones are stored."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc.aio
import numpy as np
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode
from typer.testing import CliRunner

from tessera.db.clusters.tenants import list_tenants
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.service.cli import main
from tessera.service.cli.client import Exit
from tessera.service.server.rpc.serving.servicers import SERVICES
from tessera.service.server.wiring import run_server
from tessera.v1 import (
    clusters_pb2,
    clusters_pb2_grpc,
    estimates_pb2,
    jobs_pb2,
    scheduler_pb2,
    tenants_pb2,
    webhooks_pb2,
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
from tests.support.database import digest_tables
from tests.support.laws import scaled
from tests.support.messages import mutate
from tests.support.methods import methods_of
from tests.support.patience import PATIENCE_S
from tests.support.rpc import WALL_S, serving
from tests.support.running_server import settings
from tests.support.valid_requests import valid_requests


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


MISSING, ABORTED = StatusCode.NOT_FOUND, StatusCode.ABORTED

# Requests, and the field that the answer names or the other code that it has.
BAD: dict[str, tuple[Message, str | StatusCode]] = {
    "a job whose Cells all exceed the cluster": (
        a_submit(workload=a_workload("huge")),
        "jobs/j.workload",
    ),
    "a node of an unknown GPU type": (
        clusters_pb2.UpsertNodesRequest(
            parent=C, nodes=[a_node("n3"), a_node("n4", gpu_type="h100")]
        ),
        "gpu_type",
    ),
    "a Cell of an unknown GPU type": (
        some_cells(a_cell(2), a_cell(4, cell=estimates_pb2.Cell(gpu_type="h100", gpus=4))),
        "gpu_type",
    ),
    "a job that asks for an unknown GPU type": (a_submit(requested_gpu_type="h100"), "gpu_type"),
    "a job that asks for more GPUs than there are": (
        a_batch(a_submit("a"), a_submit("b", requested_gpus=17)),
        "jobs/b.requested_gpus",
    ),
    "a GPU type that is still used": (a_cluster("v100"), "gpu_types"),
    "a job without GPUs": (
        a_batch(a_submit("a"), a_submit("b", requested_gpus=0)),
        "requests[1].job.requested_gpus",
    ),
    "a job whose deadline has passed": (
        a_submit(deadline=Timestamp(seconds=int(WALL_S))),
        "job.deadline",
    ),
    "a batch that names a job twice": (a_batch(a_submit("a"), a_submit("a")), "requests[1].job_id"),
    "an empty batch": (a_batch(), "requests"),
    "a batch that is too large": (a_batch(*[a_submit(f"j{i}") for i in range(10_001)]), "requests"),
    "a batch whose inner request has a request id": (
        a_batch(a_submit("a", request_id="x")),
        "requests[0].request_id",
    ),
    "a Cell named twice": (some_cells(a_cell(2), a_cell(2)), "cells[1]"),
    "a Cell of a missing job": (
        some_cells(a_cell(2), a_cell(4, workload=None, job=f"{C}/jobs/missing")),
        MISSING,
    ),
    "a Cell of another cluster's job": (
        some_cells(a_cell(4, workload=None, job="clusters/d/jobs/j")),
        "cells[0].job",
    ),
    "a node of another cluster": (
        clusters_pb2.DrainNodesRequest(parent=C, names=[f"{C}/nodes/n1", "clusters/d/nodes/n2"]),
        "names[1]",
    ),
    "a drain of a missing node": (
        clusters_pb2.DrainNodesRequest(parent=C, names=[f"{C}/nodes/n1", f"{C}/nodes/n9"]),
        MISSING,
    ),
    "a node with a stale etag": (
        clusters_pb2.UpsertNodesRequest(
            parent=C, nodes=[a_node("n3"), a_node("n1", gpus=4, etag='"99"')]
        ),
        ABORTED,
    ),
    "a cluster with a stale etag": (a_cluster("a100", "v100", etag='"99"'), ABORTED),
    "a job that does not exist": (jobs_pb2.CancelJobRequest(name=f"{C}/jobs/missing"), MISSING),
    "a cluster that does not exist": (jobs_pb2.ListJobsRequest(parent="clusters/d"), MISSING),
    "a round that does not exist": (scheduler_pb2.GetRoundRequest(name=f"{C}/rounds/9"), MISSING),
    "a tenant that is named twice": (
        some_tenants(a_tenant("nlp"), a_tenant("nlp")),
        "tenants[1].name",
    ),
    "a tenant of another cluster": (
        some_tenants(tenants_pb2.Tenant(name="clusters/d/tenants/nlp")),
        "tenants[0].name",
    ),
    "no tenants": (some_tenants(), "tenants"),
    "a job that avoids an unknown node": (
        a_batch(a_submit("a"), a_submit("b", avoid_nodes=[f"{C}/nodes/n9"])),
        "jobs/b.avoid_nodes",
    ),
    "an unknown objective": (a_round(objective="speed"), "options.objective"),
}


def call(api_: Api, request: Message) -> Awaitable[Message]:
    """Call the method of the API that takes ``request``."""
    method = request.DESCRIPTOR.name.removesuffix("Request")
    stubs = (api_.clusters, api_.estimates, api_.jobs, api_.scheduler, api_.tenants)
    (found,) = (getattr(stub, method) for stub in stubs if hasattr(stub, method))
    answer: Awaitable[Message] = found(request)
    return answer


async def test_invalid_requests_are_refused_completely(store: Store) -> None:
    async with api(store) as a:
        await a.estimates.UpsertCells(some_cells(a_cell(32, workload=a_workload("huge"))))
        before = await stored_texts(a)
        for what, (request, expected) in BAD.items():
            code, _, wrong = await refusal_of(call(a, request))
            assert (what, wrong or code) == (
                what,
                [expected] if isinstance(expected, str) else expected,
            )
            assert not wrong or code is INVALID
            assert await stored_texts(a) == before, what


async def test_a_repeated_request_gets_the_same_answer_and_another_body_is_refused(
    store: Store,
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


async def test_a_job_is_updated_held_released_and_cancelled_by_etag(store: Store) -> None:
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


async def test_only_mutable_fields_can_be_changed(store: Store) -> None:
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


async def test_pages_of_every_list_cover_each_item_once(store: Store) -> None:
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


async def test_a_cell_of_a_job_is_kept_under_its_workload(store: Store) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit(workload=a_workload("new")))
        await a.estimates.UpsertCells(some_cells(a_cell(4, workload=None, job=job.name)))
        request = estimates_pb2.ListCellsRequest(parent=C, workload=a_workload("new"))
        (cell,) = (await a.estimates.ListCells(request)).cells
        assert (cell.workload, cell.cell.gpus, cell.nodes) == (a_workload("new"), 4, 1)


async def test_a_round_is_decided_kept_and_repeated(store: Store) -> None:
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


async def test_a_cluster_shows_the_latest_time_of_its_next_round(store: Store) -> None:
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


SOON = Timestamp(seconds=int(WALL_S) + 3600)


async def test_a_deadline_that_the_standing_policy_ignores_produces_a_warning(
    store: Store,
) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit("a", deadline=SOON, request_id="r"))
        (warning,) = job.warnings
        assert "promises no new deadline" in warning
        assert "`tessera policy set --objective 'deadline then throughput'`" in warning
        assert "`tessera round --objective 'deadline then throughput'`" in warning
        again = await a.jobs.SubmitJob(a_submit("a", deadline=SOON, request_id="r"))
        assert again == job
        answer = await a.jobs.SubmitJobs(a_batch(a_submit("b", deadline=SOON), a_submit("c")))
        assert [list(j.warnings) for j in answer.jobs] == [[warning], []]
        change = jobs_pb2.UpdateJobRequest(
            job=jobs_pb2.Job(name=f"{C}/jobs/c", deadline=SOON, weight=2.0),
            update_mask=FieldMask(paths=["deadline"]),
        )
        assert list((await a.jobs.UpdateJob(change)).warnings) == [warning]
        change.update_mask.paths[:] = ["weight"]
        assert not (await a.jobs.UpdateJob(change)).warnings
        assert not (await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=job.name))).warnings


TYPED = {"requested_gpu_type": "a100"}


async def test_a_misspelt_model_of_a_job_that_needs_an_estimate_is_refused(
    store: Store,
) -> None:
    mine = a_cell(1)
    mine.workload.model, mine.workload.params = "mine", "2B"
    meant = {
        ("bertt", "1.3B"): "bert/1.3B (--model bert --params 1.3B)",
        ("bert", "1.3"): "bert/1.3B",
        ("BERT", "1.3B"): "bert/1.3B",
        ("bert/1.3B", ""): "bert/1.3B",
        ("lama7", "7B"): "llama7/7B",
        ("minee", "2B"): "mine/2B",  # it has an estimate
    }
    async with api(store) as a:
        await a.estimates.UpsertCells(some_cells(mine))
        for number, ((model, params), name) in enumerate(meant.items()):
            workload = estimates_pb2.Workload(model=model, params=params, global_batch=256)
            with pytest.raises(grpc.aio.AioRpcError, match=r"job\.workload\.model") as refused:
                await a.jobs.SubmitJob(a_submit("a", workload=workload))
            assert f"did you mean {name}" in str(refused.value.details())
            batch = a_batch(a_submit("a"), a_submit("b", workload=workload))
            fields = (await refusal_of(a.jobs.SubmitJobs(batch)))[2]
            assert fields == ["requests[1].job.workload.model"]
            job = a_submit(f"typed-{number}", workload=workload, **TYPED)
            (warning,) = (await a.jobs.SubmitJob(job)).warnings
            assert f"did you mean {name}" in warning


async def test_a_model_of_ones_own_may_be_submitted_before_it_is_described(
    store: Store,
) -> None:
    async with api(store) as a:
        for model, params in (("bert-mine", "1.3B"), ("bert", "1.4B"), ("mlp", "")):
            workload = estimates_pb2.Workload(model=model, params=params, global_batch=256)
            (warning,) = (await a.jobs.SubmitJob(a_submit("", workload=workload))).warnings
            assert "the job waits until somebody does: `tessera models add`" in warning
            assert not (await a.jobs.SubmitJob(a_submit("", workload=workload, **TYPED))).warnings
        for model, message in (
            ("bert", r"bert needs its size.* state its params .* one of 1.3B, 15B"),
            ("gpt-2", r"gpt-2 is not known; did you mean gpt2\? .* one of 1.5B"),
        ):
            workload = estimates_pb2.Workload(model=model, global_batch=256)
            with pytest.raises(grpc.aio.AioRpcError, match=message):
                await a.jobs.SubmitJob(a_submit("", workload=workload))


M = TypeVar("M", bound=Message)
EXAMPLES: Final = scaled(25)
"""The number of changed requests for each method."""

METHODS: Final = {
    path: method
    for path, method in methods_of(*SERVICES).items()
    if "validate_only" in method.input_type.fields_by_name
}
RESOURCES: Final = ("UpsertTenants", "UpdateTopology", "UpsertModels", "Schedule")
"""The methods whose valid requests make what other requests name."""


def requests_of(name: str) -> list[Message]:
    """Return the valid requests of a method."""
    own = {
        "CreateWebhook": webhooks_pb2.CreateWebhookRequest(
            parent=C, webhook_id="w", webhook=webhooks_pb2.Webhook(url="https://example.com/")
        ),
        "DeleteWebhook": webhooks_pb2.DeleteWebhookRequest(name=f"{C}/webhooks/w"),
    }
    return [own[name]] if name in own else valid_requests()[name]


def changed(request: M, **values: Any) -> M:
    """Return a copy of a request with some fields set."""
    copy = type(request)()
    copy.CopyFrom(request)
    for field, value in values.items():
        copy.ClearField(field)
        copy.MergeFrom(type(request)(**{field: value}))
    return copy


async def outcome(channel: grpc.aio.Channel, path: str, request: Message) -> tuple[StatusCode, str]:
    """Make a call, and return its code and message."""
    answer = GetMessageClass(methods_of(*SERVICES)[path].output_type)
    call: Any = channel.unary_unary(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    try:
        await call(request, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return StatusCode.OK, ""


@pytest.mark.parametrize("path", METHODS)
async def test_a_call_that_is_refused_or_only_validates_changes_nothing(
    store: Store, database: Database, path: str
) -> None:
    rng, name = np.random.default_rng(zlib.crc32(path.encode())), path.rpartition("/")[2]
    async with api(store) as a, serving(store) as (channel, _):
        await a.clusters.UpsertCluster(a_cluster("a100", "v100"))
        await a.jobs.SubmitJob(a_submit(request_id="used"))
        for made in RESOURCES:
            way = next(way for way in methods_of(*SERVICES) if way.endswith(f"/{made}"))
            for request in valid_requests()[made]:
                assert (await outcome(channel, way, request))[0] is StatusCode.OK
        for valid in requests_of(name):
            requests = [mutate(valid, rng) for _ in range(EXAMPLES)]
            if "request_id" in valid.DESCRIPTOR.fields_by_name:
                requests.append(changed(valid, request_id="used"))
            before = await asyncio.to_thread(digest_tables, database)
            for request in (*requests, valid, valid):
                checked = await outcome(channel, path, changed(request, validate_only=True))
                assert await asyncio.to_thread(digest_tables, database) == before, request
                called = await outcome(channel, path, changed(request, validate_only=False))
                assert checked == called, request
                after = await asyncio.to_thread(digest_tables, database)
                assert called[0] is StatusCode.OK or after == before, request
                before = after


NODE: Final = a_node("n1")
REFUSED: Final[dict[str, dict[str, Any]]] = {
    "a node of an unknown GPU type": {"nodes": [NODE, a_node("n2", gpu_type="h100")]},
    "a name that no node may have": {"nodes": [NODE, a_node("b 1")]},
    "a node named twice": {"nodes": [NODE, NODE]},
    "a node of another cluster": {"nodes": [clusters_pb2.Node(name="clusters/d/nodes/n1")]},
    "quotas beyond the nodes": {"nodes": [NODE], "tenants": [a_tenant("t", quotas={"a100": 9})]},
    "a tenant named twice": {"nodes": [NODE], "tenants": [a_tenant("t"), a_tenant("t")]},
    "a parent that is missing": {"nodes": [NODE], "tenants": [a_tenant("t", parent="none")]},
}


async def test_a_refused_description_of_a_new_cluster_leaves_nothing_of_it(
    store: Store, database: Database
) -> None:
    before = await asyncio.to_thread(digest_tables, database)
    path = "/tessera.v1.Clusters/UpsertCluster"
    async with serving(store) as (channel, _):
        for what, described in REFUSED.items():
            outcomes = {
                await outcome(channel, path, a_cluster(validate_only=validate_only, **described))
                for validate_only in (True, False)
            }
            assert (what, [code for code, _ in outcomes]) == (what, [StatusCode.INVALID_ARGUMENT])
            assert await asyncio.to_thread(digest_tables, database) == before, what


async def test_a_cluster_is_created_with_its_nodes_and_tenants(store: Store) -> None:
    described = a_cluster(nodes=[NODE], tenants=[a_tenant("t", quotas={"a100": 8})])
    async with serving(store) as (channel, _):
        stub = clusters_pb2_grpc.ClustersStub(channel)
        answers = [
            await stub.UpsertCluster(changed(described, validate_only=validate_only))
            for validate_only in (True, False)
        ]
    assert [(answer.nodes, answer.gpus) for answer in answers] == [(1, 8), (1, 8)]
    assert [tenant.quotas for tenant in store.read(list_tenants, "c")] == [{"a100": 8}]


async def test_the_command_that_applies_a_cluster_validates_what_it_would_do(
    database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gpu_types: {a100: 40GiB}\nnodes: [{name: 'b 1', gpu_type: a100, gpus: 8}]\n")
    before = await asyncio.to_thread(digest_tables, database)
    async with run_server(settings(database, estimate_cells=False)) as port:
        words = ["cluster", "apply", "-f", str(file), "--server", f"127.0.0.1:{port}"]
        outputs = []
        for options in (["--validate-only"], []):
            done = await asyncio.to_thread(CliRunner().invoke, main.app, [*words, *options])
            assert done.exit_code == Exit.REFUSED
            outputs.append(done.output)
    assert outputs[0] == outputs[1]
    assert "nodes[0].name" in outputs[0]
    assert await asyncio.to_thread(digest_tables, database) == before
