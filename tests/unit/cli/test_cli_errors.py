"""Failing commands: one line on stderr, an exit code for the kind of failure, and safe retries."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from tessera.formulation.errors import (
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
from tessera.service.rpc.errors import status_of
from tessera.v1 import jobs_pb2

Answer = bytes | TesseraError | grpc.StatusCode
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
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "the text of the error")
        return answer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script, pool = ScriptedServer(), ThreadPoolExecutor(2)
    process = grpc.server(pool)
    process.add_generic_rpc_handlers((script,))
    script.address = f"127.0.0.1:{process.add_insecure_port('127.0.0.1:0')}"
    process.start()
    yield script
    process.stop(None).wait()
    pool.shutdown()


def run_command(server: ScriptedServer, arguments: list[str], *answers: Answer) -> Result:
    server.answers = list(answers)
    return CliRunner().invoke(main.app, arguments, env={"TESSERA_SERVER": server.address})


def a_submitted_job() -> bytes:
    return jobs_pb2.Job(name="clusters/default/jobs/j", state=jobs_pb2.QUEUED).SerializeToString()


def test_a_call_without_a_server_is_retried_with_the_same_request_id(
    server: ScriptedServer,
) -> None:
    gone = Unavailable("the database is restarting")
    result = run_command(server, [*SUBMIT, "-o", "name"], gone, gone, a_submitted_job())
    assert (result.exit_code, result.stdout) == (0, "clusters/default/jobs/j\n")
    assert len(server.requests) == 3
    assert len(set(server.requests)) == 1
    assert jobs_pb2.SubmitJobRequest.FromString(server.requests[0]).request_id


def test_after_three_retries_the_command_gives_up_with_code_3(server: ScriptedServer) -> None:
    result = run_command(server, SUBMIT, Unavailable("the database is down"))
    assert result.exit_code == 3
    assert result.stderr == "error: the database is down [UNAVAILABLE]\n"
    assert len(server.requests) == 4


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
        (AlreadyExists("the job"), 1, "the job exists already; choose another id [ALREADY_EXISTS]"),
        (
            InvalidInput("job.weight", "must be above 0"),
            1,
            "job.weight: must be above 0 [INVALID_IN",
        ),
        (grpc.StatusCode.INTERNAL, 1, "the text of the error [INTERNAL]"),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            1,
            "is older than this command; upgrade it to the same release",
        ),
        (
            NotFound("clusters/c"),
            4,
            "clusters/c does not exist; create it with `tessera cluster apply"
            " -f FILE`, or start with `tessera up` [NOT_FOUND]",
        ),
    ],
)
def test_a_server_error_is_printed_on_one_line_with_an_exit_code(
    server: ScriptedServer, answer: Answer, exit_code: int, message: str
) -> None:
    result = run_command(server, ["job", "j"], answer)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob"], "No such command 'frob'"),
        (["jobs", "--frob"], "No such option"),
        (["jobs", "-o", "xml"], "xml"),
        (
            ["jobs", "--state", "sleeping"],
            "--state: unknown state 'sleeping'; the states are queued, held",
        ),
        (
            ["job", "clusters/c/nodes/n"],
            "must be an id or a name of the form clusters/CLUSTER/jobs",
        ),
        (["submit", "-f", "absent.yaml"], "absent.yaml: cannot be read"),
        (["submit", "j", "-f", "absent.yaml"], "not both"),
        (["submit", "j", "--restart", "soon"], "--restart: 'soon' is not a duration"),
        (["submit", "j", "--label", "novalue"], "write a label as KEY=VALUE"),
        (["update", "j"], "needs at least one of --weight"),
        (
            ["nodes", "delete", "clusters/c/jobs/" + "x" * 10_000],
            "must be an id or a name of the form",
        ),
        (["drain", "n", "--wait", "--timeout", "soon"], "--timeout: 'soon' is not a duration"),
        (["cells", "delete"], "give some of these to choose Cells, or --all alone"),
        (["serve", "--listen", "0.0.0.0:7070", "--print-config"], "--insecure"),
        (["up", "--listen", "0.0.0.0:7070"], "--insecure"),
        (["round", "--time-limit", "soon"], "--time-limit: 'soon' is not a duration"),
    ],
)
def test_wrong_usage_exits_with_code_2_and_calls_no_server(
    server: ScriptedServer, arguments: list[str], message: str
) -> None:
    result = run_command(server, arguments, grpc.StatusCode.INTERNAL)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert server.requests == []


def test_each_failed_job_is_named_and_the_others_are_changed(server: ScriptedServer) -> None:
    answers: list[Answer] = [
        NotFound("clusters/default/jobs/a"),
        NotFound("clusters/default/arrays/a"),
        a_submitted_job(),
        AlreadyExists("it"),
    ]
    result = run_command(server, ["cancel", "a", "j", "c", "-o", "name"], *answers)
    assert result.exit_code == 4  # the highest of 4, 0 and 1
    assert result.stdout == "clusters/default/jobs/j\n"
    assert [line.split(":")[1].strip() for line in result.stderr.splitlines()] == ["a", "c"]
    assert len(server.requests) == 4


def test_jobs_not_tried_because_the_server_is_gone_are_named(server: ScriptedServer) -> None:
    result = run_command(
        server, ["hold", "j", "b", "c"], a_submitted_job(), Unavailable("the database is down")
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


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ([], "nothing was committed unless the commit was"),
        (["--dry-run"], "nothing was committed; allow"),
    ],
)
def test_an_exceeded_time_limit_is_reported_as_too_short(
    server: ScriptedServer, more: list[str], known: str
) -> None:
    result = run_command(
        server, ["round", "--deadline", "1ms", *more], grpc.StatusCode.DEADLINE_EXCEEDED
    )
    assert result.exit_code == 1
    assert "time limit too short: the round was not decided within 0.001 s" in result.stderr
    assert known in result.stderr


def test_an_interrupt_exits_with_code_130(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.service.cli.watch.time.sleep", interrupted)
    page = jobs_pb2.ListJobsResponse(jobs=[jobs_pb2.Job(name="clusters/c/jobs/j")])
    result = run_command(server, ["jobs", "--watch", "-o", "name"], page.SerializeToString())
    assert (result.exit_code, result.stdout) == (130, "clusters/c/jobs/j\n")


def test_a_plugin_that_cannot_be_imported_says_so_and_breaks_only_itself(
    monkeypatch: pytest.MonkeyPatch, server: ScriptedServer
) -> None:
    broken = EntryPoint("broken", "tests.unit.no_such_module:add", main.PLUGIN_GROUP)
    monkeypatch.setattr(main, "entry_points", lambda group: [broken])
    helped = CliRunner().invoke(main.app, ["--help"])
    assert helped.exit_code == 0
    assert "no module named tests.unit.no_such_module" in helped.stdout
    result = CliRunner().invoke(main.app, ["broken"])
    assert result.exit_code == 1
    assert "'broken' cannot be loaded from tests.unit.no_such_module:add" in result.stderr
    assert run_command(server, [*SUBMIT, "-o", "name"], a_submitted_job()).exit_code == 0


def test_the_help_shows_the_first_line_of_a_plugins_docstring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plugged.py").write_text(
        '"""``tessera wave``: say hello.\n\nMore."""\nraise OSError\n'
    )
    (tmp_path / "broken_plugin.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint("wave", "plugged:add", ""), EntryPoint("bad", "broken_plugin:add", "")]
    monkeypatch.setattr(main, "entry_points", lambda group: points)
    helped = CliRunner().invoke(main.app, ["--help"]).stdout
    assert "Say hello." in helped
    assert "From broken_plugin." in helped


def test_a_plugin_adds_its_command_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("wave", f"{__name__}:add_wave", main.PLUGIN_GROUP)
    monkeypatch.setattr(main, "entry_points", lambda group: [point])
    assert CliRunner().invoke(main.app, ["wave", "--help"]).exit_code == 0
    assert CliRunner().invoke(main.app, ["wave"]).stdout == "wave\n"


def add_wave(app: Any) -> None:
    command: Callable[[], None] = lambda: print("wave")  # noqa: E731 - a plugin in one line
    app.command("wave")(command)


def test_help_lists_every_command_and_the_exit_codes() -> None:
    result = CliRunner().invoke(main.app, ["--help"])
    for command in (*SUBMIT[:1], "jobs", "round", "cluster", "import", "up", "serve", "migrate"):
        assert f" {command} " in result.stdout
    assert "3 no server" in result.stdout


@pytest.mark.parametrize("words", [[], ["submit"], ["tenants", "apply"]])
def test_help_shows_no_types_of_python_for_flags_and_numbers(words: list[str]) -> None:
    text = CliRunner().invoke(main.app, [*words, "--help"]).stdout
    assert "--help" in text
    assert not re.search(r"<(bool|int|float)\b", text)


def test_help_needs_none_of_the_heavy_libraries() -> None:
    heavy = "{'numpy', 'scipy', 'ortools', 'sqlalchemy', 'psycopg2', 'matplotlib', 'jax'}"
    code = (
        "import sys, tessera.service.cli.main as m; m.deferred_commands();"
        f" print({heavy} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=None
    )
    assert result.stdout == "set()\n"


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
        (grpc.StatusCode.UNAUTHENTICATED, "abc", "log in again with `tessera login`"),
        (grpc.StatusCode.PERMISSION_DENIED, "abc", "ask an administrator"),
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


def test_a_token_in_an_error_of_the_server_is_hidden(server: ScriptedServer) -> None:
    token = f"tessera_token_{'a' * 12}_{'S' * 43}"
    result = run_command(server, SUBMIT, NotAllowed(f"no such token: {token}"))
    assert "no such token: ***" in result.stderr
