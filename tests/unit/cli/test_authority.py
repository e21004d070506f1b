"""``tessera ca``: an authority from its first day to its replacement."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from typer.testing import CliRunner, Result

from tessera.formulation.base.clock import SystemClock
from tessera.service.cli import main
from tessera.service.server.security.authority import create_authority, list_hosts
from tessera.service.server.security.key_files import (
    parse_certificates,
    read_authority,
    write_public,
)
from tests.support.certificates import read_pair


def run_command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main.app, ["ca", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tls"
    result = run_command("init", folder, "--host", "localhost", "--host", "127.0.0.1")
    assert result.exit_code == 0, result.output
    return folder


def authorities(folder: Path) -> list[bytes]:
    """Return the fingerprints of the authorities that clients trust."""
    path = folder / "ca.pem"
    return [c.fingerprint(SHA256()) for c in parse_certificates(path, path.read_bytes())]


def test_a_new_authority_has_four_files_and_closed_keys(folder: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "server.pem": 0o644, "server.key": 0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    server = read_pair(folder / "server.pem", folder / "server.key")
    authority, _ = read_authority(folder / "ca.pem", folder / "ca.key", SystemClock().wall_s())
    server.certificate.verify_directly_issued_by(authority.certificate)
    assert list_hosts(server.certificate) == ["localhost", "127.0.0.1"]


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    result = run_command("init", folder, "--host", "other")
    assert result.exit_code == 1
    assert "already holds ca.pem, ca.key, server.pem, server.key" in result.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_new_certificate_of_the_server_keeps_its_names_unless_others_are_given(
    folder: Path,
) -> None:
    before = (folder / "server.pem").read_bytes()
    assert run_command("server", folder).exit_code == 0
    server = read_pair(folder / "server.pem", folder / "server.key")
    assert server.certificate_pem() != before
    assert list_hosts(server.certificate) == ["localhost", "127.0.0.1"]
    assert run_command("server", folder, "--host", "a.example", "--days", "1").exit_code == 0
    server = read_pair(folder / "server.pem", folder / "server.key")
    assert list_hosts(server.certificate) == ["a.example"]


def test_an_authority_is_replaced_in_an_order_that_keeps_trust(folder: Path) -> None:
    (old,) = authorities(folder)
    assert "no old one" in run_command("retire", folder).stderr
    assert run_command("rotate", folder).exit_code == 0
    new, second = authorities(folder)
    assert second == old
    assert "already holds 2 authorities" in run_command("rotate", folder).stderr
    assert "tessera ca server" in run_command("retire", folder).stderr
    assert run_command("server", folder).exit_code == 0
    assert run_command("retire", folder).exit_code == 0
    assert authorities(folder) == [new]
    server = read_pair(folder / "server.pem", folder / "server.key")
    authority, _ = read_authority(folder / "ca.pem", folder / "ca.key", SystemClock().wall_s())
    server.certificate.verify_directly_issued_by(authority.certificate)


def test_a_rotation_that_was_interrupted_is_begun_again(folder: Path) -> None:
    (old,) = authorities(folder)
    lost = create_authority(SystemClock().wall_s()).certificate_pem()
    write_public(folder / "ca.pem", lost + (folder / "ca.pem").read_bytes())
    assert run_command("server", folder).exit_code == 0  # signed by the one whose key is there
    assert run_command("rotate", folder).exit_code == 0
    assert authorities(folder)[1:] == [old]
    assert run_command("server", folder).exit_code == 0


def test_the_table_shows_all_certificates(folder: Path) -> None:
    run_command("rotate", folder)
    result = run_command("show", folder)
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["WHAT", "NAMES", "VALID", "UNTIL", "SHA-256"]
    assert [row.split("  ")[0] for row in rows] == ["authority", "old authority", "server"]
    assert "localhost, 127.0.0.1" in rows[2]


def test_a_directory_without_an_authority_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    result = run_command("server", tmp_path)
    assert result.exit_code == 2
    assert "tessera ca init DIR --host NAME" in result.stderr
    result = run_command("init", tmp_path / "x", "--host", "a:7070")
    assert result.exit_code == 2
    assert "without a port" in result.stderr
    assert not (tmp_path / "x").exists()
