"""Failing commands and wrong usage: one line on stderr, an exit code, and safe retries."""

from __future__ import annotations

import re
import shlex
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
from tessera.formulation.round.grammar import OBJECTIVES
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


HUGE = "9" * 20
NOWHERE = {"TESSERA_SERVER": "127.0.0.1:1"}
JOB = "submit j --model m --batch 1 --iterations 1 --gpus 1"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("frob", "No such command 'frob'"),
        ("jobs --frob", "No such option"),
        ("jobs -o xml", "xml"),
        ("jobs --state sleeping", "--state: unknown state 'sleeping'; the states are queued, held"),
        ("job clusters/c/nodes/n", "must be an id or a name of the form clusters/CLUSTER/jobs"),
        (f"nodes delete clusters/c/jobs/{'x' * 10_000}", "must be an id or a name of the form"),
        ("nodes --selector zone", "--selector: cannot be read from 'zone' on"),
        ("cells delete", "give some of these to choose Cells, or --all alone"),
        ("explain weak --round -1", "--round"),
        ("curve j --json --of gpus", "--json prints all curves"),
        ("import trace t.csv --limit " + HUGE, "--limit"),
        ("prune --older-than 9999999999999s", "--older-than"),
        ("serve --listen 0.0.0.0:7070 --print-config", "--insecure"),
        ("serve --policy 'objective: speed'", "policy.objective: 'speed' is not an objective"),
        ("submit -f absent.yaml", "absent.yaml: cannot be read"),
        ("submit j -f absent.yaml", "takes one job from options or the jobs of --file, not both"),
        ("submit --gpus 8", "submit: needs --model, --batch, --iterations, or -f FILE with one or"),
        ("submit j --restart soon", "--restart: 'soon' is not a duration"),
        (f"submit j --restart {HUGE}d", "--restart ... must lie in 0 to 315,576,000,000 seconds"),
        ("submit j --label novalue", "write a label as KEY=VALUE"),
        ('submit j --command "\'"', "--command ... must be quoted as in a shell"),
        ("submit j --gpus 0", "--gpus ... greater than or equal to 1"),
        ("submit j --weight 0", "--weight ... greater than or equal to 0.000001"),
        (
            f"{JOB} --pinned-gpu-type",
            "--pinned-gpu-type: pins the type that --gpu-type names, so give both",
        ),
        ("update j", "needs a change, e.g. --weight"),
        (f"round --set defragment_every_rounds={HUGE}", "must lie in 0 to 1,000,000; it is"),
        ("round --objective 0*throughput", "--objective: '0*throughput': all weights are 0"),
        ("round --objective 'max-min + jct'", "cannot be added to another objective; put them in"),
        ("round --set priority_weights=1", "--set priority_weights: '1' must be PRIORITY:FACTOR"),
        ("round --scheduler arena --scheduler-parameters depth", "--scheduler-parameters: 'depth'"),
        (
            "round --scheduler arena --scheduler-parameters depth=1,depth=2",
            "--scheduler-parameters: sets 'depth' twice",
        ),
        (
            "round --set default_run=3",
            "--set default_run: 3 has no unit; write e.g. 3s, 3m, 3h or 3d",
        ),
        ("round --set round=never", "--set round: must be a number in 1 to 3.2e+09; it is inf"),
        ("round --set max_chnges=1", "not an option of a round; did you mean 'max_changes'?"),
        (
            "round --set xyz=1",
            "--set xyz: is not an option of a round; the options are objective, raw",
        ),
        ("round --set gap=small", "--set gap: must be a number, not 'small'"),
        ("round --set keep_requests=no", "--set keep_requests: must be true or false, not 'no'"),
        ("round --set objective=a\udcff", "not text in UTF-8"),
        (f"{JOB} --label a=b\udcff", "not text in UTF-8"),
        ("round --set seed", "--set: 'seed' must be NAME=VALUE, e.g. max_changes=20"),
        ("round --seed 1 --set seed=2", "--set seed: has a value already; give it once"),
        ("round --deadlines strict", "--deadlines"),
        ("round --set cost_of=euros", "--set cost_of: must be dollars or watts"),
        ("round --max-changes -2", "--max-changes"),
        ("round --set rate_floor=1.5", "--set rate_floor: must lie in [0, 1]"),
        ("models add owl", "--architecture, --hf: give one of them"),
        ("models add owl --architecture a --hf b", "--architecture, --hf: exclude each other"),
        ("models add owl --hf - --dtype f8", "--dtype: must be one of f32, bf16, f16, not 'f8'"),
        ("models add owl --hf -", "-: must be a text of 1 to 65,536 characters, not 0"),
        ("models add /3B --hf -", "/3B: must be NAME or NAME/PARAMS"),
        ("models --cluster d add owl --hf -", "--cluster: must follow `add`, if that accepts it"),
        ("whatif", "needs a change"),
        ("whatif --add-nodes h100", "must be TYPE:COUNT"),
        ("whatif --weight 2", "is needed, since --weight is for a job"),
        ("whatif --job a", "needs what to change"),
        ("whatif --quota any=4", "is needed"),
        ("whatif --tenant t --quota any=4 --quota any=5", "has any twice"),
        ("update j --weight 2 --label a=b --dry-run", "--dry-run"),
    ],
)
def test_wrong_usage_exits_with_code_2_and_says_what_is_wrong(command: str, message: str) -> None:
    result = CliRunner().invoke(main.app, shlex.split(command), env=NOWHERE)
    error = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2, error
    assert result.stdout == ""
    assert all(part in error for part in message.split(" ... ")), error


def test_help_lists_every_command_and_the_exit_codes() -> None:
    result = CliRunner().invoke(main.app, ["--help"])
    for command in ("submit", "jobs", "round", "cluster", "import", "up", "serve", "migrate"):
        assert f" {command} " in result.stdout
    assert "3 no server" in result.stdout
    shown = CliRunner().invoke(main.app, ["round", "--help"], env={"COLUMNS": "120"}).stdout
    assert all(name in shown for name in OBJECTIVES)
