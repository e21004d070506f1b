"""TLS, and what a server refuses by default."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc import StatusCode
from typer.testing import CliRunner, Result

from tessera.client import PLAIN_TEXT, ChannelSettings, open_async_channel, open_channel
from tessera.db.schema.engine import Database
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import main
from tessera.service.cli.client import Exit
from tessera.service.server.security.authority import create_authority
from tessera.service.server.security.key_files import write_public
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server
from tessera.v1 import access_pb2, access_pb2_grpc
from tests.support.certificates import DAY_S, EchoPorts, Site, echo_server, make_site
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    IdentityProvider,
    make_key,
    running_provider,
)
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.running_server import settings

FRESH = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path)


@pytest.fixture
async def ports(site: Site) -> AsyncIterator[EchoPorts]:
    async with echo_server(site) as ports:
        yield ports


async def call(address: str, settings: ChannelSettings) -> str:
    """Return the authorization that arrives with a call over a new connection."""
    async with open_async_channel(address, settings, FRESH) as channel:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/test.Echo/UnaryUnary"
        )
        return (await method(b"", timeout=PATIENCE_S)).decode()


async def refusal_of(address: str, settings: ChannelSettings) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(address, settings)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    return refused.value.details() or ""


def trust(site: Site) -> ChannelSettings:
    return ChannelSettings(authorities=site.authorities)


async def test_users_need_no_certificate_and_agents_need_theirs(
    site: Site, ports: EchoPorts
) -> None:
    gc.collect()  # the server alone must keep its credentials
    assert await call(ports.tls, trust(site)) == ""
    text = Path(site.authorities).read_text(encoding="utf-8")
    assert await call(ports.tls, ChannelSettings(authorities=text)) == ""
    assert await call(ports.mutual, site.agent()) == ""
    assert "closed" in await refusal_of(ports.mutual, trust(site))


async def test_an_agent_with_the_largest_certificate_connects(site: Site, ports: EchoPorts) -> None:
    nodes = [f"{chr(97 + k % 26)}{chr(97 + k // 26)}-{'x' * 57}" for k in range(80)]
    settings = site.agent(nodes=nodes)
    assert settings.certificate is not None
    assert settings.certificate.stat().st_size > 7800 * 4 // 3  # base64
    assert await call(ports.mutual, settings) == ""


async def test_agents_without_a_valid_certificate_of_their_authority_are_refused(
    site: Site, ports: EchoPorts
) -> None:
    as_agent = ChannelSettings(
        authorities=site.authorities,
        certificate=site.folder / "server.pem",
        key=site.folder / "server.key",
    )
    stranger = site.agent(authority=create_authority(site.now_s))
    late = site.agent("late", now_s=site.now_s - DAY_S - 600.0)
    for agent in (as_agent, stranger, late):
        assert "closed" in await refusal_of(ports.mutual, agent)


async def test_an_agent_s_certificate_does_not_make_a_server(site: Site) -> None:
    agent = site.agent("server")  # written where the server looks for its own
    async with echo_server(site) as ports:
        assert "unsupported certificate purpose" in await refusal_of(
            ports.tls, ChannelSettings(authorities=agent.authorities)
        )


async def test_a_server_of_another_authority_or_name_is_not_trusted(
    site: Site, ports: EchoPorts, tmp_path: Path
) -> None:
    write_public(tmp_path / "other.pem", create_authority(site.now_s).certificate_pem())
    other = ChannelSettings(authorities=str(tmp_path / "other.pem"))
    assert "CERTIFICATE_VERIFY_FAILED" in await refusal_of(ports.tls, other)
    named = replace(trust(site), server_name="elsewhere.example")
    assert "Hostname Verification" in await refusal_of(ports.tls, named)
    assert await call(ports.tls, replace(trust(site), server_name="localhost")) == ""


async def test_plain_text_and_tls_do_not_mix(site: Site, ports: EchoPorts) -> None:
    assert "closed" in await refusal_of(ports.tls, PLAIN_TEXT)
    assert "WRONG_VERSION_NUMBER" in await refusal_of(ports.plain, trust(site))


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_token_travels_with_calls_of_every_kind(
    site: Site, ports: EchoPorts, encrypted: bool
) -> None:
    address = ports.tls if encrypted else ports.plain
    settings = replace(trust(site) if encrypted else PLAIN_TEXT, token="abc")
    sent = b"Bearer abc"

    def call_from_thread() -> list[bytes]:
        channel: Any  # its methods take bytes
        with open_channel(address, settings) as channel:
            return [
                channel.unary_unary("/test.Echo/UnaryUnary")(b"", timeout=PATIENCE_S),
                *channel.unary_stream("/test.Echo/UnaryStream")(b"", timeout=PATIENCE_S),
                channel.stream_unary("/test.Echo/StreamUnary")(iter([b""]), timeout=PATIENCE_S),
                *channel.stream_stream("/test.Echo/StreamStream")(iter([b""]), timeout=PATIENCE_S),
            ]

    assert await asyncio.to_thread(call_from_thread) == [sent] * 5
    channel: Any
    async with open_async_channel(address, settings) as channel:
        assert await channel.unary_unary("/test.Echo/UnaryUnary")(b"") == sent
        assert [a async for a in channel.unary_stream("/test.Echo/UnaryStream")(b"")] == [sent] * 2
        assert await channel.stream_unary("/test.Echo/StreamUnary")(iter([b""])) == sent
        stream = channel.stream_stream("/test.Echo/StreamStream")()
        for _ in range(2):
            await stream.write(b"")
            assert await stream.read() == sent
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_renewed_token_is_asked_for_at_each_call(
    site: Site, ports: EchoPorts, encrypted: bool
) -> None:
    tokens = iter(("first", "second"))
    address = ports.tls if encrypted else ports.plain
    settings = replace(trust(site) if encrypted else PLAIN_TEXT, renew_token=lambda: next(tokens))
    channel: Any
    async with open_async_channel(address, settings) as channel:
        method = channel.unary_unary("/test.Echo/UnaryUnary")
        assert [await method(b"") for _ in range(2)] == [b"Bearer first", b"Bearer second"]


async def test_a_token_in_plain_text_takes_no_proxy(
    ports: EchoPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert await call(ports.plain, ChannelSettings(token="abc")) == "Bearer abc"
        with pytest.raises(BlockingIOError):
            proxy.accept()
        async with open_async_channel(ports.plain, PLAIN_TEXT, FRESH) as channel:
            channel.get_state(try_to_connect=True)
            connection, _ = await asyncio.wait_for(
                asyncio.get_running_loop().sock_accept(proxy), PATIENCE_S
            )  # what has no token may take the proxy
            connection.close()


async def test_a_new_certificate_is_served_while_calls_run(
    site: Site, ports: EchoPorts, caplog: pytest.LogCaptureFixture
) -> None:
    channel: Any
    async with open_async_channel(ports.tls, trust(site)) as channel:
        stream = channel.stream_stream("/test.Echo/StreamStream")()
        await stream.write(b"")
        assert await stream.read() == b""
        other = create_authority(site.now_s)
        with caplog.at_level(logging.INFO):
            site.renew_server(authority=other)
            assert "CERTIFICATE_VERIFY_FAILED" in await refusal_of(ports.tls, trust(site))
            write_public(site.folder / "new.pem", other.certificate_pem())
            new = ChannelSettings(authorities=str(site.folder / "new.pem"))
            assert await call(ports.tls, new) == ""
        await stream.write(b"")
        assert await stream.read() == b""  # the old connection stays open
        await stream.done_writing()
    assert len(logged_lines(caplog, "certificate_replaced")) == 1


async def test_agents_of_both_authorities_are_let_in_while_the_authority_changes(
    site: Site, ports: EchoPorts
) -> None:
    new, old_agent = create_authority(site.now_s), site.agent("old")
    new_agent = site.agent("new", authority=new)
    assert "closed" in await refusal_of(ports.mutual, new_agent)
    both = new.certificate_pem() + site.authority.certificate_pem()
    write_public(site.folder / "ca.pem", both)
    assert await call(ports.mutual, old_agent) == await call(ports.mutual, new_agent) == ""
    site.renew_server(authority=new)
    write_public(site.folder / "ca.pem", new.certificate_pem())
    assert await call(ports.mutual, new_agent) == ""
    assert "closed" in await refusal_of(ports.mutual, old_agent)


TOKEN = f"tessera_token_{'a' * 12}_{'S' * 43}"


async def run_command(tmp_path: Path, address: str, **variables: str) -> Result:
    """Run a command, with settings from its environment alone."""
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "none")}
    return await asyncio.to_thread(
        CliRunner().invoke, main.app, ["jobs"], env={**home, "TESSERA_SERVER": address, **variables}
    )


def check_refused(result: Result, *texts: str) -> None:
    assert result.exit_code == Exit.REFUSED, result.output
    assert len(result.stderr.splitlines()) == 1
    for text in texts:
        assert text in result.stderr
    assert "SSSS" not in result.output


@pytest.mark.parametrize(
    ("port", "variables", "texts"),
    [
        ("tls", {}, ["{address} uses TLS", "set TESSERA_CA to the file"]),
        ("mutual", {}, ["{address} uses TLS", "set TESSERA_CA to the file"]),
        ("plain", {"TESSERA_CA": "ca.pem"}, ["{address} does not use TLS", "unset TESSERA_CA"]),
        (
            "tls",
            {"TESSERA_CA": "other.pem"},
            ["not signed by an authority that you trust", "set TESSERA_CA"],
        ),
        (
            "tls",
            {"TESSERA_CA": "ca.pem", "TESSERA_SERVER_NAME": "b.example"},
            ["is for other names", "TESSERA_SERVER_NAME"],
        ),
        (
            "mutual",
            {"TESSERA_CA": "ca.pem"},
            ["perhaps because it asks for a certificate", "call the port of users"],
        ),
    ],
)
async def test_a_connection_that_tls_refuses_is_explained(
    site: Site, ports: EchoPorts, port: str, variables: dict[str, str], texts: list[str]
) -> None:
    write_public(site.folder / "other.pem", create_authority(site.now_s).certificate_pem())
    if "TESSERA_CA" in variables:
        variables = variables | {"TESSERA_CA": str(site.folder / variables["TESSERA_CA"])}
    address = getattr(ports, port)
    result = await run_command(site.folder, address, **variables)
    check_refused(result, *(text.format(address=address) for text in texts))


async def test_a_server_with_an_expired_certificate(tmp_path: Path, site: Site) -> None:
    past_s = site.now_s - 50 * DAY_S
    site.renew_server(now_s=past_s, days=10)
    async with echo_server(site, lambda: past_s) as ports:
        result = await run_command(tmp_path, ports.tls, TESSERA_CA=site.authorities)
    check_refused(result, "has expired", "`tessera ca server`")


async def test_a_token_for_another_machine_in_plain_text(tmp_path: Path) -> None:
    result = await run_command(tmp_path, "tessera.example:7070", TESSERA_TOKEN=TOKEN)
    check_refused(
        result, "would send the token in plain text to tessera.example:7070", "set TESSERA_CA"
    )


@pytest.mark.parametrize(
    "variable", ["TESSERA_SERVER", "TESSERA_CA", "TESSERA_TOKEN_FILE", "TESSERA_KEY"]
)
async def test_a_token_in_the_wrong_variable(tmp_path: Path, variable: str) -> None:
    result = await run_command(tmp_path, **{"address": "localhost:1", variable: TOKEN})
    check_refused(result, variable)


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


async def token_refusal_of(port: int, token: str) -> tuple[StatusCode, str]:
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
        assert await token_refusal_of(port, expired) == (
            StatusCode.UNAUTHENTICATED,
            "the token expired 60 min ago by the clock of this server; log in again with `tessera login`."
            " If the token is new, the clocks of the server and of the identity provider disagree",
        )
        assert (await token_refusal_of(port, forged))[0] is StatusCode.UNAUTHENTICATED
        assert (await token_refusal_of(port, strangers))[0] is StatusCode.PERMISSION_DENIED
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
        code, details = await token_refusal_of(port, provider.make_token())
        assert code is StatusCode.UNAVAILABLE
        assert "127.0.0.1 cannot be reached" in details
