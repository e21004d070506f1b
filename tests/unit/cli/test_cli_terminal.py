"""Text for terminals: control characters, pagers, colours and piped tables."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.text import Text

from tessera.service.cli import render, terminal
from tessera.service.cli.jobview import job_columns
from tessera.service.cli.options import Output
from tessera.v1 import clusters_pb2, jobs_pb2

NOW = Timestamp(seconds=1_800_000_000)
CLEAR = "\x1b[2Jgone"
CSI, OVERRIDE = "\x9b", "\u202e"


def a_terminal(height: int = 5) -> tuple[Console, io.StringIO]:
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=40, height=height, color_system=None)
    return console, sent


def a_pager(folder: Path) -> tuple[dict[str, str], Path]:
    """Return an environment with a pager that writes what it gets, and LESS, to a file."""
    script, seen = folder / "my-pager", folder / "seen"
    script.write_text(f'#!/bin/sh\n{{ echo "$LESS"; cat; }} > {seen}\n')
    script.chmod(0o755)
    return {"PAGER": str(script), "PATH": os.environ["PATH"]}, seen


@pytest.mark.parametrize("text", [CLEAR, f"a{CSI}2J", f"{OVERRIDE}txt.exe", "a\rb", "a\x7f"])
def test_control_characters_in_names_reach_no_terminal(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = clusters_pb2.Node(name="clusters/c/nodes/n", drain_reason=text, rack=f"{text}\n{text}")
    column = render.Column[clusters_pb2.Node]("REASON", lambda n: n.drain_reason)
    rack = render.Column[clusters_pb2.Node]("RACK", lambda n: n.rack)
    for output in Output:
        render.show_items(
            clusters_pb2.ListNodesResponse(nodes=[node]),
            [node],
            [column, rack],
            output,
            lambda n: n.name,
        )
    render.show_facts([("reason", text)])
    render.print_note(text)
    render.print_error(text)
    sent = capsys.readouterr()
    for shown in (sent.out, sent.err):
        assert not terminal._CONTROLS.search(shown)
    assert terminal.make_visible(text) in sent.out
    assert terminal.make_visible(text) in sent.err


def test_json_keeps_the_text_that_it_escapes() -> None:
    node = clusters_pb2.Node(drain_reason=f"{CLEAR}{CSI}{OVERRIDE}\x7fü")
    assert json.loads(render.as_json(node))["drain_reason"] == node.drain_reason
    assert "ü" in render.as_json(node)


def test_long_output_on_a_terminal_goes_through_the_users_pager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, seen = a_pager(tmp_path)
    monkeypatch.setattr(os, "environ", environment)
    console, sent = a_terminal()
    terminal.print_long([(console, Text("a\nb")), (console, Text("c"))])
    assert sent.getvalue() == "a\nb\nc\n"  # it fits
    assert not seen.exists()
    terminal.print_long([(console, Text("\n".join("abcdefg")))])
    assert sent.getvalue() == "a\nb\nc\n"
    assert seen.read_text() == "FRX\na\nb\nc\nd\ne\nf\ng\n"
    environment["LESS"] = "S"
    terminal.print_long([(console, Text("\n".join("abcdefg")))])
    assert seen.read_text().startswith("S\n")


@pytest.mark.parametrize(
    "environment",
    [
        {"PAGER": ""},
        {"PAGER": "cat"},
        {"PAGER": "no-such-pager"},
        {"PAGER": "less 'unclosed"},
        {"TERM": "dumb"},
        {"PATH": "/nowhere"},
    ],
)
def test_without_a_usable_pager_the_output_is_printed(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **environment})
    console, sent = a_terminal()
    terminal.print_long([(console, Text("\n".join("abcdefg")))])
    assert sent.getvalue() == "\n".join("abcdefg") + "\n"


def test_a_piped_table_has_every_column_in_full_and_no_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    job = jobs_pb2.Job(
        name="clusters/c/jobs/" + 90 * "x",
        state=jobs_pb2.QUEUED,
        reason=jobs_pb2.Reason(code="OUTPRICED"),
    )
    rows = [job, jobs_pb2.Job(name="clusters/c/jobs/y", state=jobs_pb2.QUEUED)]
    render.show_items(
        jobs_pb2.ListJobsResponse(jobs=rows), rows, job_columns(rows, NOW), Output.TABLE
    )
    head, first, second = capsys.readouterr().out.splitlines()
    assert 90 * "x" in first
    assert "OUTPRICED" in first
    assert head.index("STATE") == first.index("QUEUED") == second.index("QUEUED")
    assert "\x1b" not in head + first + second


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, has_colour in (
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            for name, value in {"TERM": "xterm-256color", **variables}.items():
                patch.setenv(name, value)
            console = Console(file=io.StringIO(), force_terminal=True, width=80)
            console.print(render.facts_grid([("state", "RUNNING")]))
            assert ("\x1b[32m" in console.file.getvalue()) is has_colour  # type: ignore[attr-defined]
