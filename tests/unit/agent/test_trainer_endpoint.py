"""The endpoint for the reports of Hugging Face's Trainer, and its certificate."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import pytest

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import Unavailable
from tessera.service.agent import trainer_certificate
from tessera.service.agent.keeper import trainer_endpoint
from tessera.service.agent.keeper.trainer import (
    HOST,
    PORT_WORD,
    endpoint_path,
    trainer_variables,
)
from tessera.service.agent.keeper.trainer_endpoint import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    BadRequest,
    TrainerEndpoint,
    read_report,
)
from tessera.service.agent.trainer_certificate import (
    CertificateSource,
    TrainerCertificate,
    make_by_openssl,
    make_certificate,
)
from tests.support.patience import PATIENCE_S
from tests.support.waiting import until

NOW_S = SystemClock().wall_s()


TOKEN = "trainer" + 8 * "-x"


JOB = "lab/bert 1"


def a_status(**changes: Any) -> dict[str, Any]:
    """Return what the callback posts in the middle of training."""
    metrics = {"loss": 2.5, "learning_rate": 1e-4, "current_step": 12, "total_steps": 100}
    status = {
        "lastUpdatedTime": "2026-11-24T10:00:00+00:00",
        "progressPercentage": 12,
        "estimatedRemainingSeconds": 88,
        "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()],
    }
    return {"trainerStatus": status | changes}


def metrics_of(**values: object) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


@pytest.fixture(scope="module")
def certificate() -> TrainerCertificate:
    return make_certificate(NOW_S)


class Served:
    """A running endpoint with what it accepted, and clients of all kinds."""

    def __init__(self, folder: Path, certificate: TrainerCertificate) -> None:
        self.accepted: list[tuple[int, float | None, int | None]] = []
        self.fault: Exception | None = None
        self.authorities, key = certificate.write_files(str(folder))
        self.endpoint = TrainerEndpoint(
            certificate=self.authorities,
            key=key,
            token=TOKEN,
            path=endpoint_path(JOB),
            accept=self.accept,
        )
        listener = socket.create_server((HOST, 0), backlog=MAX_CONNECTIONS)
        listener.setblocking(False)
        self.url = f"https://{HOST}:{listener.getsockname()[1]}{endpoint_path(JOB)}"
        self.endpoint.start(listener)

    def accept(self, iterations: int, loss: float | None, total: int | None) -> None:
        if self.fault is not None:
            raise self.fault
        self.accepted.append((iterations, loss, total))

    def context(self) -> ssl.SSLContext:
        """Return a client's context, as strict as that of newer Pythons."""
        context = ssl.create_default_context(cafile=self.authorities)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    def post(self, body: object, url: str = "", **headers: str) -> int:
        """Post as the callback does. Return the status."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            url or self.url, data=data, headers=given | named, method="POST"
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.context())
        )
        try:
            with opener.open(request, timeout=PATIENCE_S) as answer:
                status: int = answer.status
                return status
        except HTTPError as refused:
            with refused:
                return refused.code

    def connect(self) -> socket.socket:
        """Return a connection without TLS."""
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)

    def send(self, request: bytes) -> bytes:
        """Return the answer to the bytes of a request, sent over TLS."""
        with (
            self.connect() as plain,
            self.context().wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            secured.sendall(request)
            answer = b""
            while part := secured.recv(4096):
                answer += part
            return answer


@pytest.fixture
def served(tmp_path: Path, certificate: TrainerCertificate) -> Iterator[Served]:
    running = Served(tmp_path, certificate)
    yield running
    running.endpoint.close()
    assert running.fault is not None or running.endpoint.remark == ""


def test_a_report_is_handed_on_with_its_iterations_loss_and_total(served: Served) -> None:
    assert served.post(a_status()) == 200
    assert served.accepted == [(12, 2.5, 100)]


def test_the_reports_of_the_beginning_and_the_end_say_nothing_about_iterations(
    served: Served,
) -> None:
    begin = a_status(progressPercentage=0, metrics=metrics_of(total_steps=100))
    end = a_status(progressPercentage=100, metrics=metrics_of(train_loss=1.5, epoch=1.0))
    assert [served.post(begin), served.post(end)] == [200, 200]
    assert served.accepted == []  # a Trainer that is stopped early also ends with 100 %


def test_numbers_that_mean_nothing_are_left_out() -> None:
    metrics = metrics_of(current_step=7, total_steps=-1, loss="nan", grad_norm="1e999", note="x")
    report = read_report(json.dumps(a_status(metrics=metrics)).encode())
    assert (report.iterations, report.total, report.loss) == (7, None, None)
    assert (report.percent, report.remaining_s) == (12, 88)
    assert set(report.metrics) == {"current_step", "total_steps", "loss", "grad_norm"}
    huge = read_report(json.dumps(a_status(metrics=metrics_of(current_step="1e300"))).encode())
    assert huge.iterations is None
    assert read_report(b'{"trainerStatus": {}}').iterations is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[" * 60_000,
        b'{"trainerStatus": []}',
        b'{"trainerStatus": {"metrics": [1]}}',
        b'{"trainerStatus": {"metrics": [{"name": "loss", "value": 2}]}}',
        b'{"trainerStatus": {"progressPercentage": 101}}',
        b'{"trainerStatus": {"estimatedRemainingSeconds": NaN}}',
        b'{"trainerStatus": {"estimatedRemainingSeconds": 1e99}}',
        json.dumps(a_status(metrics=metrics_of(loss=1) * 600)).encode(),
        json.dumps(a_status(metrics=metrics_of(loss="1" * 300))).encode(),
        "{\x00\xff".encode("latin-1"),
    ],
)
def test_a_body_that_is_no_report_is_refused(body: bytes, served: Served) -> None:
    with pytest.raises(BadRequest):
        read_report(body)
    assert served.post(body) == 400
    assert served.post(a_status()) == 200
    assert len(served.accepted) == 1


def test_only_the_jobs_own_token_and_path_are_accepted(served: Served) -> None:
    assert served.post(a_status(), Authorization="Bearer other") == 401
    assert served.post(a_status(), Authorization="") == 401
    assert served.post(a_status(), Authorization=f"Bearer {TOKEN}\xe9") == 401
    assert served.post(a_status(), Authorization=f"Basic {TOKEN}") == 401
    assert served.post(a_status(), url=f"{served.url}?x=1") == 404
    assert served.post(a_status(), url=served.url.replace("bert", "other")) == 404
    assert served.post(a_status(), Content_Type="text/plain") == 415
    assert served.accepted == []
    assert endpoint_path(JOB).endswith("/trainjobs/lab%2Fbert%201/status")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((), b"411"),
        (("Content-Length: -1",), b"411"),
        (("Content-Length: \xb2",), b"411"),
        (("Content-Length: 2", "Content-Length: 2"), b"400"),
        ((f"Content-Length: {MAX_BODY_BYTES + 1}",), b"413"),
        (("Content-Length: " + "9" * 5000,), b"413"),
        (("Transfer-Encoding: chunked", "Content-Length: 2"), b"411"),
        (("X: " + "x" * 40_000,), b"431"),
    ],
)
def test_a_request_of_another_form_is_refused(
    lines: tuple[str, ...], status: bytes, served: Served
) -> None:
    path = urlsplit(served.url).path
    head = [
        f"POST {path} HTTP/1.1",
        f"Authorization: Bearer {TOKEN}",
        "Content-Type: application/json",
        *lines,
    ]
    request = "\r\n".join((*head, "", "")).encode("latin-1") + b"{}"
    assert served.send(request).startswith(b"HTTP/1.1 " + status)
    wrong = request.replace(b"POST", b"GET", 1) if status == b"411" else b"\0\r\n\r\n"
    assert served.send(wrong).split()[1] in (b"405", b"401")


def test_programs_that_speak_no_tls_or_say_nothing_disturb_nobody(served: Served) -> None:
    silent = [served.connect() for _ in range(2 * MAX_CONNECTIONS)]
    with served.connect() as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert b"200" not in plain.recv(4096)
    assert served.post(a_status()) == 200
    assert silent[0].recv(1) == b""  # the oldest made room
    for connection in silent:
        connection.close()
    assert served.accepted == [(12, 2.5, 100)]


def test_a_slow_program_is_cut_off_while_others_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_endpoint, "REQUEST_S", 1.0)
    with (
        served.connect() as plain,
        served.context().wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(b"POST ")
        assert served.post(a_status()) == 200
        assert secured.recv(1) == b""


def test_a_fault_of_the_receiver_is_remarked_and_the_next_report_is_accepted(
    served: Served,
) -> None:
    served.fault = RuntimeError("full")
    with pytest.raises((URLError, OSError)):
        served.post(a_status())
    until(lambda: served.endpoint.remark, "a remark")
    assert served.endpoint.remark == "a report of Trainer was lost: RuntimeError: full"
    served.fault = None
    assert served.post(a_status()) == 200
    served.fault = RuntimeError("for the fixture")


def test_programs_behind_a_proxy_reach_the_endpoint_without_it() -> None:
    plain = trainer_variables(JOB, "/box", {"PATH": "/bin"})
    assert plain == {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{PORT_WORD}{endpoint_path(JOB)}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/box/trainer-authority.pem",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": "/box/trainer-token",
    }
    proxied = trainer_variables(JOB, "/box", {"https_proxy": "http://p", "NO_PROXY": "lab"})
    assert (proxied["no_proxy"], proxied["NO_PROXY"]) == ("127.0.0.1", "lab,127.0.0.1")


def test_openssl_makes_a_certificate_where_the_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    monkeypatch.setattr(trainer_certificate, "find_spec", lambda _name: None)
    running = Served(tmp_path, make_certificate(NOW_S))
    assert running.post(a_status()) == 200
    running.endpoint.close()


def test_without_both_there_is_no_endpoint_and_a_remark_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_certificate, "find_spec", lambda _name: None)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    source = CertificateSource(NOW_S)
    assert source.find() is None
    assert source.remark.endswith("install the package cryptography or the program openssl")


@pytest.mark.parametrize("script", ["exit 3", "echo nothing", "exec sleep"])
def test_an_openssl_that_fails_is_reported(tmp_path: Path, script: str) -> None:
    program = tmp_path / "openssl"
    program.write_text(f"#!/bin/sh\necho 'bad option' >&2\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(Unavailable, match=r"progress of Trainer is not received: .*openssl failed"):
        make_by_openssl(str(program))
    with pytest.raises(Unavailable, match="No such file"):
        make_by_openssl(str(tmp_path / "missing"))


def test_an_agent_makes_one_certificate_whose_files_are_private(tmp_path: Path) -> None:
    source = CertificateSource(NOW_S)
    certificate = source.find()
    assert certificate is not None
    assert source.find() is certificate
    assert "PRIVATE" not in repr(certificate)
    for path in certificate.write_files(str(tmp_path)):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
