"""The checks of ``tessera doctor``, each with what it is to find."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera.client import ChannelSettings
from tessera.service.cli.doctoring import machine, reach
from tessera.service.cli.doctoring.checks import CheckResult
from tessera.service.cli.main import app
from tessera.service.config import Config
from tessera.v1 import clusters_pb2
from tests.support.certificates import make_site

DAY_S = 86_400.0


def a_node(name: str, silent_s: float, **fields: object) -> clusters_pb2.Node:
    state = clusters_pb2.Node.READY if 0 <= silent_s < 30 else clusters_pb2.Node.UNREACHABLE
    return clusters_pb2.Node(
        name=f"clusters/c/nodes/{name}",
        silent_s=silent_s,
        state=state,
        **fields,  # type: ignore[arg-type] # a test may set any field
    )


@pytest.mark.parametrize(
    ("server_s", "result"),
    [
        (100.5, CheckResult.OK),  # between the two readings of our clock
        (101.9, CheckResult.OK),
        (97.0, CheckResult.WARN),
        (110.0, CheckResult.WARN),
        (161.0, CheckResult.FAIL),
        (39.0, CheckResult.FAIL),
    ],
)
def test_clocks_are_compared_by_more_than_the_time_of_the_call(
    server_s: float, result: CheckResult
) -> None:
    check = reach._check_clock(server_s, before_s=100.0, after_s=101.0)
    assert check.result is result
    assert bool(check.advice) is (result is not CheckResult.OK)


def test_silent_agents_and_faults_are_named() -> None:
    heard, never = a_node("n0", 3.0), a_node("n1", -1.0)
    lost = [a_node(f"m{k}", 90.0) for k in range(9)]
    assert reach._check_agents([heard]).result is CheckResult.OK
    some = reach._check_agents([heard, never, *lost])
    assert some.result is CheckResult.WARN
    assert "10 nodes of 11" in some.found
    assert "1 never had one" in some.found
    assert some.found.endswith("n1, m0, m1, m2, m3, ...")
    assert reach._check_agents([never]).result is CheckResult.FAIL
    assert reach._check_faults([heard]).result is CheckResult.OK
    faulty = reach._check_faults([a_node("n2", 1.0, faults=["XID 79"])])
    assert faulty.result is CheckResult.WARN
    assert "n2" in faulty.found


@pytest.mark.parametrize(
    ("left_s", "result"),
    [(-1.0, CheckResult.FAIL), (3 * DAY_S, CheckResult.WARN), (90 * DAY_S, CheckResult.OK)],
)
def test_the_end_of_a_certificate_is_reported_in_time(left_s: float, result: CheckResult) -> None:
    now_s = reach.CLOCK.wall_s()
    assert reach._check_end("tls", "it", now_s + left_s, "renew it").result is result


@pytest.mark.parametrize(
    ("gib", "result"),
    [(0.5, CheckResult.FAIL), (3.0, CheckResult.WARN), (50.0, CheckResult.OK)],
)
def test_a_full_disk_is_reported(
    gib: float, result: CheckResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(int(gib * machine.GIB)))
    check = machine._check_disk(tmp_path / "not" / "made" / "yet")
    assert check.result is result
    assert str(tmp_path) in check.found


def test_a_port_that_another_program_has_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert machine._check_port(address, "127.0.0.1:1").result is CheckResult.WARN
        assert machine._check_port(address, address).result is CheckResult.OK
    assert machine._check_port(address, "127.0.0.1:1").result is CheckResult.OK
    assert machine._check_port("unix:/x", "127.0.0.1:1").result is CheckResult.SKIPPED


def test_a_database_that_does_not_answer_fails_and_its_password_is_hidden() -> None:
    password = "hunter" + 8 * "2"
    check = machine._check_database(Config(database_url=f"postgresql://u:{password}@127.0.0.1:1/x"))
    assert check.result is CheckResult.FAIL
    assert password not in check.found + check.advice
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
    assert good.result in (CheckResult.OK, CheckResult.WARN), good
    assert "valid until" in good.found
    other = ChannelSettings(authorities=authorities, server_name="elsewhere")
    assert reach._check_tls(address, other).result is CheckResult.FAIL
    unknown = reach._check_tls(address, ChannelSettings(authorities="system"))
    assert unknown.result is CheckResult.FAIL
    assert "TESSERA_CA" in unknown.advice


def test_plain_text_is_fine_on_this_machine_only() -> None:
    assert reach._check_tls("127.0.0.1:1", ChannelSettings()).result is CheckResult.OK
    assert reach._check_tls("db.example:1", ChannelSettings()).result is CheckResult.WARN


def test_without_a_server_the_exit_code_is_1_and_every_check_says_what_to_do() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--server", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "address" in done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["address"]["result"] == "fail"
    assert "tessera up" in checks["address"]["advice"]
    assert "tls" not in checks  # nothing more can be known of it
    assert {"settings", "database", "disk", "port", "training"} <= set(checks)


def test_wrong_settings_are_a_failed_check() -> None:
    arguments = ["doctor", "--server", "127.0.0.1:1"]
    done = CliRunner().invoke(app, arguments, env={"TESSERA_PERIOD_S": "often"})
    row = next(line for line in done.stdout.splitlines() if line.startswith("settings"))
    assert row.split()[1] == "fail"
    assert "TESSERA_PERIOD_S" in row


def test_an_address_that_is_none_is_refused_in_words() -> None:
    check = reach._check_address("nowhere")
    assert check.result is CheckResult.FAIL
    assert "HOST:PORT" in check.found
