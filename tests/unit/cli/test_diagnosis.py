"""``tessera doctor`` and ``tessera config print``: what each check finds, and where settings come from."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera.client import ChannelSettings, Login, save_login
from tessera.service.cli.clusters.nodes import NODE_COLUMNS
from tessera.service.cli.main import app
from tessera.service.cli.render import GIB
from tessera.service.cli.servers.doctoring import machine, reach
from tessera.service.cli.servers.doctoring.checks import CheckResult
from tessera.service.server.settings.config import Config
from tessera.v1 import clusters_pb2, launch_pb2
from tests.support.certificates import make_site
from tests.support.shown import a_shown_node

DAY_S = 86_400.0
PASSWORD = "hunter" + 8 * "2"
TOKEN = "tessera_token_" + 12 * "a"
OK, WARN, FAIL = CheckResult.OK, CheckResult.WARN, CheckResult.FAIL


def a_silent_node(name: str, silent_s: float, **fields: Any) -> clusters_pb2.Node:
    state = clusters_pb2.Node.READY if 0 <= silent_s < 30 else clusters_pb2.Node.UNREACHABLE
    return a_shown_node(name, silent_s=silent_s, state=state, **fields)


@pytest.mark.parametrize(
    ("server_s", "result"),
    [
        (100.5, OK),  # between the two readings of our clock
        (101.9, OK),
        (97.0, WARN),
        (110.0, WARN),
        (161.0, FAIL),
        (39.0, FAIL),
    ],
)
def test_clocks_are_compared_by_more_than_the_time_of_the_call(
    server_s: float, result: CheckResult
) -> None:
    check = reach._check_clock(server_s, before_s=100.0, after_s=101.0)
    assert check.result is result
    assert bool(check.advice) is (result is not OK)


def test_silent_agents_and_faults_are_named() -> None:
    heard, never = a_silent_node("n0", 3.0), a_silent_node("n1", -1.0)
    lost = [a_silent_node(f"m{k}", 90.0) for k in range(9)]
    assert reach._check_agents([heard]).result is OK
    some = reach._check_agents([heard, never, *lost])
    assert some.result is WARN
    assert "10 nodes of 11" in some.found
    assert "1 never had one" in some.found
    assert some.found.endswith("n1, m0, m1, m2, m3, ...")
    assert reach._check_agents([never]).result is FAIL
    assert reach._check_faults([heard]).result is OK
    faulty = reach._check_faults([a_silent_node("n2", 1.0, faults=["XID 79"])])
    assert (faulty.result, "n2" in faulty.found) == (WARN, True)


def test_drains_and_the_runtimes_of_nodes_are_shown() -> None:
    def offer(runtime: str, version: str = "", problem: str = "") -> launch_pb2.RuntimeOffer:
        return launch_pb2.RuntimeOffer(runtime=runtime, version=version, problem=problem)

    plain = a_silent_node("n0", 1.0)
    assert reach._check_drains([plain]).result is OK
    assert reach._check_runtimes([plain]).result is CheckResult.SKIPPED
    unfit_node = a_shown_node(
        "n1",
        state=clusters_pb2.Node.DRAINING,
        drained_by="failed starts",
        drain_reason="3 starts in a row failed",
        runtimes=[
            *(offer("replay"), offer("command"), offer("jax", "jax 0.10.2")),
            offer("alpa", problem="no module alpa in /usr/bin/python3"),
        ],
    )
    check = reach._check_drains([plain, unfit_node])
    assert (check.result, check.found) == (
        WARN,
        "1 node drained: n1; n1 by failed starts: 3 starts in a row failed",
    )
    assert reach._check_runtimes([plain, unfit_node]).found == (
        "alpa on no node (no module alpa in /usr/bin/python3); command on 1 node; jax on 1 node (jax"
        " 0.10.2)"
    )
    cells = {column.title: column.value(unfit_node) for column in NODE_COLUMNS}
    assert cells["RUNTIMES"] == "command; jax (jax 0.10.2)"
    assert cells["MISSING RUNTIMES"] == "alpa (no module alpa in /usr/bin/python3)"


@pytest.mark.parametrize(("left_s", "result"), [(-1.0, FAIL), (3 * DAY_S, WARN), (90 * DAY_S, OK)])
def test_the_end_of_a_certificate_is_reported_in_time(left_s: float, result: CheckResult) -> None:
    now_s = reach.CLOCK.wall_s()
    assert reach._check_end("tls", "it", now_s + left_s, "renew it").result is result


@pytest.mark.parametrize(("gib", "result"), [(0.5, FAIL), (3.0, WARN), (50.0, OK)])
def test_a_full_disk_is_reported(
    gib: float, result: CheckResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=int(gib * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    check = machine._check_disk(tmp_path / "not" / "made" / "yet")
    assert check.result is result
    assert str(tmp_path) in check.found


def test_a_port_that_another_program_has_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert machine._check_port(address, "127.0.0.1:1").result is WARN
        assert machine._check_port(address, address).result is OK
    assert machine._check_port(address, "127.0.0.1:1").result is OK
    assert machine._check_port("unix:/x", "127.0.0.1:1").result is CheckResult.SKIPPED


def test_a_database_that_does_not_answer_fails_and_its_password_is_hidden() -> None:
    url = f"postgresql://u:{PASSWORD}@127.0.0.1:1/x"
    check = machine._check_database(Config(database_url=url))
    assert check.result is FAIL
    assert PASSWORD not in check.found + check.advice
    assert machine._check_database(Config()).result is CheckResult.SKIPPED


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[int]:
    """Run a TLS server with a certificate of an authority in ``tmp_path / "site"``."""
    files = make_site(tmp_path / "site").files()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    with context.wrap_socket(connection, server_side=True):
                        pass
                except ssl.SSLError:
                    continue
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_handshake_is_made_as_the_command_line_makes_it(tmp_path: Path, tls_port: int) -> None:
    address, authorities = f"127.0.0.1:{tls_port}", str(tmp_path / "site" / "ca.pem")
    good = reach._check_tls(address, ChannelSettings(authorities=authorities))
    assert good.result in (OK, WARN), good
    assert "valid until" in good.found
    other = ChannelSettings(authorities=authorities, server_name="elsewhere")
    assert reach._check_tls(address, other).result is FAIL
    unknown = reach._check_tls(address, ChannelSettings(authorities="system"))
    assert unknown.result is FAIL
    assert "TESSERA_CA" in unknown.advice
    assert reach._check_tls("127.0.0.1:1", ChannelSettings()).result is OK  # in plain text
    assert reach._check_tls("db.example:1", ChannelSettings()).result is WARN


def run_doctor() -> dict[str, dict[str, str]]:
    """Return the checks of ``tessera doctor`` without a server, by name."""
    arguments = ["doctor", "--json", "--server", "127.0.0.1:1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "address" in done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)}


def test_without_a_server_the_exit_code_is_1_and_every_check_says_what_to_do() -> None:
    checks = run_doctor()
    assert checks["address"]["result"] == "fail"
    assert "tessera up" in checks["address"]["advice"]
    assert "tls" not in checks  # nothing more can be known of it
    assert {"settings", "database", "disk", "port", "training"} <= set(checks)
    arguments = ["doctor", "--server", "127.0.0.1:1"]
    table = CliRunner().invoke(app, arguments, env={"TESSERA_PERIOD_S": "often"}).stdout
    row = next(line for line in table.splitlines() if line.startswith("settings"))
    assert (row.split()[1], "TESSERA_PERIOD_S" in row) == ("fail", True)
    nowhere = reach._check_address("nowhere")
    assert (nowhere.result, "HOST:PORT" in nowhere.found) == (FAIL, True)


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
        *("--config", str(file), "--listen", "127.0.0.1:3"),
        TESSERA_LISTEN="127.0.0.1:2",
        TESSERA_PERIOD_S="7",
        TESSERA_POLICY="{objective: jct}",
        TESSERA_SERVER="127.0.0.1:9",
    )
    expected = {
        "listen": ("127.0.0.1:3", "flag"),
        "period_s": ("7.0", "environment"),
        "grace_s": ("3.0", "file"),
        "policy": ("{objective: jct}", "environment"),
        "TESSERA_SERVER": ("127.0.0.1:9", "environment"),
        "TESSERA_CLUSTER": ("default", "default"),
    }
    entries = {name: settings[name] for name in expected}
    assert {name: (e["value"], e["origin"]) for name, e in entries.items()} == expected
    assert set(printed("--changed", TESSERA_PERIOD_S="7")) == {"period_s"}
    done = CliRunner().invoke(app, ["config", "print"], env={"TESSERA_PEROID_S": "7"})
    assert done.exit_code == 2
    assert "TESSERA_PEROID_S" in done.stderr


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


def test_without_the_servers_libraries_the_settings_of_the_client_are_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tessera.service.cli.servers.configprint.find_spec", lambda name: None)
    assert {entry["part"] for entry in printed().values()} == {"client"}
