"""Channels with TLS over real sockets: who is let in, what the command line says, and new certificates."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner, Result

from tessera.client import PLAIN_TEXT, ChannelSettings, open_async_channel, open_channel
from tessera.service.cli import main
from tessera.service.cli.client import Exit
from tessera.service.security.authority import create_authority
from tessera.service.security.key_files import write_public
from tests.support.certificates import DAY_S, EchoPorts, Site, echo_server, make_site
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S

FRESH = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path)


@pytest.fixture
async def ports(site: Site) -> AsyncIterator[EchoPorts]:
    async with echo_server(site) as ports:
        gc.collect()  # the server alone must keep its credentials
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
    assert await call(ports.tls, trust(site)) == ""
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
    for settings in (as_agent, stranger, late):
        assert "closed" in await refusal_of(ports.mutual, settings)


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


async def test_authorities_may_be_given_as_text(site: Site, ports: EchoPorts) -> None:
    text = Path(site.authorities).read_text(encoding="utf-8")
    assert await call(ports.tls, ChannelSettings(authorities=text)) == ""


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
        CliRunner().invoke,
        main.app,
        ["jobs"],
        env={**home, "TESSERA_SERVER": address, **variables},
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
