"""A server that asks callers who they are, with an identity provider, over a socket."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from grpc import StatusCode

from tessera.client import PLAIN_TEXT, ChannelSettings, open_async_channel
from tessera.db.engine import Database
from tessera.formulation.clock import SystemClock
from tessera.service.wiring import run_server
from tessera.v1 import access_pb2, access_pb2_grpc
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    IdentityProvider,
    make_key,
    running_provider,
)
from tests.support.running_server import settings

WHO = access_pb2.GetCallerRequest()


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        provider.wall_s = SystemClock().wall_s
        yield provider


async def ask_caller(port: int, token: str) -> access_pb2.Caller:
    chosen = ChannelSettings(token=token)
    async with open_async_channel(f"127.0.0.1:{port}", chosen) as channel:
        return await access_pb2_grpc.AccessStub(channel).GetCaller(WHO)


async def refusal_of(port: int, token: str) -> tuple[StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask_caller(port, token)
    details = caught.value.details() or ""
    assert token.rpartition(".")[2] not in details
    return caught.value.code(), details


async def test_a_server_knows_callers_by_the_tokens_of_its_provider(
    provider: IdentityProvider, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = settings(
        database,
        authenticate=True,
        oidc_issuer=provider.issuer,
        oidc_audience=AUDIENCE,
        oidc_client_id=CLIENT_ID,
        oidc_roles="ml-admins=admin, ml=user",
    )
    async with run_server(config) as port:
        async with open_async_channel(f"127.0.0.1:{port}", PLAIN_TEXT) as channel:
            login = await access_pb2_grpc.AccessStub(channel).GetLogin(access_pb2.GetLoginRequest())
        assert (login.issuer, login.audience, login.client_id) == (
            provider.issuer,
            AUDIENCE,
            CLIENT_ID,
        )
        token = provider.make_token(roles=["ml"], tenants=["vision", "speech"])
        caller = await ask_caller(port, token)
        assert (caller.subject, caller.role, caller.verified) == ("ada", "user", True)
        assert (sorted(caller.tenants), caller.all_tenants) == (["speech", "vision"], False)
        now_s = int(provider.wall_s())
        expired = provider.make_token(roles=["ml"], exp=now_s - 3600)
        forged = provider.make_token(make_key(number=7), roles=["ml-admins"])
        strangers = provider.make_token(roles=["admin"])
        assert await refusal_of(port, expired) == (
            StatusCode.UNAUTHENTICATED,
            "the token expired 60 min ago by the clock of this server; log in again with `tessera login`."
            " If the token is new, the clocks of the server and of the identity provider disagree",
        )
        assert (await refusal_of(port, forged))[0] is StatusCode.UNAUTHENTICATED
        assert (await refusal_of(port, strangers))[0] is StatusCode.PERMISSION_DENIED
        provider.switch_off()
        assert (await ask_caller(port, token)).subject == "ada"
        assert (await ask_caller(port, provider.make_token(roles=["ml-admins"]))).role == "admin"
    for secret in (token, expired, forged, strangers):
        assert secret.rpartition(".")[2] not in caplog.text


async def test_a_server_that_cannot_reach_its_provider_is_unavailable_to_its_users(
    provider: IdentityProvider, database: Database
) -> None:
    provider.switch_off()
    config = settings(
        database,
        authenticate=True,
        oidc_issuer=provider.issuer,
        oidc_audience=AUDIENCE,
        oidc_client_id=CLIENT_ID,
    )
    async with run_server(config) as port:
        code, details = await refusal_of(port, provider.make_token())
        assert code is StatusCode.UNAVAILABLE
        assert "127.0.0.1 cannot be reached" in details
