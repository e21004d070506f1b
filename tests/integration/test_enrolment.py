"""Agents that enrol, renew and speak over sockets of a server with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec
from grpc import StatusCode

from tessera.client import ChannelSettings
from tessera.db.access import audit_log
from tessera.db.access.enrolment import create_join_token
from tessera.formulation.base.access import Role
from tessera.formulation.base.secrets import JOIN_PREFIX, format_token, hash_secret
from tessera.formulation.records.access import AuditFilter
from tessera.service.server.security.authority import KeyedCertificate, read_agent_identity
from tessera.service.server.security.key_files import write_private, write_public
from tessera.v1 import access_pb2, agents_pb2, agents_pb2_grpc
from tests.support.access import EARLIER_S, a_join_token
from tests.support.certificates import signing_request
from tests.support.database import a_database
from tests.support.patience import PATIENCE_S
from tests.support.secured_server import (
    CALLER_PATH,
    GET_CALLER,
    PLACE,
    SecuredServer,
    fill,
    requests_for,
    secured_server,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENROL, RENEW = "/tessera.v1.Agents/Enrol", "/tessera.v1.Agents/RenewCertificate"
GET_JOB = "/tessera.v1.Jobs/GetJob"

_numbers = itertools.count(1)


class Setup:
    """A server with TLS, and an administrator."""

    def __init__(self, server: SecuredServer) -> None:
        self.server = server
        self.admin = server.user(server.add_token("ada", Role.ADMIN))

    async def join_token(self, *nodes: str, uses: int = 1, parent: str = PLACE) -> Any:
        """Create a join token; return the answer."""
        request = access_pb2.CreateJoinTokenRequest(
            parent=parent, join_token=access_pb2.JoinToken(nodes=nodes or ["*"], uses=uses)
        )
        path = "/tessera.v1.Access/CreateJoinToken"
        return await self.server.call(self.admin, path, request)

    async def enrol(
        self, token: str, agent: str, nodes: Sequence[str], parent: str = PLACE
    ) -> ChannelSettings:
        """Enrol an agent; return the settings of its channel. Raises AioRpcError."""
        key = ec.generate_private_key(ec.SECP256R1())
        request = agents_pb2.EnrolRequest(
            parent=parent,
            agent_id=agent,
            nodes=nodes,
            join_token=token,
            signing_request=signing_request(key),
        )
        answer = await self.server.call(self.server.user(), ENROL, request)
        assert answer.port == self.server.parts.server.mutual_port
        return self.keep(answer.certificate, key)

    def keep(self, certificate: str, key: Any) -> ChannelSettings:
        """Write a certificate and its key; return the settings of its channel."""
        site = self.server.site
        stem = site.folder / f"enrolled-{next(_numbers)}"
        write_public(stem.with_suffix(".pem"), certificate.encode())
        key_pem = KeyedCertificate(site.authority.certificate, key).key_pem()
        write_private(stem.with_suffix(".key"), key_pem)
        return ChannelSettings(
            authorities=site.authorities,
            certificate=stem.with_suffix(".pem"),
            key=stem.with_suffix(".key"),
        )

    async def refusal(
        self, token: str, agent: str, nodes: Sequence[str], parent: str = PLACE
    ) -> tuple[StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.enrol(token, agent, nodes, parent)
        return refused.value.code(), refused.value.details() or ""

    async def audited(self, method: str) -> list[tuple[str, str, str]]:
        """Return the subject, the target and the outcome of a method's calls, the newest first."""
        await self.server.parts.server.gate._refusals._flush()
        chosen = AuditFilter(method=method)
        entries = await asyncio.to_thread(
            self.server.access.read, audit_log.list_entries, chosen, 0, 100
        )
        return [(entry.subject, entry.target, entry.outcome) for entry in entries]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    with a_database(server_url) as database:
        async with secured_server(tmp_path_factory.mktemp("site"), database) as server:
            found = Setup(server)
            await fill(server, found.admin)
            yield found


class Stream:
    """The stream of an agent."""

    def __init__(self, setup: Setup, who: ChannelSettings) -> None:
        self._call: Any = agents_pb2_grpc.AgentsStub(setup.server.channel(who)).Sync()

    async def greet(
        self, agent: str, *nodes: str, incarnation: str = "first", parent: str = PLACE
    ) -> Any:
        """Send a hello; return the first answer. Raises AioRpcError."""
        hello = agents_pb2.Hello(
            parent=parent,
            agent_id=agent,
            incarnation=incarnation,
            nodes=[agents_pb2.AgentNode(node=node, gpu_type="a40", gpus=2) for node in nodes],
        )
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(asyncio.InvalidStateError):
                await self._call.write(agents_pb2.AgentMessage(hello=hello, sent_at_s=1.0))
            return await self._call.read()

    async def refusal(self, agent: str, *nodes: str, **rest: Any) -> tuple[StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError):
            await self.greet(agent, *nodes, **rest)
        return await self._call.code(), await self._call.details()

    async def end(self) -> tuple[StatusCode, str]:
        """Read until the stream ends; return its code and message."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self._call.read() is not grpc.aio.EOF:
                    continue
            return await self._call.code(), await self._call.details()

    def cancel(self) -> None:
        self._call.cancel()


async def test_an_enrolled_agent_is_who_it_enrolled_as_and_opens_its_stream(setup: Setup) -> None:
    token = await setup.join_token("one-*")
    who = await setup.enrol(token.text, "one", ["one-0", "one-1"])
    caller = await setup.server.call(who, CALLER_PATH, GET_CALLER)
    assert (caller.subject, caller.role, list(caller.clusters)) == ("agents/one", "agent", ["main"])
    stream = Stream(setup, who)
    assert (await stream.greet("one", "one-0")).HasField("welcome")
    stream.cancel()
    expected = (f"join token {token.join_token.id}", f"{PLACE}/agents/one", "OK")
    assert expected in await setup.audited("Agents.Enrol")


async def test_a_join_token_that_is_sent_again_is_refused(setup: Setup) -> None:
    token = await setup.join_token("two-*")
    await setup.enrol(token.text, "two", ["two-0"])
    before = await asyncio.to_thread(setup.server.fingerprint)
    for agent in ("two", "other"):
        code, details = await setup.refusal(token.text, agent, ["two-0"])
        assert code is StatusCode.UNAUTHENTICATED
        assert "which are used up" in details
    assert await asyncio.to_thread(setup.server.fingerprint) == before
    assert (await setup.audited("Agents.Enrol"))[0] == ("", PLACE, "UNAUTHENTICATED")


async def test_join_tokens_that_prove_nothing_enrol_nobody(setup: Setup) -> None:
    token = await setup.join_token("three-*", uses=10)
    revoked = await setup.join_token("three-*")
    request = access_pb2.RevokeJoinTokenRequest(parent=PLACE, id=revoked.join_token.id)
    await setup.server.call(setup.admin, "/tessera.v1.Access/RevokeJoinToken", request)
    expired = a_join_token(cluster="main", nodes=("three-*",), expires_s=EARLIER_S)
    setup.server.access.change(
        create_join_token, replace(expired, secret_hash=hash_secret(43 * "s")), "tests"
    )
    old = format_token(JOIN_PREFIX, expired.id, 43 * "s")
    forged = [text[:-43] + 43 * "x" for text in (token.text, revoked.text)]
    unknown = "tessera_join_" + 12 * "z" + "_" + 43 * "x"
    before = await asyncio.to_thread(setup.server.fingerprint)
    answers = {await setup.refusal(text, "three", ["three-0"]) for text in (*forged, unknown)}
    assert [code for code, _ in answers] == [StatusCode.UNAUTHENTICATED]
    cases: list[tuple[str, list[str], str, StatusCode, str]] = [
        (revoked.text, ["three-0"], PLACE, StatusCode.UNAUTHENTICATED, "was revoked"),
        (old, ["three-0"], PLACE, StatusCode.UNAUTHENTICATED, "has expired"),
        (token.text, ["four-0"], PLACE, StatusCode.PERMISSION_DENIED, "does not allow node four-0"),
        (token.text, ["three-0"], "clusters/else", StatusCode.UNAUTHENTICATED, "not for cluster"),
        (token.text, [], PLACE, StatusCode.INVALID_ARGUMENT, "nodes"),
        (token.text, ["../x"], PLACE, StatusCode.INVALID_ARGUMENT, "nodes"),
        (token.text, ["three-0"], "main", StatusCode.INVALID_ARGUMENT, "parent"),
        ("", ["three-0"], PLACE, StatusCode.INVALID_ARGUMENT, "is not a join token"),
        (setup.admin.token, ["three-0"], PLACE, StatusCode.INVALID_ARGUMENT, "not a join token"),
    ]
    for text, nodes, parent, expected, why in cases:
        code, details = await setup.refusal(text, "three", nodes, parent)
        assert (code, why in details) == (expected, True), details
        assert not text or text not in details
    assert await asyncio.to_thread(setup.server.fingerprint) == before


async def test_an_agent_speaks_for_itself_and_for_its_own_nodes_only(setup: Setup) -> None:
    token = await setup.join_token("six-*")
    who = await setup.enrol(token.text, "six", ["six-0"])
    before = await asyncio.to_thread(setup.server.fingerprint)
    attempts: list[tuple[str, list[str], dict[str, str], str]] = [
        ("six", ["host-0"], {}, "does not name the nodes host-0"),
        ("six", ["six-0", "six-1"], {}, "does not name the nodes six-1"),
        ("one", ["six-0"], {}, "that of agent six of the cluster main, and not of one of main"),
        ("six", ["six-0"], {"parent": "clusters/hidden"}, "and not of six of hidden"),
    ]
    for agent, nodes, rest, why in attempts:
        code, details = await Stream(setup, who).refusal(agent, *nodes, **rest)
        assert (code, why in details) == (StatusCode.PERMISSION_DENIED, True), details
    assert await asyncio.to_thread(setup.server.fingerprint) == before
    refused = [entry for entry in await setup.audited("Agents.Sync") if entry[0] == "agents/six"]
    assert {outcome for _, _, outcome in refused} == {"PERMISSION_DENIED"}


async def test_a_certificate_and_a_token_on_one_call_are_refused(setup: Setup) -> None:
    metadata = [("authorization", f"Bearer {setup.admin.token}")]
    agent = setup.server.site.agent("both")
    for path in (CALLER_PATH, GET_JOB):
        outcome = await setup.server.outcome(agent, path, requests_for()[path], metadata)
        assert outcome == (
            StatusCode.UNAUTHENTICATED,
            "the call has a certificate and a token; send one of them",
        )


async def renew(setup: Setup, who: ChannelSettings) -> ChannelSettings:
    key = ec.generate_private_key(ec.SECP256R1())
    request = agents_pb2.RenewCertificateRequest(signing_request=signing_request(key))
    answer = await setup.server.call(who, RENEW, request)
    return setup.keep(answer.certificate, key)


async def test_a_renewed_certificate_has_the_same_nodes_and_the_earlier_one_stays_valid(
    setup: Setup,
) -> None:
    who = await setup.enrol((await setup.join_token("8-*")).text, "eight", ["8-0", "8-1"])
    later = await renew(setup, who)
    assert later.certificate is not None
    identity = read_agent_identity(later.certificate.read_bytes())
    assert (identity.agent, identity.cluster) == ("eight", "main")
    assert identity.nodes == {"8-0", "8-1"}
    for settings in (who, later):
        assert (await setup.server.call(settings, CALLER_PATH, GET_CALLER)).role == "agent"


async def test_certificates_that_the_server_did_not_sign_are_not_renewed(setup: Setup) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="is not known") as refused:
        await renew(setup, setup.server.site.agent("offline"))
    assert refused.value.code() is StatusCode.UNAUTHENTICATED
    code, _ = await setup.server.outcome(setup.admin, RENEW, requests_for()[RENEW])
    assert code is StatusCode.PERMISSION_DENIED


async def test_a_revoked_agent_is_cut_off_with_all_its_certificates_and_others_are_not(
    setup: Setup,
) -> None:
    first = await setup.enrol((await setup.join_token("nine")).text, "nine", ["nine"])
    renewed = await renew(setup, first)
    other = await setup.enrol((await setup.join_token("ten")).text, "ten", ["ten"])
    stream, neighbour = Stream(setup, first), Stream(setup, other)
    assert (await stream.greet("nine", "nine")).HasField("welcome")
    assert (await neighbour.greet("ten", "ten")).HasField("welcome")
    request = access_pb2.RevokeAgentRequest(parent=PLACE, agent="nine")
    await setup.server.call(setup.admin, "/tessera.v1.Access/RevokeAgent", request)
    code, details = await stream.end()
    assert code is StatusCode.UNAUTHENTICATED
    assert "certificate with which this call began was revoked" in details
    for settings in (first, renewed):
        code, details = await setup.server.outcome(settings, CALLER_PATH, GET_CALLER)
        assert code is StatusCode.UNAUTHENTICATED
        assert "agent nine was revoked" in details
        with pytest.raises(grpc.aio.AioRpcError, match="was revoked"):
            await renew(setup, settings)
    assert (await setup.server.call(other, CALLER_PATH, GET_CALLER)).subject == "agents/ten"
    assert (await neighbour._call.read()).HasField("desired")
    neighbour.cancel()
    again = await setup.enrol((await setup.join_token("nine")).text, "nine", ["nine"])
    assert (await setup.server.call(again, CALLER_PATH, GET_CALLER)).subject == "agents/nine"


async def test_weak_and_foreign_signing_requests_are_refused_without_a_use(setup: Setup) -> None:
    token = await setup.join_token("eleven")
    request = agents_pb2.EnrolRequest(
        parent=PLACE, agent_id="eleven", nodes=["eleven"], join_token=token.text
    )
    weak = signing_request(ec.generate_private_key(ec.SECP192R1()))
    for text in ("", "nonsense", weak, "x" * 100_000):
        request.signing_request = text
        code, _ = await setup.server.outcome(setup.server.user(), ENROL, request)
        assert code is StatusCode.INVALID_ARGUMENT
    await setup.enrol(token.text, "eleven", ["eleven"])
