"""The view of a tenant over sockets, and the end of its calls by a revocation."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import sqlalchemy as sa
from grpc import StatusCode

from tessera.client import ChannelSettings
from tessera.formulation.base.access import Role
from tessera.service.server.security.roles import RULES
from tessera.v1 import access_pb2, clusters_pb2, jobs_pb2, jobs_pb2_grpc
from tests.support.database import a_database
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.secured_server import (
    CALLER_PATH,
    FOREIGN,
    FOREIGN_JOB,
    GET_CALLER,
    OWN,
    OWN_JOB,
    PLACE,
    SecuredServer,
    fill,
    requests_for,
    secured_server,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

_numbers = itertools.count(1)

GET, WATCH = "/tessera.v1.Jobs/GetJob", "/tessera.v1.Jobs/WatchJob"
UPDATE, SUBMIT = "/tessera.v1.Jobs/UpdateJob", "/tessera.v1.Jobs/SubmitJob"
LIST = "/tessera.v1.Jobs/ListJobs"


class Setup:
    """A server, and callers of one tenant and of another."""

    def __init__(self, server: SecuredServer) -> None:
        self.server = server
        self.admin = server.user(server.add_token("ada", Role.ADMIN))
        self.own = self.add(OWN)
        self.foreign = self.add(FOREIGN)

    def add(self, *tenants: str, role: Role = Role.USER, **rest: Any) -> ChannelSettings:
        """Add a token, and return the settings of its channel."""
        name = f"user-{next(_numbers)}"
        return self.server.user(self.server.add_token(name, role, tenants=tenants, **rest))

    async def call(self, who: ChannelSettings, path: str, request: Any, **rest: Any) -> Any:
        return await self.server.call(who, path, request, **rest)

    async def refused(self, who: ChannelSettings, path: str, request: Any) -> tuple[Any, str]:
        return await self.server.outcome(who, path, request)

    async def name_of(self, who: ChannelSettings) -> str:
        caller = await self.call(who, CALLER_PATH, GET_CALLER)
        return str(caller.subject)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    with a_database(server_url) as database:
        folder = tmp_path_factory.mktemp("site")
        async with secured_server(folder, database, max_open_jobs=50, poll_s=0.2) as server:
            found = Setup(server)
            await fill(server, found.admin)
            yield found


UNANSWERED = (
    "/GetNetworkPlan",
    "/GetNode",
    "/ReadLogs",
    "/GetJobCurves",
    "/GetArray",
    "/GetReservation",
)
"""Methods that cannot answer in this set-up."""


async def test_no_answer_to_a_tenant_names_another_one(setup: Setup) -> None:
    """Every method that lists or reads something is called with a valid request."""
    seen = 0
    for path, request in requests_for().items():
        rule = RULES[path]
        if rule.changes or "user" not in rule.roles or path.startswith("/grpc"):
            continue
        try:
            whole = str(await setup.call(setup.admin, path, request))
        except grpc.aio.AioRpcError:  # e.g. no network plan was needed, or the job has no Cell
            assert path.endswith(UNANSWERED), path
            continue
        answer = str(await setup.call(setup.own, path, request))
        assert FOREIGN not in answer, path
        assert "theirs" not in answer, path
        seen += FOREIGN in whole or "theirs" in whole
    assert seen >= 3  # the jobs, the tenants and the round


async def test_pages_hold_a_tenants_own_jobs_and_are_full(setup: Setup) -> None:
    request = jobs_pb2.ListJobsRequest(parent=PLACE, page_size=2)
    pages = []
    while True:
        page = await setup.call(setup.own, LIST, request)
        pages.append([job.name.rpartition("/")[2] for job in page.jobs])
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    names = [name for page in pages for name in page]
    assert all(name.startswith("ours") for name in names)
    assert len(names) == len(set(names)) >= 4
    assert all(len(page) == 2 for page in pages[:-1])


async def test_a_page_token_of_another_tenant_shows_nothing_of_it(setup: Setup) -> None:
    request = jobs_pb2.ListJobsRequest(parent=PLACE, page_size=1)
    theirs = await setup.call(setup.foreign, LIST, request)
    request.page_token = theirs.next_page_token
    answer = await setup.call(setup.own, LIST, request)
    assert all(job.tenant == OWN for job in answer.jobs)


async def test_a_cluster_out_of_sight_leaves_no_trace_in_pages(setup: Setup) -> None:
    for name in ("alpha", "secret-1", "secret-2", "zeta"):
        path = "/tessera.v1.Clusters/UpsertCluster"
        await setup.call(setup.admin, path, requests_for(cluster=name)[path])
    path = "/tessera.v1.Clusters/ListClusters"
    seen = ["alpha", "main", "zeta"]
    who = setup.add(OWN, clusters=seen)
    request, found = clusters_pb2.ListClustersRequest(page_size=1), []
    for _ in seen:
        page = await setup.call(who, path, request)
        found += [cluster.name for cluster in page.clusters]
        assert "secret" not in str(page)
        request.page_token = page.next_page_token
        decoded = _decode(request.page_token)
        assert b"secret" not in decoded
    assert found == [f"clusters/{name}" for name in seen]
    assert not request.page_token


def _decode(token: str) -> bytes:
    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))


def a_submission(name: str, tenant: str = "", **rest: Any) -> jobs_pb2.SubmitJobRequest:
    text = requests_for()[SUBMIT].SerializeToString()
    request = jobs_pb2.SubmitJobRequest.FromString(text)
    request.job_id, request.job.tenant = name, tenant
    for key, value in rest.items():
        setattr(request, key, value)
    return request


async def test_a_job_belongs_to_the_tenant_of_whoever_submits_it(setup: Setup) -> None:
    made = await setup.call(setup.own, SUBMIT, a_submission("ours-new"))
    assert made.tenant == OWN
    code, _ = await setup.refused(setup.foreign, GET, jobs_pb2.GetJobRequest(name=made.name))
    assert code is StatusCode.NOT_FOUND


async def test_the_name_of_another_tenants_job_is_taken_and_nothing_more_is_said(
    setup: Setup,
) -> None:
    """Names are unique in a cluster, so this cannot be hidden."""
    outcome = await setup.refused(setup.own, SUBMIT, a_submission(FOREIGN_JOB))
    assert outcome[0] is StatusCode.ALREADY_EXISTS
    assert FOREIGN not in outcome[1]


async def test_a_request_id_of_another_caller_does_not_return_its_answer(setup: Setup) -> None:
    both = setup.add(OWN)
    request = a_submission("ours-once", OWN, request_id="id-of-one")
    made = await setup.call(setup.own, SUBMIT, request)
    again = await setup.call(setup.own, SUBMIT, request)
    assert again == made
    for who in (both, setup.admin):
        code, details = await setup.refused(who, SUBMIT, request)
        assert code is StatusCode.INVALID_ARGUMENT
        assert "was used for another request" in details


async def test_a_tenant_updates_its_own_jobs_and_cannot_give_them_away(setup: Setup) -> None:
    job = jobs_pb2.Job(name=f"{PLACE}/jobs/{OWN_JOB}", labels={"a": "b"}, tenant=FOREIGN)
    changed = await setup.call(setup.own, UPDATE, jobs_pb2.UpdateJobRequest(job=job))
    assert (changed.labels["a"], changed.tenant) == ("b", OWN)
    request = jobs_pb2.UpdateJobRequest(job=job)
    request.update_mask.paths.append("tenant")
    code, details = await setup.refused(setup.own, UPDATE, request)
    assert code is StatusCode.INVALID_ARGUMENT
    assert "cannot change 'tenant'" in details


class Watch:
    """A stream that watches a job."""

    def __init__(self, setup: Setup, who: ChannelSettings, job: str) -> None:
        stub = jobs_pb2_grpc.JobsStub(setup.server.channel(who))
        self._call: Any = stub.WatchJob(jobs_pb2.WatchJobRequest(name=f"{PLACE}/jobs/{job}"))

    async def read(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self._call.read()

    async def end(self) -> tuple[StatusCode, str]:
        """Read until the stream ends; return its code and message."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self._call.read() is not grpc.aio.EOF:
                    continue
            return await self._call.code(), await self._call.details()

    def cancel(self) -> None:
        self._call.cancel()


def revoke_by_call(setup: Setup, name: str) -> Any:
    request = access_pb2.RevokeTokenRequest(name=name)
    return setup.call(setup.admin, "/tessera.v1.Access/RevokeToken", request)


async def revoke_while_notices_are_lost(setup: Setup, name: str) -> None:
    """Revoke a token without a notice, as if it was sent while the server did not listen."""

    def work() -> None:
        with setup.server.database.engine.begin() as connection:
            revoke = "UPDATE tokens SET revoked_at = clock_timestamp() WHERE name = :name"
            connection.execute(sa.text(revoke), {"name": name})
        with setup.server.database.engine.begin() as connection:
            connection.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'tessera-listen' AND datname = current_database()"
                )
            )

    await asyncio.to_thread(work)


@pytest.mark.parametrize("revoke", [revoke_by_call, revoke_while_notices_are_lost])
async def test_a_revoked_token_ends_its_streams_and_leaves_others_alone(
    setup: Setup, revoke: Callable[[Setup, str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    who = setup.add(OWN)
    name = await setup.name_of(who)
    ended = [Watch(setup, who, OWN_JOB), Watch(setup, who, "ours-2")]
    other = Watch(setup, setup.own, "ours-3")
    for watch in (*ended, other):
        assert (await watch.read()).tenant == OWN
    await revoke(setup, name)
    for watch in ended:
        code, details = await watch.end()
        assert code is StatusCode.UNAUTHENTICATED
        assert "was revoked or has expired" in details
    (line,) = logged_lines(caplog, "identity_revoked")
    assert "proof=token/" in line
    assert "calls=2" in line
    code, details = await setup.refused(who, CALLER_PATH, GET_CALLER)
    assert (code, details) == (StatusCode.UNAUTHENTICATED, f"the token {name} was revoked")
    job = jobs_pb2.Job(name=f"{PLACE}/jobs/ours-3", weight=float(next(_numbers)) + 10)
    await setup.call(setup.own, UPDATE, jobs_pb2.UpdateJobRequest(job=job))
    while (found := await other.read()).weight != job.weight:
        assert found is not grpc.aio.EOF
    other.cancel()


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ([("authorization", "Basic YTpi"), ("authorization", "TOKEN")], "several authorization"),
        ([("authorization", "TOKEN, TOKEN")], "cut short or damaged"),
        ([("authorization", "Bearer " + "x" * 6000)], "not one of this server"),
        ([("authorization-bin", b"TOKEN")], "the call has no token"),
        ([("x-authorization", "TOKEN"), ("cookie", "TOKEN")], "the call has no token"),
    ],
)
async def test_odd_metadata_proves_nothing(
    setup: Setup, metadata: list[tuple[str, Any]], why: str
) -> None:
    token = f"Bearer {setup.own.token}"
    filled = [
        (key, value.replace(b"TOKEN", token.encode()))
        if isinstance(value, bytes)
        else (key, value.replace("TOKEN", token))
        for key, value in metadata
    ]
    nobody = setup.server.user()
    code, details = await setup.server.outcome(nobody, CALLER_PATH, GET_CALLER, filled)
    assert setup.own.token not in details
    assert code is StatusCode.UNAUTHENTICATED
    assert why in details


async def test_a_huge_header_is_refused_and_the_server_goes_on(setup: Setup) -> None:
    nobody = setup.server.user()
    huge = [("authorization", "Bearer " + "x" * 100_000)]
    code, _ = await setup.server.outcome(nobody, CALLER_PATH, GET_CALLER, huge)
    assert code in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE, StatusCode.INTERNAL)
    assert await setup.name_of(setup.own)


async def test_a_large_request_of_nobody_is_refused_before_it_is_read(setup: Setup) -> None:
    path = "/tessera.v1.Agents/Enrol"
    request = type(requests_for()[path])(parent=PLACE, signing_request="x" * 300_000)
    code, details = await setup.refused(setup.server.user(), path, request)
    assert code is StatusCode.INVALID_ARGUMENT
    assert "this method takes at most 262,144" in details


async def test_one_tenants_jobs_do_not_use_up_those_of_another(setup: Setup) -> None:
    batch = jobs_pb2.SubmitJobsRequest(parent=PLACE)
    for number in range(60):
        inner = a_submission(f"ours-many-{number}")
        inner.parent = ""
        batch.requests.append(inner)
    code, details = await setup.refused(setup.own, "/tessera.v1.Jobs/SubmitJobs", batch)
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert f"at most 50 live jobs of tenant {OWN}" in details
    assert FOREIGN not in details
    await setup.call(setup.foreign, SUBMIT, a_submission("theirs-more"))
