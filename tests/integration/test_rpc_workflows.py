"""Dependencies, arrays and webhooks over a socket: requests, answers, refusals and tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc import StatusCode
from typer.testing import CliRunner

from tessera.client import ChannelSettings
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.access import Role
from tessera.formulation.lifecycle import JobState
from tessera.formulation.webhooks import sign_body
from tessera.service.cli import importing, main
from tessera.service.rpc.jobs import MAX_JOBS
from tessera.service.wiring import run_server
from tessera.v1 import jobs_pb2, webhooks_pb2
from tests.support.api import INVALID, Api, C, a_batch, a_submit, api, refusal_of
from tests.support.database import digest_tables
from tests.support.hook_target import HookTarget, hook_target
from tests.support.patience import PATIENCE_S
from tests.support.running_server import a_cluster as stored_cluster
from tests.support.running_server import settings
from tests.support.secured_server import (
    FOREIGN,
    OWN,
    PLACE,
    SecuredServer,
    fill,
    requests_for,
    secured_server,
)

Indices = jobs_pb2.ArrayIndices


@pytest.fixture
async def a(store: PostgresStore) -> AsyncIterator[Api]:
    """Return the stubs of a server."""
    async with api(store) as found:
        yield found


def an_array(name: str = "sweep", last: int = 3, **more: Any) -> jobs_pb2.SubmitJobRequest:
    request = a_submit(name)
    request.array.CopyFrom(Indices(last=last, **more))
    return request


def after(*jobs: str, condition: Any = 0) -> list[jobs_pb2.Dependency]:
    return [jobs_pb2.Dependency(job=f"{C}/jobs/{job}", condition=condition) for job in jobs]


async def change(a: Api, what: Any, name: str = "sweep") -> jobs_pb2.JobArray:
    request = jobs_pb2.ChangeArrayRequest(name=f"{C}/arrays/{name}", change=what)
    return await a.jobs.ChangeArray(request)


async def test_jobs_of_one_call_may_wait_for_each_other(a: Api) -> None:
    request = a_batch(
        a_submit("b", after=after("a", condition=jobs_pb2.Dependency.ENDED)), a_submit("a")
    )
    b = (await a.jobs.SubmitJobs(request)).jobs[0]
    (dependency,) = b.after
    assert dependency.condition == jobs_pb2.Dependency.ENDED
    assert (dependency.met, dependency.state) == (False, "queued")
    assert (b.reason.code, b.reason.message) == ("WAITS_FOR_JOBS", "the job waits for a (queued)")
    await a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=f"{C}/jobs/a"))
    b = await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=b.name))
    assert b.after[0].met
    assert not b.reason.code


async def test_bad_dependencies_are_refused(a: Api) -> None:
    for submitted, field in (
        (a_submit("j", after=after("j")), "jobs/j.after"),
        (a_submit("j", after=after("none")), "jobs/j.after[0]"),
        (a_submit("j", after=[jobs_pb2.Dependency(job="clusters/d/jobs/x")]), "job.after[0].job"),
        (a_submit("j", after=[jobs_pb2.Dependency(job="x")]), "job.after[0].job"),
        (a_submit("j", after=after(*(f"x{i}" for i in range(101)))), "job.after"),
        (a_submit("j", after=after("x", "x")), "job.after[1].job"),
        (an_array(), "array"),
    ):
        code, _, fields = await refusal_of(a.jobs.SubmitJob(submitted))
        assert (code, fields) == (INVALID, [field])


async def test_an_array_is_submitted_once_and_as_a_whole(a: Api) -> None:
    request = a_batch(an_array(last=6, first=2, step=2, max_running=2), a_submit("all"))
    request.requests[1].job.after.extend(after("sweep"))
    request.request_id = "once"
    first = await a.jobs.SubmitJobs(request)
    assert await a.jobs.SubmitJobs(request) == first
    names = [job.name.rpartition("/")[2] for job in first.jobs]
    assert names == ["sweep.2", "sweep.4", "sweep.6", "all"]
    member = first.jobs[1].array
    assert (member.array, member.index) == (f"{C}/arrays/sweep", 4)
    assert (member.size, member.max_running) == (3, 2)
    assert first.jobs[3].reason.evidence == {"sweep": "0 of 3 ended, must have succeeded"}
    array = await a.jobs.GetArray(jobs_pb2.GetArrayRequest(name=f"{C}/arrays/sweep"))
    assert dict(array.states) == {JobState.QUEUED.name: 3}


async def test_an_array_is_changed_as_a_whole(a: Api) -> None:
    await a.jobs.SubmitJobs(a_batch(an_array()))
    held = await change(a, jobs_pb2.ChangeArrayRequest.HOLD)
    assert dict(held.states) == {"HELD": 4}
    await a.jobs.ReleaseJob(jobs_pb2.ReleaseJobRequest(name=f"{C}/jobs/sweep.1"))
    ended = await change(a, jobs_pb2.ChangeArrayRequest.CANCEL)
    assert dict(ended.states) == {"CANCELLED": 4}
    assert (await refusal_of(change(a, 0)))[0] is INVALID
    missing = change(a, jobs_pb2.ChangeArrayRequest.HOLD, "none")
    assert (await refusal_of(missing))[0] is StatusCode.NOT_FOUND


async def test_bad_arrays_are_refused_before_they_are_expanded(a: Api) -> None:
    for request, says in (
        (a_batch(an_array(last=MAX_JOBS)), "10,001 members"),
        (a_batch(an_array(last=999_999_999)), "1,000,000,000 members"),
        (a_batch(an_array("x", MAX_JOBS - 1), a_submit("y")), "10,001 jobs"),
        (a_batch(an_array(first=5)), "FIRST <= LAST"),
        (a_batch(an_array(step=-1)), "step"),
        (a_batch(an_array(max_running=-1)), "limit"),
        (a_batch(an_array(95 * "x")), "1 to 100 letters"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            await a.jobs.SubmitJobs(request)
    assert not (await a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs


async def test_a_limited_array_has_no_deadline(a: Api) -> None:
    request = an_array(max_running=1)
    request.job.deadline.FromSeconds(4_000_000_000)
    code, _, fields = await refusal_of(a.jobs.SubmitJobs(a_batch(request)))
    assert (code, fields) == (INVALID, ["requests[0].job.deadline"])
    await a.jobs.SubmitJobs(a_batch(an_array(max_running=1)))
    later = jobs_pb2.Job(name=f"{C}/jobs/sweep.0", deadline=request.job.deadline)
    code, _, fields = await refusal_of(a.jobs.UpdateJob(jobs_pb2.UpdateJobRequest(job=later)))
    assert (code, fields) == (INVALID, ["job.deadline"])


async def test_webhooks_arrays_and_dependencies_belong_to_tenants(
    tmp_path: Path, database: Database
) -> None:
    key_file = tmp_path / "webhooks.key"
    key_file.write_text(64 * "k")
    key_file.chmod(0o600)
    allowed = {"webhook_networks": "127.0.0.0/8", "webhook_plain_http": True}
    with hook_target() as target:
        async with secured_server(
            tmp_path, database, webhook_key_file=str(key_file), **allowed
        ) as server:
            await use_as_tenants(server, target)


async def use_as_tenants(server: SecuredServer, target: HookTarget) -> None:
    """Register, test and use a webhook as one tenant, and look for it as another one."""
    await fill(server, server.user(server.add_token("ada", Role.ADMIN)))
    own, foreign = (
        server.user(server.add_token(name, Role.USER, tenants=[name])) for name in (OWN, FOREIGN)
    )
    samples = requests_for()

    async def call(who: ChannelSettings, method: str, request: Message) -> Any:
        return await server.call(who, f"/tessera.v1.{method}", request)

    async def refused(who: ChannelSettings, method: str, request: Message) -> StatusCode:
        return (await server.outcome(who, f"/tessera.v1.{method}", request))[0]

    create = webhooks_pb2.CreateWebhookRequest(
        parent=PLACE,
        webhook_id="h",
        webhook=webhooks_pb2.Webhook(url=target.url, tenant=OWN, events=["cancelled"]),
        request_id="once",
    )
    created = await call(own, "Webhooks/CreateWebhook", create)
    assert created.secret.startswith("tessera_hook_")
    assert await call(own, "Webhooks/CreateWebhook", create) == created
    named = webhooks_pb2.TestWebhookRequest(name=created.name)
    assert (await call(own, "Webhooks/TestWebhook", named)).delivered
    listing = webhooks_pb2.ListWebhooksRequest(parent=PLACE)
    (shown,) = (await call(own, "Webhooks/ListWebhooks", listing)).webhooks
    assert (shown.secret, shown.url) == ("", target.url)
    # Another tenant sees nothing of it, and cannot use the first one's name.
    assert not (await call(foreign, "Webhooks/ListWebhooks", listing)).webhooks
    assert await refused(foreign, "Webhooks/TestWebhook", named) is StatusCode.NOT_FOUND
    assert await refused(foreign, "Webhooks/CreateWebhook", create) is StatusCode.NOT_FOUND
    create.webhook.tenant, create.webhook.all_tenants = "", True
    assert await refused(own, "Webhooks/CreateWebhook", create) is StatusCode.FAILED_PRECONDITION
    # The server itself delivers what happens.
    cancel = jobs_pb2.CancelJobRequest(name=f"{PLACE}/jobs/ours-1")
    await call(own, "Jobs/CancelJob", cancel)
    await call(foreign, "Jobs/CancelJob", jobs_pb2.CancelJobRequest(name=f"{PLACE}/jobs/theirs-1"))
    async with asyncio.timeout(PATIENCE_S):
        while len(target.taken) < 2:
            await asyncio.sleep(0.01)
    body, header = target.taken[1].body, target.taken[1].headers["Tessera-Signature"]
    assert json.loads(body)["job"] == "ours-1"
    assert header == sign_body(created.secret, body, int(header[2:].partition(",")[0]))
    # Arrays and dependencies.
    submit = samples["/tessera.v1.Jobs/SubmitJob"]
    assert isinstance(submit, jobs_pb2.SubmitJobRequest)
    submit.job.tenant, submit.job_id = OWN, "mine"
    submit.job.after.append(jobs_pb2.Dependency(job=f"{PLACE}/jobs/theirs-2"))
    assert await refused(own, "Jobs/SubmitJob", submit) is INVALID
    del submit.job.after[:]
    submit.ClearField("parent")
    submit.array.CopyFrom(Indices(last=1))
    await call(own, "Jobs/SubmitJobs", jobs_pb2.SubmitJobsRequest(parent=PLACE, requests=[submit]))
    asked = jobs_pb2.GetArrayRequest(name=f"{PLACE}/arrays/mine")
    assert (await call(own, "Jobs/GetArray", asked)).size == 2
    assert await refused(foreign, "Jobs/GetArray", asked) is StatusCode.NOT_FOUND
    change = jobs_pb2.ChangeArrayRequest(name=asked.name, change=jobs_pb2.ChangeArrayRequest.CANCEL)
    assert await refused(foreign, "Jobs/ChangeArray", change) is StatusCode.NOT_FOUND
    assert dict((await call(own, "Jobs/GetArray", asked)).states) == {"QUEUED": 2}


TRACE = """\
job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,after
report,0,m,1B,8,9,1,train:ended
train,1,m,1B,8,9,1,
"""


async def test_the_command_line_submits_folds_and_changes_arrays(
    store: PostgresStore, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "JOBS_PER_CALL", 1)
    (tmp_path / "t.csv").write_text(TRACE)
    stored_cluster(store)
    async with run_server(settings(database, estimate_cells=False, period_s=0.0)) as port:

        async def run(*words: str) -> str:
            options = ["--server", f"127.0.0.1:{port}", "--cluster", "c"]
            done = await asyncio.to_thread(CliRunner().invoke, main.app, [*words, *options])
            assert done.exit_code == 0, done.output
            return done.output

        job = ["--model", "m", "--batch", "8", "--iterations", "9", "--gpus", "1"]
        assert "4 jobs submitted" in await run("submit", "sweep", "--array", "0-3%2", *job)
        await run("submit", "all", "--after", "sweep:ended", *job)
        assert "4 QUEUED" in await run("jobs")
        assert "sweep.3" in await run("jobs", "--expand")
        assert "array sweep: 4 HELD" in await run("hold", "sweep")
        assert "array sweep: 4 CANCELLED" in await run("cancel", "sweep")
        assert "sweep must have ended (met)" in " ".join((await run("job", "all")).split())
        trace = ("import", "trace", str(tmp_path / "t.csv"))
        assert "2 jobs valid; nothing changed" in await run(*trace, "--validate-only")
        assert "2 jobs imported" in await run(*trace)
        assert "train: queued, must have ended" in " ".join((await run("job", "report")).split())
        assert "2 jobs already there, left unchanged" in await run(*trace)


UNFIT = """\
job_id,submit_time_s,model,params,global_batch,iterations,num_gpus
a,0,m,1B,8,9,1
b,0,m,1B,8,9,1
c,0,m,1B,8,9,99
"""


async def test_an_import_in_several_calls_leaves_nothing_if_one_of_them_is_refused(
    store: PostgresStore, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "JOBS_PER_CALL", 1)
    (tmp_path / "t.csv").write_text(UNFIT)
    stored_cluster(store)
    before = await asyncio.to_thread(digest_tables, database)
    async with run_server(settings(database, estimate_cells=False)) as port:
        words = ("import", "trace", str(tmp_path / "t.csv"), "--cluster", "c")
        where = ("--server", f"127.0.0.1:{port}")
        for options in ((), ("--validate-only",)):
            done = await asyncio.to_thread(CliRunner().invoke, main.app, [*words, *where, *options])
            assert done.exit_code == 1
            assert "requested_gpus" in done.output
            assert "0 of 3 jobs were stored before the failure" in " ".join(done.output.split())
    assert await asyncio.to_thread(digest_tables, database) == before
