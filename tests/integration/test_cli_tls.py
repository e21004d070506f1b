"""Failures of TLS and of identities on the command line: one line that says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli import main
from tessera.service.cli.client import Exit
from tessera.service.security.authority import create_authority
from tessera.service.security.key_files import write_public
from tests.support.certificates import DAY_S, EchoPorts, Site, echo_server, make_site

TOKEN = f"tessera_token_{'a' * 12}_{'S' * 43}"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path)


@pytest.fixture
async def ports(site: Site) -> AsyncIterator[EchoPorts]:
    async with echo_server(site) as ports:
        yield ports


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


async def test_plain_text_to_a_port_with_tls(tmp_path: Path, ports: EchoPorts) -> None:
    for address in (ports.tls, ports.mutual):
        check_refused(
            await run_command(tmp_path, address),
            f"{address} uses TLS",
            "set TESSERA_CA to the file",
        )


async def test_tls_to_a_port_without(tmp_path: Path, site: Site, ports: EchoPorts) -> None:
    result = await run_command(tmp_path, ports.plain, TESSERA_CA=site.authorities)
    check_refused(result, f"{ports.plain} does not use TLS", "unset TESSERA_CA")


async def test_a_server_of_an_unknown_authority(
    tmp_path: Path, site: Site, ports: EchoPorts
) -> None:
    write_public(tmp_path / "other.pem", create_authority(site.now_s).certificate_pem())
    result = await run_command(tmp_path, ports.tls, TESSERA_CA=str(tmp_path / "other.pem"))
    check_refused(result, "not signed by an authority that you trust", "set TESSERA_CA")


async def test_a_server_with_another_name(tmp_path: Path, site: Site, ports: EchoPorts) -> None:
    result = await run_command(
        tmp_path, ports.tls, TESSERA_CA=site.authorities, TESSERA_SERVER_NAME="b.example"
    )
    check_refused(result, "is for other names", "TESSERA_SERVER_NAME")


async def test_a_server_with_an_expired_certificate(tmp_path: Path, site: Site) -> None:
    past_s = site.now_s - 50 * DAY_S
    site.renew_server(now_s=past_s, days=10)
    async with echo_server(site, lambda: past_s) as ports:
        result = await run_command(tmp_path, ports.tls, TESSERA_CA=site.authorities)
    check_refused(result, "has expired", "`tessera ca server`")


async def test_a_user_at_the_port_of_agents(tmp_path: Path, site: Site, ports: EchoPorts) -> None:
    result = await run_command(tmp_path, ports.mutual, TESSERA_CA=site.authorities)
    check_refused(result, "perhaps because it asks for a certificate", "call the port of users")


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
