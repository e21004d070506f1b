"""``tessera logs``: the output of a job's ranks, from the disks of the nodes."""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, BinaryIO, Final

import typer

from tessera.client import Client, NotAllowed, Unavailable
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.client import connect
from tessera.service.cli.names import full_name, short_name
from tessera.service.cli.options import DEFAULT_CLUSTER, DEFAULT_SERVER, Cluster, JobName, Server
from tessera.service.cli.render import print_note
from tessera.service.cli.terminal import visible_form
from tessera.v1 import jobs_pb2

FIRST_TAIL_BYTES: Final = 64 * 2**10
MAX_TAIL_BYTES: Final = 64 * 2**20
"""Bytes from the end in which the last lines are looked for first, and at most."""

MAX_TAIL_LINES: Final = 100_000

RECONNECT_S: Final = 300.0
"""Seconds for which a server that was lost is called again."""

PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
"""Seconds before the first further call, doubled after each one, and their maximum."""

_COLOUR: Final = r"\x1b\[[0-9;:]{0,60}m"
_CONTROL: Final = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
_SPECIAL: Final = re.compile(f"({_COLOUR})|{_CONTROL}")
"""Colours, and characters that a terminal obeys, except newline, tab and carriage return. Those that
change the direction of text are among them.
"""

_UNFINISHED: Final = re.compile(r"\x1b(?:\[[0-9;:]{0,60})?\Z")
"""The beginning of what may become a colour."""

_RESET: Final = b"\x1b[0m"


def add_commands(app: typer.Typer) -> None:
    """Add ``logs``."""
    app.command("logs", rich_help_panel="Jobs")(print_logs)


def print_logs(
    name: JobName,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Go on with new output, also after the job was moved, until the job ends or Ctrl-C is"
            " pressed.",
        ),
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**31 - 1,
            help="Rank whose output is printed. Default: 0.",
            show_default=False,
        ),
    ] = None,
    generation: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**62,
            help="Start of the job whose output is printed, counted from 1. Default: the latest.",
            show_default=False,
        ),
    ] = 0,
    launcher: Annotated[
        bool,
        typer.Option("--launcher", help="Print the output of the launcher on the first node."),
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_TAIL_LINES, metavar="N", help="Print only the last N lines."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Print what a rank of a job has written.

    The output goes to stdout as it is. If stdout is a terminal, control characters are made visible,
    except colours.
    """
    if launcher and rank is not None:
        raise InvalidInput(
            "--launcher", "prints the output of the launcher, which has no rank; leave --rank out"
        )
    request = jobs_pb2.ReadLogsRequest(
        name=full_name(cluster, "jobs", name),
        rank=-1 if launcher else rank or 0,
        generation=generation,
        follow=follow,
    )
    with connect(server) as client:
        printer = OutputPrinter(sys.stdout.buffer, is_terminal=sys.stdout.isatty())
        try:
            if tail is None or not _print_tail(client, request, tail, printer):
                _print_parts(read_parts(client, request), printer, expected=request.offset)
        finally:
            printer.close()


def _print_tail(
    client: Client, request: jobs_pb2.ReadLogsRequest, lines: int, printer: OutputPrinter
) -> bool:
    """Print the last lines, and return whether that is all. Otherwise ``request`` is what follows."""
    follow, request.follow = request.follow, False
    try:
        data, end = find_tail(lambda asked: read_parts(client, asked), request, lines)
    except NotAllowed:
        if not follow:
            raise
        request.follow = True  # there is no output yet
        return False
    printer.write(data)
    request.follow, request.generation, request.offset = follow, end.generation, end.offset
    return not follow


def find_tail(
    read: Callable[[jobs_pb2.ReadLogsRequest], Iterable[jobs_pb2.ReadLogsResponse]],
    request: jobs_pb2.ReadLogsRequest,
    lines: int,
) -> tuple[bytes, jobs_pb2.ReadLogsResponse]:
    """Return the last lines of output, and an empty part at its end. Raises CallError."""
    size = FIRST_TAIL_BYTES
    while True:
        asked = jobs_pb2.ReadLogsRequest()
        asked.CopyFrom(request)
        asked.offset = -size
        parts = list(read(asked))
        data = b"".join(part.data for part in parts)
        is_whole = parts[0].offset == 0 or len(data) < size
        if is_whole or data.count(b"\n") > lines or size >= MAX_TAIL_BYTES:
            last = parts[-1]
            end = jobs_pb2.ReadLogsResponse(
                generation=last.generation, offset=last.offset + len(last.data)
            )
            return last_lines(data, lines), end
        size *= 4


def last_lines(data: bytes, lines: int) -> bytes:
    """Return the last ``lines`` lines. The last one may have no newline."""
    begin = len(data) - data.endswith(b"\n")
    if not lines:
        return b""
    for _ in range(lines):
        begin = data.rfind(b"\n", 0, begin)
        if begin < 0:
            return data
    return data[begin + 1 :]


def read_parts(
    client: Client,
    request: jobs_pb2.ReadLogsRequest,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[jobs_pb2.ReadLogsResponse]:
    """Yield the output that ``request`` asks for.

    If the server is lost after it has sent something, it is called again, from where it stopped.
    ``request`` is changed. Raises CallError.
    """
    waited_s, pause_s, has_begun = 0.0, PAUSE_S, False
    while True:
        try:
            for part in client.stream(client.stubs.jobs.ReadLogs, request):
                waited_s, pause_s, has_begun = 0.0, PAUSE_S, True
                if part.generation:
                    request.generation = part.generation
                    request.offset = part.offset + len(part.data)
                yield part
        except Unavailable as error:
            if not has_begun or waited_s >= RECONNECT_S:
                raise
            if not waited_s:
                print_note(f"lost the server: {error}; trying to reach it again")
            pause(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, MAX_PAUSE_S)
        else:
            return


def _print_parts(
    parts: Iterable[jobs_pb2.ReadLogsResponse], printer: OutputPrinter, *, expected: int
) -> None:
    """Print output as it arrives, with notes on stderr about moves and deleted output.

    ``expected`` is the first byte that was asked for.
    """
    generation = 0
    for part in parts:
        if not part.generation:
            print_note("the job has not been started yet; waiting for its output")
            continue
        if part.generation != generation:
            if generation:
                print_note(f"generation {part.generation} on {short_name(part.node)} from here")
                expected = 0
            generation = part.generation
        if part.offset > expected:
            print_note(f"{part.offset - expected:,} bytes of older output were deleted")
        expected = part.offset + len(part.data)
        printer.write(part.data)


class OutputPrinter:
    """A printer of the raw output of programs.

    A terminal must not obey what a program wrote, apart from colours, so other control characters
    are made visible there.
    """

    def __init__(self, out: BinaryIO, *, is_terminal: bool) -> None:
        self._out, self._is_terminal = out, is_terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""  # the beginning of what may become a colour
        self._has_colours = False

    def write(self, data: bytes) -> None:
        """Print bytes, which may begin or end within a character."""
        if not self._is_terminal:
            self._out.write(data)
        else:
            text = self._held + self._decoder.decode(data)
            unfinished = _UNFINISHED.search(text)
            self._held = unfinished[0] if unfinished else ""
            self._show(text[: len(text) - len(self._held)])
        self._out.flush()

    def close(self) -> None:
        """Print what was held back, and end the colours of the output."""
        if self._is_terminal:
            self._show(self._held + self._decoder.decode(b"", final=True))
            self._held = ""
            if self._has_colours:
                self._out.write(_RESET)
        self._out.flush()

    def _show(self, text: str) -> None:
        self._out.write(_SPECIAL.sub(self._replace, text).encode())

    def _replace(self, match: re.Match[str]) -> str:
        if match[1]:
            self._has_colours = True
            return match[1]
        return visible_form(match[0])
