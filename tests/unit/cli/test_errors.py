"""Failing commands: one line on stderr, an exit code for the kind of failure, and safe retries."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from tessera.formulation.base.errors import (
    AlreadyExists,
    InvalidInput,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    PermissionDenied,
    TesseraError,
    Unavailable,
)
from tessera.service.cli import main
from tessera.service.server.rpc.serving.errors import status_of
from tessera.v1 import jobs_pb2
from tests.support.local_server import serve_grpc

Code = grpc.StatusCode
Answer = bytes | TesseraError | Code


SUBMITTED = jobs_pb2.Job(name="clusters/default/jobs/j", state=jobs_pb2.QUEUED).SerializeToString()
SUBMIT = ["submit", "j", "--model", "m", "--batch", "8", "--iterations", "1", "--gpus", "1"]


class ScriptedServer(grpc.GenericRpcHandler):
    """Gives its answers in turn, repeats the last one, and records the requests."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[bytes] = []
        self.address = ""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, TesseraError):
            context.abort_with_status(rpc_status.to_status(status_of(answer)))
        if isinstance(answer, Code):
            context.abort(answer, "the text of the error")
        return answer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()
    with serve_grpc(lambda server: server.add_generic_rpc_handlers((script,))) as address:
        script.address = address
        yield script


def run_command(server: ScriptedServer, arguments: list[str], *answers: Answer) -> Result:
    server.answers = list(answers)
    return CliRunner().invoke(main.app, arguments, env={"TESSERA_SERVER": server.address})


def test_a_call_without_a_server_is_retried_three_times_with_the_same_request_id(
    server: ScriptedServer,
) -> None:
    gone = Unavailable("the database is restarting")
    result = run_command(server, [*SUBMIT, "-o", "name"], gone, gone, SUBMITTED)
    assert (result.exit_code, result.stdout) == (0, "clusters/default/jobs/j\n")
    assert len(server.requests) == 3
    assert len(set(server.requests)) == 1
    assert jobs_pb2.SubmitJobRequest.FromString(server.requests[0]).request_id
    server.requests.clear()
    result = run_command(server, SUBMIT, Unavailable("the database is down"))
    assert result.exit_code == 3
    assert result.stderr == "error: the database is down [UNAVAILABLE]\n"
    assert len(server.requests) == 4


def test_a_list_has_the_items_of_every_page(server: ScriptedServer) -> None:
    responses = (
        jobs_pb2.ListJobsResponse(jobs=[jobs_pb2.Job(name=name)], next_page_token=token)
        for name, token in (("a", "1"), ("b", ""))
    )
    pages = [response.SerializeToString() for response in responses]
    assert run_command(server, ["jobs", "-o", "name"], *pages).stdout.split() == ["a", "b"]
    assert jobs_pb2.ListJobsRequest.FromString(server.requests[1]).page_token == "1"


def test_without_a_server_the_error_says_what_to_do() -> None:
    result = CliRunner().invoke(main.app, ["jobs", "--server", "127.0.0.1:1"])
    assert result.exit_code == 3
    assert "no server answers at 127.0.0.1:1 (Connection refused)" in result.stderr
    assert "tessera up" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("answer", "exit_code", "message"),
    [
        (NotFound("clusters/c/jobs/j"), 4, "clusters/c/jobs/j does not exist [NOT_FOUND]"),
        (
            NotFound("clusters/c"),
            4,
            "clusters/c does not exist; create it with `tessera cluster apply"
            " -f FILE`, or start with `tessera up` [NOT_FOUND]",
        ),
        (AlreadyExists("the job"), 1, "the job exists already; choose another id [ALREADY_EXISTS]"),
        (InvalidInput("job.weight", "must be above 0"), 1, "job.weight: must be above 0 [INVALID"),
        (Code.INTERNAL, 1, "the text of the error [INTERNAL]"),
        (Code.UNIMPLEMENTED, 1, "is older than this client; upgrade it to the same release"),
    ],
)
def test_a_server_error_is_printed_on_one_line_with_an_exit_code(
    server: ScriptedServer, answer: Answer, exit_code: int, message: str
) -> None:
    result = run_command(server, ["job", "j"], answer)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(server.requests) == 1


def test_each_failed_job_is_named_and_the_others_are_changed(server: ScriptedServer) -> None:
    answers: list[Answer] = [
        NotFound("clusters/default/jobs/a"),
        NotFound("clusters/default/arrays/a"),
        SUBMITTED,
        AlreadyExists("it"),
    ]
    result = run_command(server, ["cancel", "a", "j", "c", "-o", "name"], *answers)
    assert result.exit_code == 4  # the highest of 4, 0 and 1
    assert result.stdout == "clusters/default/jobs/j\n"
    assert [line.split(":")[1].strip() for line in result.stderr.splitlines()] == ["a", "c"]
    assert len(server.requests) == 4


def test_jobs_not_tried_because_the_server_is_gone_are_named(server: ScriptedServer) -> None:
    result = run_command(
        server, ["hold", "j", "b", "c"], SUBMITTED, Unavailable("the database is down")
    )
    assert result.exit_code == 3
    assert result.stderr.splitlines() == [
        "error: b: the database is down [UNAVAILABLE]",
        "error: not tried: c",
    ]
    assert "QUEUED" in result.stdout


def test_cancelling_a_cancelled_job_is_not_a_failure(server: ScriptedServer) -> None:
    cancelled = jobs_pb2.Job(name="clusters/default/jobs/j", state=jobs_pb2.CANCELLED)
    refused = NotAllowed("job j was cancelled, so it cannot be cancelled")
    result = run_command(
        server, ["cancel", "j", "-o", "name"], refused, cancelled.SerializeToString()
    )
    assert (result.exit_code, result.stderr) == (0, "j is already cancelled\n")
    assert result.stdout == "clusters/default/jobs/j\n"
    result = run_command(server, ["hold", "j"], refused, cancelled.SerializeToString())
    assert result.exit_code == 1
    assert "error: j: job j was cancelled" in result.stderr


def test_an_exceeded_time_limit_is_reported_as_too_short(server: ScriptedServer) -> None:
    for more, known in (("", "nothing was committed unless"), (" --dry-run", "committed; allow")):
        command = f"round --deadline 1ms{more}".split()
        result = run_command(server, command, Code.DEADLINE_EXCEEDED)
        assert result.exit_code == 1
        assert "time limit too short: the round was not decided within 0.001 s" in result.stderr
        assert known in result.stderr


def test_an_interrupt_exits_with_code_130(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.service.cli.jobs.watch.time.sleep", interrupted)
    page = jobs_pb2.ListJobsResponse(jobs=[jobs_pb2.Job(name="clusters/c/jobs/j")])
    result = run_command(server, ["jobs", "--watch", "-o", "name"], page.SerializeToString())
    assert (result.exit_code, result.stdout) == (130, "clusters/c/jobs/j\n")


def test_a_plugin_that_cannot_be_imported_says_so_and_breaks_only_itself(
    monkeypatch: pytest.MonkeyPatch, server: ScriptedServer
) -> None:
    broken = EntryPoint("broken", "tests.unit.no_such_module:add", main.PLUGIN_GROUP)
    monkeypatch.setattr(main, "entry_points", lambda group: [broken])
    assert "no module named tests.unit.no_such_module" in help_text()
    result = CliRunner().invoke(main.app, ["broken"])
    assert result.exit_code == 1
    assert "'broken' cannot be loaded from tests.unit.no_such_module:add" in result.stderr
    assert run_command(server, [*SUBMIT, "-o", "name"], SUBMITTED).exit_code == 0


def help_text(*words: str) -> str:
    result = CliRunner().invoke(main.app, [*words, "--help"])
    assert result.exit_code == 0
    return result.stdout


def test_the_help_shows_the_first_line_of_a_plugin_that_adds_its_command_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plugged.py").write_text(
        '"""``tessera wave``: say hello.\n\nMore."""\ndef add(app):\n'
        "    app.command('wave')(lambda: print('wave'))\n"
    )
    (tmp_path / "broken_plugin.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint("wave", "plugged:add", ""), EntryPoint("bad", "broken_plugin:add", "")]
    monkeypatch.setattr(main, "entry_points", lambda group: points)
    assert "Say hello." in help_text()
    assert "From broken_plugin." in help_text()
    assert "plugged" not in sys.modules
    assert help_text("wave")
    assert CliRunner().invoke(main.app, ["wave"]).stdout == "wave\n"


@pytest.mark.parametrize("words", [[], ["submit"], ["tenants", "apply"]])
def test_help_shows_no_types_of_python_for_flags_and_numbers(words: list[str]) -> None:
    text = help_text(*words)
    assert "--help" in text
    assert not re.search(r"<(bool|int|float)\b", text)


def test_a_flag_allows_connections_from_other_machines() -> None:
    listen = ["--listen", "0.0.0.0:7070", "--insecure-any-interface"]
    result = CliRunner().invoke(main.app, ["serve", *listen, "--print-config"])
    assert result.exit_code == 0, result.stderr
    assert "insecure = true" in result.stdout


@pytest.mark.parametrize(
    ("error", "token", "advice"),
    [
        (NotAuthenticated("no token"), "", "log in with `tessera login`, or set TESSERA_TOKEN"),
        (NotAuthenticated("it is revoked"), "abc", "log in again with `tessera login`"),
        (PermissionDenied("a viewer"), "abc", "ask an administrator of the server for a token"),
        (Code.UNAUTHENTICATED, "abc", "log in again with `tessera login`"),
        (Code.PERMISSION_DENIED, "abc", "ask an administrator"),
    ],
)
def test_callers_who_are_not_known_or_allowed_learn_what_to_do(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    error: Answer,
    token: str,
    advice: str,
) -> None:
    monkeypatch.setenv("TESSERA_TOKEN", token)
    result = run_command(server, SUBMIT, error)
    assert result.exit_code == 1
    assert advice in result.stderr
    secret = f"tessera_token_{'a' * 12}_{'S' * 43}"
    result = run_command(server, SUBMIT, NotAllowed(f"no such token: {secret}"))
    assert "no such token: ***" in result.stderr
