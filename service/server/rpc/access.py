"""tessera.v1.Access: tokens of users, join tokens and certificates of agents, the audit log."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
from google.protobuf.empty_pb2 import Empty

from tessera.db.access import audit_log
from tessera.db.access.enrolment import (
    create_join_token,
    list_certificates,
    list_join_tokens,
    revoke_agent,
    revoke_join_token,
)
from tessera.db.access.tokens import create_token, list_tokens, revoke_token
from tessera.db.store.store import Store
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.formulation.base.release import installed_version
from tessera.formulation.base.secrets import (
    JOIN_PREFIX,
    USER_PREFIX,
    format_token,
    hash_secret,
    hide_secrets,
)
from tessera.service.server.convert import access as convert
from tessera.service.server.convert import names
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.tasks.lanes import SizedCalls
from tessera.v1 import access_pb2 as pb
from tessera.v1 import access_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]

MAX_ENTRIES: Final = 1000

_ID_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class NewToken:
    """The parts of a new token: its text, and what is kept of it. Its ``repr`` shows no secret."""

    id: str
    secret_hash: bytes
    text: Callable[[str], str]


def make_token() -> NewToken:
    """Return a token with a random id and 256 random bits of secret."""
    token_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(12))
    secret = secrets.token_urlsafe(32)
    return NewToken(
        token_id, hash_secret(secret), lambda prefix: format_token(prefix, token_id, secret)
    )


class AccessServicer(access_pb2_grpc.AccessServicer):
    """The servicer of identities. Without a store, the server asks nobody who they are.

    ``schema`` is the revision of the database's schema that this release needs.
    """

    def __init__(
        self,
        store: Store | None,
        calls: SizedCalls,
        login: pb.Login,
        wall_s: Callable[[], float],
        schema: str,
    ) -> None:
        self._stored, self._calls, self._login, self._wall_s = store, calls, login, wall_s
        self._schema = schema

    async def GetCaller(self, request: pb.GetCallerRequest, context: _Context) -> pb.Caller:
        """Return who the caller is."""
        return convert.of_caller(IDENTITY.get())

    async def GetServer(self, request: pb.GetServerRequest, context: _Context) -> pb.Server:
        """Return the server's release, schema and clock."""
        answer = pb.Server(release=installed_version(), schema=self._schema)
        answer.time.FromNanoseconds(round(self._wall_s() * 1e9))
        return answer

    async def GetLogin(self, request: pb.GetLoginRequest, context: _Context) -> pb.Login:
        """Return how users of this server log in."""
        return self._login

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: _Context
    ) -> pb.CreateTokenResponse:
        """Create a token of a user."""
        return await self._calls.run(self._create_token, request)

    async def ListTokens(
        self, request: pb.ListTokensRequest, context: _Context
    ) -> pb.ListTokensResponse:
        """Return the tokens, by name."""
        found = await self._calls.run(self._store.read, list_tokens, with_ended=request.with_ended)
        return pb.ListTokensResponse(tokens=map(convert.of_token, found))

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: _Context) -> pb.Token:
        """Revoke a token."""
        _require_no_secret("name", request.name)
        return convert.of_token(
            await self._calls.run(self._store.change, revoke_token, request.name)
        )

    async def CreateJoinToken(
        self, request: pb.CreateJoinTokenRequest, context: _Context
    ) -> pb.CreateJoinTokenResponse:
        """Create a token with which agents enrol."""
        return await self._calls.run(self._create_join_token, request)

    async def ListJoinTokens(
        self, request: pb.ListJoinTokensRequest, context: _Context
    ) -> pb.ListJoinTokensResponse:
        """Return the join tokens of a cluster, the newest first."""
        cluster = names.parse_cluster("parent", request.parent)
        found = await self._calls.run(
            self._store.read, list_join_tokens, cluster, with_ended=request.with_ended
        )
        return pb.ListJoinTokensResponse(join_tokens=map(convert.of_join_token, found))

    async def RevokeJoinToken(
        self, request: pb.RevokeJoinTokenRequest, context: _Context
    ) -> pb.JoinToken:
        """Revoke a join token."""
        cluster = names.parse_cluster("parent", request.parent)
        _require_no_secret("id", request.id)
        found = await self._calls.run(self._store.change, revoke_join_token, cluster, request.id)
        return convert.of_join_token(found)

    async def ListCertificates(
        self, request: pb.ListCertificatesRequest, context: _Context
    ) -> pb.ListCertificatesResponse:
        """Return the certificates of a cluster's agents that have not expired."""
        cluster = names.parse_cluster("parent", request.parent)
        found = await self._calls.run(self._store.read, list_certificates, cluster)
        return pb.ListCertificatesResponse(certificates=map(convert.of_certificate, found))

    async def RevokeAgent(self, request: pb.RevokeAgentRequest, context: _Context) -> Empty:
        """Revoke all certificates of an agent."""
        cluster = names.parse_cluster("parent", request.parent)
        agent = names.require_identifier("agent", request.agent)
        await self._calls.run(self._store.change, revoke_agent, cluster, agent)
        return Empty()

    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: _Context
    ) -> pb.ListAuditEntriesResponse:
        """Return a page of entries of the audit log, the newest first."""
        return await self._calls.run(self._list_entries, request)

    @property
    def _store(self) -> Store:
        if self._stored is None:
            raise NotAllowed(
                "this server keeps no tokens, because its store has none; use a server with a database"
            )
        return self._stored

    def _create_token(self, request: pb.CreateTokenRequest) -> pb.CreateTokenResponse:
        made = make_token()
        spec = convert.to_token("token", request.token, made.id, made.secret_hash, self._wall_s())
        record = self._store.change(create_token, spec, IDENTITY.get().subject)
        return pb.CreateTokenResponse(token=convert.of_token(record), text=made.text(USER_PREFIX))

    def _create_join_token(self, request: pb.CreateJoinTokenRequest) -> pb.CreateJoinTokenResponse:
        made, cluster = make_token(), names.parse_cluster("parent", request.parent)
        spec = convert.to_join_token(
            "join_token", request.join_token, cluster, made.id, made.secret_hash, self._wall_s()
        )
        record = self._store.change(create_join_token, spec, IDENTITY.get().subject)
        return pb.CreateJoinTokenResponse(
            join_token=convert.of_join_token(record), text=made.text(JOIN_PREFIX)
        )

    def _list_entries(self, request: pb.ListAuditEntriesRequest) -> pb.ListAuditEntriesResponse:
        page = page_of(
            request, request.page_size, request.page_token, most=MAX_ENTRIES, counts=True
        )
        found = self._store.read(
            audit_log.list_entries, convert.to_filter(request), page.number, page.size + 1
        )
        last = found[page.size - 1].number if len(found) > page.size else 0
        return pb.ListAuditEntriesResponse(
            entries=map(convert.of_entry, found[: page.size]), next_page_token=page.token(last)
        )


def _require_no_secret(field: str, text: str) -> None:
    """Refuse a token where its name or id belongs, without repeating it. Raises InvalidInput."""
    if hide_secrets(text) != text:
        raise InvalidInput(field, "must be the name or the id, not the token itself")
    names.require_identifier(field, text)
