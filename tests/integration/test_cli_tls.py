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
