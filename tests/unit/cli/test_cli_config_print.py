"""``tessera config print``: values, origins and secrets."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera.client import Login, save_login
from tessera.service.cli.main import app
from tessera.service.config import Config

PASSWORD = "hunter" + 8 * "2"
TOKEN = "tessera_token_" + 12 * "a"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def printed(*arguments: str, **variables: str) -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(app, ["config", "print", "--json", *arguments], env=variables)
    assert done.exit_code == 0, done.output
    assert PASSWORD not in done.output
    assert TOKEN not in done.output
    return {entry["setting"]: entry for entry in json.loads(done.stdout)}


def test_every_setting_of_the_server_is_printed_with_its_default() -> None:
    settings = printed()
    server = {name for name, entry in settings.items() if entry["part"] == "server"}
    assert server == {field.name for field in fields(Config)}
    assert {entry["origin"] for entry in settings.values()} == {"default"}
    assert settings["period_s"]["value"] == "300.0"


def test_a_flag_goes_before_the_environment_and_the_environment_before_the_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tessera.toml"
    file.write_text('listen = "127.0.0.1:1"\nperiod_s = 5.0\ngrace_s = 3.0\n')
    settings = printed(
        "--config",
        str(file),
        "--listen",
        "127.0.0.1:3",
        TESSERA_LISTEN="127.0.0.1:2",
        TESSERA_PERIOD_S="7",
        TESSERA_POLICY="{objective: jct}",
        TESSERA_SERVER="127.0.0.1:9",
    )
    found = {
        name: (settings[name]["value"], settings[name]["origin"])
        for name in ("listen", "period_s", "grace_s", "policy", "TESSERA_SERVER", "TESSERA_CLUSTER")
    }
    assert found == {
        "listen": ("127.0.0.1:3", "flag"),
        "period_s": ("7.0", "environment"),
        "grace_s": ("3.0", "file"),
        "policy": ("{objective: jct}", "environment"),
        "TESSERA_SERVER": ("127.0.0.1:9", "environment"),
        "TESSERA_CLUSTER": ("default", "default"),
    }


def test_secrets_are_hidden_and_their_origins_shown() -> None:
    url = f"postgresql://u:{PASSWORD}@db/x"
    settings = printed(TESSERA_DATABASE_URL=url, TESSERA_TOKEN=TOKEN)
    assert settings["database_url"]["value"] == "postgresql://u:***@db/x"
    assert settings["TESSERA_TOKEN"] == {
        "part": "client",
        "setting": "TESSERA_TOKEN",
        "value": "***",
        "origin": "environment",
    }


def test_what_a_login_gives_is_named() -> None:
    save_login("127.0.0.1:7070", Login(authorities="system", token=TOKEN))
    settings = printed()
    assert settings["TESSERA_TOKEN"]["origin"] == settings["TESSERA_CA"]["origin"] == "login"
    assert settings["TESSERA_CA"]["value"] == "system"


def test_only_what_was_changed_is_printed_on_request() -> None:
    assert set(printed("--changed", TESSERA_PERIOD_S="7")) == {"period_s"}


def test_a_setting_that_nobody_knows_is_an_error() -> None:
    done = CliRunner().invoke(app, ["config", "print"], env={"TESSERA_PEROID_S": "7"})
    assert done.exit_code == 2
    assert "TESSERA_PEROID_S" in done.stderr


def test_without_the_servers_libraries_the_settings_of_the_client_are_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tessera.service.cli.configprint.find_spec", lambda name: None)
    assert {entry["part"] for entry in printed().values()} == {"client"}
