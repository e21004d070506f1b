"""The proofs that a server asks of callers: by default, on Unix sockets, and with an identity provider."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc import StatusCode

from tessera.client import PLAIN_TEXT, ChannelSettings, open_async_channel
from tessera.db.engine import Database
from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import InvalidInput
from tessera.service.config import Config
from tessera.service.wiring import run_server
from tessera.v1 import access_pb2, access_pb2_grpc
from tests.support.certificates import make_site
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    IdentityProvider,
    make_key,
    running_provider,
)
from tests.support.logged import logged_lines
from tests.support.running_server import settings


async def ask(address: str) -> access_pb2.Caller:
    async with open_async_channel(address, PLAIN_TEXT) as channel:
        return await access_pb2_grpc.AccessStub(channel).GetCaller(access_pb2.GetCallerRequest())


async def test_without_settings_a_server_is_for_this_machine_and_says_that_it_asks_nobody(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert Config().listen.startswith("127.0.0.1:")
    async with run_server(settings(database)) as port:
        caller = await ask(f"127.0.0.1:{port}")
    assert (caller.subject, caller.role, caller.verified) == ("local", "admin", False)
    (line,) = logged_lines(caplog, "callers_not_asked")
    assert "everyone on this machine" in line


async def test_a_server_that_is_insecure_on_purpose_says_who_may_do_everything(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(settings(database, insecure=True)):
        (line,) = logged_lines(caplog, "callers_not_asked")
        assert "everyone who reaches the port" in line


async def test_a_server_on_loopback_asks_for_tokens_if_configured(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(settings(database, authenticate=True)) as port:
        with pytest.raises(grpc.aio.AioRpcError, match="the call has no token") as refused:
            await ask(f"127.0.0.1:{port}")
    assert refused.value.code() is StatusCode.UNAUTHENTICATED
    assert not logged_lines(caplog, "callers_not_asked")


async def test_the_socket_of_a_server_with_tls_is_for_its_user_alone(
    database: Database, tmp_path: Path
) -> None:
    make_site(tmp_path)
    path = tmp_path / "private" / "tessera.sock"
    config = settings(database, tls_directory=str(tmp_path), socket=str(path))
    async with run_server(config):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == os.getuid()
        assert (await ask(f"unix:{path}")).subject == "local"


async def test_a_socket_in_a_directory_that_others_can_enter_is_refused(
    database: Database, tmp_path: Path
) -> None:
    for mode in (0o755, 0o710, 0o701):
        tmp_path.chmod(mode)
        with pytest.raises(InvalidInput, match="other users can enter"):
            async with run_server(settings(database, socket=str(tmp_path / "tessera.sock"))):
                pass


async def test_callers_on_a_socket_of_the_setting_listen_are_asked_for_tokens(
    database: Database, tmp_path: Path
) -> None:
    """Its directory is not checked, so others may reach it."""
    address = f"unix:{tmp_path / 'tessera.sock'}"
    async with run_server(settings(database, listen=address, authenticate=True)):
        with pytest.raises(grpc.aio.AioRpcError, match="the call has no token"):
            await ask(address)


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
