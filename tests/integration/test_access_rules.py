"""Every method, called by every role over sockets of a server with TLS, against the rules."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import sqlalchemy as sa
from google.protobuf import descriptor_pb2
from google.protobuf.message import Message
from grpc import StatusCode
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tessera.client import PLAIN_TEXT, ChannelSettings, open_async_channel
from tessera.db.access import audit_log
from tessera.formulation.base.access import Role
from tessera.formulation.base.secrets import JOIN_PREFIX, USER_PREFIX
from tessera.formulation.records.access import AuditFilter
from tessera.service.server.security.authority import create_authority
from tessera.service.server.security.references import Kind, find_texts, kind_of
from tessera.service.server.security.roles import RULES, short_method
from tessera.v1 import access_pb2_grpc, clusters_pb2, jobs_pb2
from tests.support.database import a_database
from tests.support.logged import logged_lines
from tests.support.messages import set_text
from tests.support.methods import all_methods
from tests.support.patience import PATIENCE_S
from tests.support.secured_server import (
    FOREIGN,
    FOREIGN_JOB,
    GET_CALLER,
    OWN,
    PLACE,
    SecuredServer,
    fill,
    requests_for,
    secured_server,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFUSALS = {StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED}

WHO = ["viewer", "user", "operator", "admin", "agent"]


class Setup:
    """A server, and the channels of a caller of each role."""

    def __init__(self, server: SecuredServer) -> None:
        self.server = server
        bound: dict[str, Any] = {"tenants": [OWN], "clusters": ["main"]}
        self.of: dict[str, ChannelSettings] = {
            "viewer": server.user(server.add_token("vi", Role.VIEWER, **bound)),
            "user": server.user(server.add_token("ursula", Role.USER, **bound)),
            "operator": server.user(server.add_token("otto", Role.OPERATOR, clusters=["main"])),
            "admin": server.user(server.add_token("ada", Role.ADMIN)),
            "agent": server.site.agent(nodes=["n0"]),
        }

    async def outcome(self, who: str, path: str, request: Message) -> tuple[StatusCode, str]:
        return await self.server.outcome(self.of[who], path, request)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    with a_database(server_url) as database:
        async with secured_server(tmp_path_factory.mktemp("site"), database) as server:
            found = Setup(server)
            await fill(server, found.of["admin"])
            yield found


async def reflected_methods(channel: grpc.aio.Channel) -> set[str]:
    """Return the paths of all methods that the server itself says it has."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest
    listed = [
        service.name
        async for answer in stub.ServerReflectionInfo(iter([request(list_services="*")]))
        for service in answer.list_services_response.service
    ]
    found = set[str]()
    asked = [request(file_containing_symbol=name) for name in listed]
    async for answer in stub.ServerReflectionInfo(iter(asked)):
        for text in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(text)
            for service in file.service:
                full = f"{file.package}.{service.name}"
                found |= {f"/{full}/{m.name}" for m in service.method if full in listed}
    return found


async def test_every_method_that_the_running_server_has_has_a_rule(setup: Setup) -> None:
    found = await reflected_methods(setup.server.channel(setup.of["admin"]))
    assert found == set(RULES) == set(requests_for())


async def stored_refusals(setup: Setup, subject: str) -> Counter[tuple[str, str]]:
    """Return how often which methods of a caller were refused how, by the audit log."""
    await setup.server.parts.server.gate._refusals._flush()
    chosen = AuditFilter(subject=subject, outcome="refused")
    entries = await asyncio.to_thread(
        setup.server.access.read, audit_log.list_entries, chosen, 0, 1000
    )
    found = Counter[tuple[str, str]]()
    for entry in entries:
        if entry.subject == subject:
            found[entry.method, entry.outcome] += entry.count
    return found


@pytest.mark.parametrize("who", WHO)
async def test_a_role_is_refused_every_method_that_is_not_its_own(
    setup: Setup, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    forbidden = {
        path: request
        for path, request in requests_for().items()
        if not RULES[path].is_open and who not in RULES[path].roles
    }
    before = await asyncio.to_thread(setup.server.fingerprint)
    for path, request in forbidden.items():
        code, details = await setup.outcome(who, path, request)
        assert (path, code) == (path, StatusCode.PERMISSION_DENIED)
        assert f"{short_method(path)} needs one of the roles" in details
        assert f"method={short_method(path)}" in logged_lines(caplog, "call_refused")[-1]
    assert await asyncio.to_thread(setup.server.fingerprint) == before
    subject = {"viewer": "vi", "user": "ursula", "operator": "otto", "admin": "ada"}.get(
        who, "agents/agent-1"
    )
    assert await stored_refusals(setup, subject) == {
        (short_method(path), "PERMISSION_DENIED"): 1 for path in forbidden
    }


async def test_without_a_valid_token_nothing_but_the_open_methods_answers(setup: Setup) -> None:
    site, server = setup.server.site, setup.server
    strangers = {
        "nobody": server.user(),
        "a guesser": server.user(f"{USER_PREFIX}_" + 12 * "a" + "_" + 43 * "b"),
        "whoever has a join token": server.user(f"{JOIN_PREFIX}_" + 12 * "a" + "_" + 43 * "b"),
        "a forger": server.user("eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZGEiLCJyb2xlcyI6WyJhZG1pbiJdfQ."),
        "the expired": server.user(server.add_token("old", Role.ADMIN, expires_s=site.now_s - 60)),
    }
    before = await asyncio.to_thread(server.fingerprint)
    for who, settings in strangers.items():
        for path, request in requests_for().items():
            code, _ = await server.outcome(settings, path, request)
            if not RULES[path].is_open:
                assert (who, path, code) == (who, path, StatusCode.UNAUTHENTICATED)
            elif path.endswith("/Enrol"):  # its token and its request are checked, too
                assert code in (StatusCode.UNAUTHENTICATED, StatusCode.INVALID_ARGUMENT)
            else:
                assert (who, path, code) == (who, path, StatusCode.OK)
    assert await asyncio.to_thread(server.fingerprint) == before
    refused = await stored_refusals(setup, "")
    assert {method for method, _ in refused} >= {
        short_method(path) for path, rule in RULES.items() if not rule.is_open
    }
    assert {outcome for _, outcome in refused} == {"UNAUTHENTICATED"}


async def test_a_connection_without_tls_or_an_agents_valid_certificate_reaches_nobody(
    setup: Setup,
) -> None:
    site, server = setup.server.site, setup.server
    stranger = site.agent("stranger", authority=create_authority(site.now_s - 1000))
    late = site.agent("expired", now_s=site.now_s - 3 * 86_400)
    as_agent = replace(
        stranger, certificate=site.folder / "server.pem", key=site.folder / "server.key"
    )
    for address, settings in (
        (server.address, PLAIN_TEXT),
        (server.mutual_address, PLAIN_TEXT),
        (server.mutual_address, setup.of["admin"]),
        (server.mutual_address, stranger),
        (server.mutual_address, late),
        (server.mutual_address, as_agent),
    ):
        async with open_async_channel(address, settings) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await access_pb2_grpc.AccessStub(channel).GetCaller(GET_CALLER, timeout=PATIENCE_S)
        assert refused.value.code() is StatusCode.UNAVAILABLE


@pytest.mark.parametrize("who", WHO)
async def test_a_role_may_call_its_methods(setup: Setup, who: str) -> None:
    """What they answer is left to other tests: what they name may be gone by now."""
    for path, request in requests_for().items():
        if RULES[path].is_open or who in RULES[path].roles:
            code, details = await setup.outcome(who, path, request)
            refused = code in REFUSALS and not path.endswith("/Enrol")
            assert not refused, (path, code, details)
            assert code not in (StatusCode.INTERNAL, StatusCode.UNKNOWN), (path, code, details)


@pytest.mark.parametrize("who", ["viewer", "user", "operator", "agent"])
async def test_a_cluster_out_of_sight_answers_like_one_that_never_was(
    setup: Setup, who: str
) -> None:
    place = "clusters/hidden"
    made = clusters_pb2.Cluster(
        name=place, gpu_types=[clusters_pb2.GpuType(name="a40", memory_bytes=2**35)]
    )
    path = "/tessera.v1.Clusters/UpsertCluster"
    await setup.server.call(
        setup.of["admin"], path, clusters_pb2.UpsertClusterRequest(cluster=made)
    )
    before = await asyncio.to_thread(setup.server.fingerprint)
    never, tried = requests_for(cluster="nowhere"), 0
    for path, request in requests_for(cluster="hidden").items():
        names_none = request == requests_for()[path]
        if names_none or RULES[path].is_open or who not in RULES[path].roles:
            continue
        tried += 1
        code, details = await setup.outcome(who, path, request)
        if path.endswith("/Sync"):
            assert code is StatusCode.PERMISSION_DENIED
            continue
        assert (path, code) == (path, StatusCode.NOT_FOUND)
        other = await setup.outcome(who, path, never[path])
        assert other == (code, details.replace("hidden", "nowhere"))
    assert tried > {"viewer": 15, "user": 22, "operator": 40, "agent": 1}[who]
    assert await asyncio.to_thread(setup.server.fingerprint) == before


NAMES = {
    Kind.JOB: f"{PLACE}/jobs/{{}}",
    Kind.AWAITED: f"{PLACE}/jobs/{{}}",
    Kind.TENANT: f"{PLACE}/tenants/{{}}",
    Kind.TENANT_ID: "{}",
    Kind.OWNED: f"{PLACE}/{{}}",
}
"""The text of a reference in a request, by its kind."""

OF_OTHERS = {
    Kind.JOB: [FOREIGN_JOB],
    Kind.AWAITED: [FOREIGN_JOB, "theirs-array"],
    Kind.TENANT: [FOREIGN],
    Kind.TENANT_ID: [FOREIGN],
    Kind.OWNED: ["arrays/theirs-array", "webhooks/theirs-hook"],
}


async def add_array_and_webhook_of_others(setup: Setup) -> None:
    submit = requests_for()["/tessera.v1.Jobs/SubmitJob"]
    assert isinstance(submit, jobs_pb2.SubmitJobRequest)
    job = jobs_pb2.Job()
    job.CopyFrom(submit.job)
    job.tenant = FOREIGN
    array = jobs_pb2.SubmitJobRequest(
        job_id="theirs-array", job=job, array=jobs_pb2.ArrayIndices(first=1, last=2)
    )
    batch = jobs_pb2.SubmitJobsRequest(parent=PLACE, requests=[array])
    await setup.server.call(setup.of["admin"], "/tessera.v1.Jobs/SubmitJobs", batch)
    with setup.server.database.engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO webhooks (cluster_id, name, tenant, all_tenants, url, events, labels, salt,"
                " created_by) SELECT id, 'theirs-hook', :tenant, false, 'https://x.example/', '{}',"
                " '{}', 'ab', 'ada' FROM clusters WHERE name = 'main'"
            ),
            {"tenant": FOREIGN},
        )


@pytest.mark.parametrize("who", ["viewer", "user"])
async def test_whatever_a_request_names_of_another_tenant_is_as_if_it_never_was(
    setup: Setup, who: str
) -> None:
    """Every text of every request that can name something of a tenant names another's."""
    if who == "viewer":
        await add_array_and_webhook_of_others(setup)
    before = await asyncio.to_thread(setup.server.fingerprint)
    tried = set[str]()
    for path, sample in requests_for().items():
        if who not in RULES[path].roles or RULES[path].is_open or path.startswith("/grpc"):
            continue
        for fields in find_texts(all_methods()[path].input_type):
            kind = kind_of(fields)
            if kind not in NAMES:
                continue
            for name in OF_OTHERS[kind]:
                stem, _, _ = name.rpartition("/")
                never = f"{stem}/never-1" if stem else "never-1"
                outcomes = set[tuple[StatusCode, str]]()
                for named in (name, never):
                    request = type(sample)()
                    request.CopyFrom(sample)
                    set_text(request, fields, NAMES[kind].format(named))
                    for variant in variants(request) if kind is Kind.JOB else [request]:
                        code, details = await setup.outcome(who, path, variant)
                        known = details.replace(named, "NAME")
                        outcomes.add((code, re.sub("job-[0-9a-f]{16}", "job-NEW", known)))
                        assert code is not StatusCode.OK, (path, variant)
                assert len(outcomes) == 1, (path, outcomes)
                tried.add(path)
    assert tried >= {
        f"/tessera.v1.{method}"
        for method in ("Scheduler/WhatIf", "Tenants/GetUsage", "Jobs/GetArray", "Jobs/GetJob")
    }
    assert await asyncio.to_thread(setup.server.fingerprint) == before


def variants(request: Any) -> list[Any]:
    """Return the request with a stale etag, with wrong fields, and with `validate_only`."""
    found = [request]
    for change in ({"etag": '"999"'}, {"etag": "nonsense"}, {"validate_only": True}):
        variant = type(request)()
        variant.CopyFrom(request)
        for name, value in change.items():
            holder = variant.job if isinstance(variant, jobs_pb2.UpdateJobRequest) else variant
            target = holder if name in holder.DESCRIPTOR.fields_by_name else variant
            if name in target.DESCRIPTOR.fields_by_name:
                setattr(target, name, value)
        found.append(variant)
    return found
