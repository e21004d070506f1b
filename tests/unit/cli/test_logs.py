"""``tessera logs``: raw bytes, harmless bytes on a terminal, last lines, and a server that restarts."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from tessera.client import CallError, Client
from tessera.formulation.base.errors import (
    NodeSilent,
    NotAllowed,
    NotFound,
    TesseraError,
    Unavailable,
)
from tessera.service.cli import main
from tessera.service.cli.client import Exit, connect
from tessera.service.cli.jobs import logs
from tessera.service.cli.jobs.logs import OutputPrinter, last_lines, read_parts
from tessera.service.server.rpc.serving.errors import status_of
from tessera.v1 import jobs_pb2
from tests.support.local_server import serve_grpc
from tests.support.patience import PATIENCE_S

Step = jobs_pb2.ReadLogsResponse | TesseraError
JOB = "clusters/default/jobs/j"


def a_part(
    data: bytes, offset: int = 0, generation: int = 1, node: str = "n0"
) -> jobs_pb2.ReadLogsResponse:
    return jobs_pb2.ReadLogsResponse(
        data=data, offset=offset, generation=generation, node=f"clusters/default/nodes/{node}"
    )


class ScriptedJobs(grpc.GenericRpcHandler):
    """A server whose streams of output are scripted, one list of steps for each call."""

    def __init__(self, *calls: Sequence[Step]) -> None:
        self.calls = list(calls)
        self.requests: list[jobs_pb2.ReadLogsRequest] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(
            self.answer,
            request_deserializer=jobs_pb2.ReadLogsRequest.FromString,
            response_serializer=jobs_pb2.ReadLogsResponse.SerializeToString,
        )

    def answer(
        self, request: jobs_pb2.ReadLogsRequest, context: grpc.ServicerContext
    ) -> Iterator[jobs_pb2.ReadLogsResponse]:
        self.requests.append(request)
        for step in self.calls.pop(0):
            if isinstance(step, TesseraError):
                context.abort_with_status(rpc_status.to_status(status_of(step)))
            else:
                yield step


class StoredOutput(ScriptedJobs):
    """A server that has the output of one rank."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def answer(
        self, request: jobs_pb2.ReadLogsRequest, context: grpc.ServicerContext
    ) -> Iterator[jobs_pb2.ReadLogsResponse]:
        self.requests.append(request)
        begin = request.offset
        if begin < 0:
            begin = max(0, len(self._data) + begin)
        for at in range(begin, max(begin + 1, len(self._data)), 50_000):
            yield a_part(self._data[at : at + 50_000], at)


class EndlessOutput(ScriptedJobs):
    """A server whose output never ends, and an event for the end of its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.left = threading.Event()

    def answer(
        self, request: jobs_pb2.ReadLogsRequest, context: grpc.ServicerContext
    ) -> Iterator[jobs_pb2.ReadLogsResponse]:
        context.add_callback(self.left.set)
        while True:
            yield jobs_pb2.ReadLogsResponse(data=b"x", generation=1)


@contextmanager
def connect_to(jobs: ScriptedJobs) -> Iterator[Client]:
    """Yield a client of a server with these streams."""
    with (
        serve_grpc(lambda server: server.add_generic_rpc_handlers((jobs,))) as address,
        connect(address) as client,
    ):
        yield client


def run_logs(jobs: ScriptedJobs, *arguments: str) -> Result:
    with serve_grpc(lambda server: server.add_generic_rpc_handlers((jobs,))) as address:
        env = {"TESSERA_SERVER": address}
        return CliRunner().invoke(main.app, ["logs", "j", *arguments], env=env)


def test_the_output_is_printed_byte_for_byte() -> None:
    raw = bytes(range(256)) + "\N{SNOWMAN}".encode()
    jobs = ScriptedJobs([a_part(raw[:100]), a_part(raw[100:], 100)])
    done = run_logs(jobs)
    assert (done.exit_code, done.stdout_bytes, done.stderr) == (0, raw, "")
    assert jobs.requests == [jobs_pb2.ReadLogsRequest(name=JOB)]


def test_options_say_whose_output_is_read() -> None:
    jobs = ScriptedJobs([a_part(b"")], [a_part(b"")])
    run_logs(jobs, "--rank", "3", "--generation", "2", "-f")
    run_logs(jobs, "--launcher", "-c", "lab")
    assert jobs.requests == [
        jobs_pb2.ReadLogsRequest(name=JOB, rank=3, generation=2, follow=True),
        jobs_pb2.ReadLogsRequest(name="clusters/lab/jobs/j", rank=-1),
    ]
    refused = run_logs(jobs, "--launcher", "--rank", "0")
    assert refused.exit_code == Exit.USAGE
    assert "leave --rank out" in refused.stderr


def test_moves_and_deleted_output_are_noted_on_stderr() -> None:
    steps = [
        jobs_pb2.ReadLogsResponse(),
        a_part(b"a", 1000),
        a_part(b"b", 1001),
        a_part(b"c", 0, 3, "a40-1"),
        a_part(b"d", 8, 3, "a40-1"),
    ]
    done = run_logs(ScriptedJobs(steps), "-f")
    assert done.stdout == "abcd"
    assert done.stderr.splitlines() == [
        "the job has not been started yet; waiting for its output",
        "1,000 bytes of older output were deleted",
        "generation 3 on a40-1 from here",
        "7 bytes of older output were deleted",
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFound(JOB), Exit.NOT_FOUND),
        (NodeSilent("node n0 was last heard 40 s ago"), Exit.REFUSED),
        (Unavailable("no database"), Exit.UNREACHABLE),
    ],
)
def test_an_error_ends_with_its_sentence_and_code(error: TesseraError, code: Exit) -> None:
    done = run_logs(ScriptedJobs(*([error] for _ in range(10))), "-f")
    assert done.exit_code == code
    assert done.stderr.startswith(f"error: {error}")


def test_a_lost_server_is_called_again_from_the_same_byte() -> None:
    lost = Unavailable("this server is shutting down")
    jobs = ScriptedJobs(
        [a_part(b"one "), a_part(b"two ", 4), lost],
        [a_part(b"", 8), a_part(b"three ", 8), a_part(b"four ", 0, 2), lost],
        [a_part(b"five", 5, 2)],
    )
    pauses: list[float] = []
    request = jobs_pb2.ReadLogsRequest(name=JOB, follow=True)
    with connect_to(jobs) as client:
        parts = list(read_parts(client, request, pauses.append))
    assert b"".join(part.data for part in parts) == b"one two three four five"
    assert [(r.generation, r.offset, r.follow) for r in jobs.requests] == [
        (0, 0, True),
        (1, 8, True),
        (2, 5, True),
    ]
    assert pauses == [logs.PAUSE_S] * 2


def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "RECONNECT_S", 1.0)
    lost = Unavailable("it went away")
    jobs = ScriptedJobs([a_part(b"one"), lost], *([lost] for _ in range(100)))
    pauses: list[float] = []
    request = jobs_pb2.ReadLogsRequest(name=JOB)
    with connect_to(jobs) as client, pytest.raises(CallError, match="it went away"):
        list(read_parts(client, request, pauses.append))
    assert pauses == [0.5, 1.0]


@pytest.mark.parametrize("lines", [0, 1, 2, 3, 4, 1000])
@pytest.mark.parametrize("data", [b"", b"a", b"a\n", b"a\nb\nc", b"a\nb\nc\n", b"\n\n\n"])
def test_the_last_lines_are_those_that_a_reader_counts(data: bytes, lines: int) -> None:
    expected = b"".join(data.splitlines(keepends=True)[-lines:]) if lines else b""
    assert last_lines(data, lines) == expected


@pytest.mark.parametrize("lines", [0, 3, 5000])
def test_a_tail_reads_no_more_than_it_needs(lines: int) -> None:
    data = b"".join(b"line %06d of the output of a rank\n" % i for i in range(40_000))
    jobs = StoredOutput(data)
    done = run_logs(jobs, "--tail", str(lines))
    assert (done.exit_code, done.stdout_bytes) == (0, last_lines(data, lines))
    asked = [-request.offset for request in jobs.requests]
    assert asked == [65536, 262144][: 1 + (lines == 5000)]
    assert run_logs(StoredOutput(b"a\nb"), "--tail", "9").stdout == "a\nb"


def test_a_followed_tail_goes_on_where_it_ended() -> None:
    jobs = ScriptedJobs([a_part(b"1\n2\n3\n", 94, 2)], [a_part(b"4\n", 100, 2)])
    done = run_logs(jobs, "-f", "--tail", "1")
    assert (done.stdout, done.stderr) == ("3\n4\n", "")
    assert [(r.follow, r.generation, r.offset) for r in jobs.requests] == [
        (False, 0, -logs.FIRST_TAIL_BYTES),
        (True, 2, 100),
    ]


def test_a_followed_tail_of_a_job_that_waits_is_its_output_from_the_start() -> None:
    waiting = jobs_pb2.ReadLogsResponse()
    jobs = ScriptedJobs([NotAllowed("not started")], [waiting, a_part(b"1\n2\n")])
    done = run_logs(jobs, "-f", "--tail", "1")
    assert (done.exit_code, done.stdout) == (0, "1\n2\n")
    assert (jobs.requests[1].follow, jobs.requests[1].offset) == (True, 0)


def test_ctrl_c_ends_the_command_and_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_printer: OutputPrinter, _data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputPrinter, "write", interrupt)
    endless = EndlessOutput()
    assert run_logs(endless, "-f").exit_code == Exit.INTERRUPTED
    assert endless.left.wait(PATIENCE_S)


def printed(*chunks: bytes) -> bytes:
    out = io.BytesIO()
    printer = OutputPrinter(out, is_terminal=True)
    for chunk in chunks:
        printer.write(chunk)
    printer.close()
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("tabs\tand\r\nsnow\N{SNOWMAN}\n".encode(), "tabs\tand\r\nsnow\N{SNOWMAN}\n".encode()),
        (b"\x1b[1;31mred\x1b[0m", b"\x1b[1;31mred\x1b[0m\x1b[0m"),
        (b"\x1b]0;title\x07", b"^[]0;title^G"),
        (b"\x1b[2J\x1b[6n\x1bc", b"^[[2J^[[6n^[c"),
        (b"\x08\x00\x7f", b"^H^@^?"),
        ("\x9b31m\u202e".encode(), b"\\x9b31m\\u202e"),
        (b"\x9b2J\xff", b"\\x9b2J\\xff"),
    ],
)
def test_a_terminal_gets_text_and_colours_but_no_control_characters(
    data: bytes, shown: bytes
) -> None:
    assert printed(data) == shown


def test_sequences_are_recognised_across_parts() -> None:
    whole = "a\x1b[31mb\N{SNOWMAN}\x1b]52;c\x1b[m\x1b".encode()
    expected = printed(whole)
    assert expected == "a\x1b[31mb\N{SNOWMAN}^[]52;c\x1b[m^[\x1b[0m".encode()
    for cut in range(len(whole)):
        assert printed(whole[:cut], whole[cut:]) == expected
    assert printed(*(whole[i : i + 1] for i in range(len(whole)))) == expected


def test_an_endless_sequence_is_not_held_back() -> None:
    out = io.BytesIO()
    printer = OutputPrinter(out, is_terminal=True)
    printer.write(b"\x1b[" + b"1;" * 100)
    assert out.getvalue() == b"^[[" + b"1;" * 100
