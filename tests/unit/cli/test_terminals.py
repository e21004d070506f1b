"""Text on terminals and in pipes: control characters, pagers, colours, and views that are watched."""

from __future__ import annotations

import io
import json
import os
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tessera.service.cli import render, terminal
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.jobs import watch
from tessera.service.cli.jobs.jobview import JobDetails, job_columns, job_lines
from tessera.service.cli.options import Output
from tessera.service.cli.render import fit_rows
from tessera.v1 import clusters_pb2, jobs_pb2
from tests.support.shown import NOW, a_shown_job, later, some_array_jobs

SEVEN_LINES = Text("\n".join("abcdefg"))


def a_terminal(height: int = 5) -> tuple[Console, io.StringIO]:
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=40, height=height, color_system=None)
    return console, sent


@pytest.mark.parametrize("text", ["\x1b[2Jgone", "a\x9b2J", "\u202etxt.exe", "a\rb", "aü\x7f"])
def test_control_characters_in_names_reach_no_terminal(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = clusters_pb2.Node(name="clusters/c/nodes/n", drain_reason=text, rack=f"{text}\n{text}")
    columns = [
        render.Column[clusters_pb2.Node]("REASON", lambda n: n.drain_reason),
        render.Column[clusters_pb2.Node]("RACK", lambda n: n.rack),
    ]
    response = clusters_pb2.ListNodesResponse(nodes=[node])
    for output in Output:
        render.show_items(response, [node], columns, output, lambda n: n.name)
    render.show_facts([("reason", text)])
    render.print_note(text)
    render.print_error(text)
    sent = capsys.readouterr()
    for shown in (sent.out, sent.err):
        assert not terminal._CONTROLS.search(shown)
        assert terminal.make_visible(text) in shown
    assert json.loads(render.as_json(node))["drain_reason"] == text  # escaped, and kept
    assert "ü" in render.as_json(clusters_pb2.Node(rack="ü"))


def test_long_output_on_a_terminal_goes_through_the_users_pager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = tmp_path / "my-pager", tmp_path / "seen"
    script.write_text(f'#!/bin/sh\n{{ echo "$LESS"; cat; }} > {seen}\n')
    script.chmod(0o755)
    environment = {"PAGER": str(script), "PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", environment)
    console, sent = a_terminal()
    terminal.print_long([(console, Text("a\nb")), (console, Text("c"))])
    assert sent.getvalue() == "a\nb\nc\n"  # it fits
    assert not seen.exists()
    terminal.print_long([(console, SEVEN_LINES)])
    assert sent.getvalue() == "a\nb\nc\n"
    assert seen.read_text() == f"FRX\n{SEVEN_LINES}\n"
    environment["LESS"] = "S"
    terminal.print_long([(console, SEVEN_LINES)])
    assert seen.read_text().startswith("S\n")
    unusable = ("", "cat", "no-such-pager", "less 'unclosed")
    for change in (*({"PAGER": pager} for pager in unusable), {"TERM": "dumb"}, {"PATH": "/no"}):
        usual = {"PATH": environment["PATH"]}
        monkeypatch.setattr(os, "environ", usual | change)
        console, sent = a_terminal()
        terminal.print_long([(console, SEVEN_LINES)])
        assert sent.getvalue() == f"{SEVEN_LINES}\n", change


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


class UserInterrupt(Exception):
    """A simulated Ctrl-C of the user."""


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the text that the views write to a screen of 80 columns."""
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=80, height=30, color_system=None)
    monkeypatch.setattr(watch, "console_for", lambda fold: console)
    ages = count(60, 60)  # a minute more whenever the clock is read
    monkeypatch.setattr(watch, "current_timestamp", lambda: later(next(ages)))
    return sent


def watch_frames(
    frames: list[list[jobs_pb2.Job]], monkeypatch: pytest.MonkeyPatch, output: Output = Output.TABLE
) -> None:
    """Watch a list of jobs that is read as ``frames``. Then the user stops the command."""
    readings = iter(frames)

    def read() -> list[jobs_pb2.Job]:
        for frame in readings:
            return frame
        raise UserInterrupt

    monkeypatch.setattr("tessera.service.cli.jobs.watch.time.sleep", lambda seconds: None)
    footer, lines = lambda: "next round: within seconds", partial(job_lines, expand=False)
    with pytest.raises(UserInterrupt):
        watch.watch_list(watch.watched_jobs(read, footer, lines), output)


def test_without_a_terminal_each_change_prints_one_whole_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, runs = a_shown_job("a"), a_shown_job("b", state=jobs_pb2.RUNNING)
    later = a_shown_job("b", state=jobs_pb2.RUNNING, iterations_done=500.0, service_gpu_seconds=9.0)
    ended = a_shown_job("b", state=jobs_pb2.SUCCEEDED)
    watch_frames([[waits, runs], [waits, later], [waits, ended]], monkeypatch)
    tables = [text.splitlines() for text in capsys.readouterr().out.split("\n\n")]
    assert len(tables) == 2  # progress alone prints no table
    for lines in tables:
        assert len(lines) == 3
        state = lines[0].index("STATE")
        assert {row[state - 1] for row in lines[1:]} == {" "}
        assert [row[state:].split()[0] for row in lines[1:]] in (
            ["QUEUED", "RUNNING"],
            ["QUEUED", "SUCCEEDED"],
        )


def test_the_jobs_of_an_array_are_one_line_with_their_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    members, started = some_array_jobs("QQQ"), some_array_jobs("RQQ")
    watch_frames([[*members, a_shown_job("b")], [*started, a_shown_job("b")]], monkeypatch)
    tables = [text.splitlines() for text in capsys.readouterr().out.split("\n\n")]
    assert [[line.split()[0] for line in lines[1:]] for lines in tables] == [["sweep", "b"]] * 2
    assert "3 QUEUED" in tables[0][1]
    assert "1 RUNNING, 2 QUEUED" in tables[1][1]
    used = [a_shown_job(started[0].name.rpartition("/")[2], service_gpu_seconds=7.0)]
    used[0].MergeFrom(started[0])
    watch_frames([members, started, [*used, *started[1:]]], monkeypatch, Output.NAME)
    names = [member.name for member in members]  # a change of service alone shows no job again
    assert capsys.readouterr().out.split() == [*names, names[0]]


def test_on_a_terminal_the_table_fits_and_its_ages_advance(
    monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    job = a_shown_job("a-job-with-a-very-long-name-" * 4)
    watch_frames([[job], [job]], monkeypatch)
    text = screen.getvalue()
    assert "next round: within seconds" in text
    rows = [row for row in text.splitlines() if "QUEUED" in row]
    assert rows
    assert all(cell_len(row) <= 80 + len("\x1b[2K\x1b[1A" * 4) for row in rows)
    ages = [row.split()[-1] for row in rows]
    assert len(set(ages)) == len(ages)


def test_a_terminal_gets_the_longest_texts_cut_to_fit_and_a_pipe_every_column_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outpriced = jobs_pb2.Reason(code="OUTPRICED")
    jobs = [a_shown_job("x" * 90, iterations_done=372.6, reason=outpriced), a_shown_job("y")]
    Console(width=80).print(fit_rows(jobs, job_columns(jobs, NOW), 80, wide=False))
    header, first, second = capsys.readouterr().out.splitlines()
    assert max(map(len, (header, first, second))) <= 80
    for part in ("…", "37.2", "3m20s"):  # numbers are never cut
        assert part in first
    assert first.index("QUEUED") == second.index("QUEUED") == header.index("STATE")
    monkeypatch.setenv("COLUMNS", "20")
    response = jobs_pb2.ListJobsResponse(jobs=jobs)
    render.show_items(response, jobs, job_columns(jobs, NOW), Output.TABLE)
    header, first, second = capsys.readouterr().out.splitlines()
    for part in (90 * "x", "OUTPRICED"):
        assert part in first
    assert first.index("QUEUED") == second.index("QUEUED") == header.index("STATE")
    assert "\x1b" not in header + first + second


@pytest.mark.parametrize(
    ("ended", "code", "message"),
    [
        ({"state": jobs_pb2.FAILED, "last_error": "status 3"}, Exit.JOB_FAILED, "failed: status 3"),
        ({"state": jobs_pb2.CANCELLED}, Exit.JOB_CANCELLED, "cancelled"),
        (
            {"state": jobs_pb2.REJECTED, "reason": jobs_pb2.Reason(message="too late")},
            Exit.JOB_REJECTED,
            "rejected: too late",
        ),
    ],
)
@pytest.mark.parametrize("output", [Output.TABLE, Output.JSON, Output.NAME])
def test_the_exit_code_and_the_error_show_how_a_watched_job_ended(
    ended: dict[str, Any], code: Exit, message: str, output: Output
) -> None:
    updates = [a_shown_job(state=jobs_pb2.RUNNING), a_shown_job(**ended)]
    with pytest.raises(CallFailed, match=f"j {message}") as failed:
        watch.watch_job(updates, lambda job: JobDetails(), output)
    assert failed.value.exit_code is code


def test_a_watched_job_is_shown_in_full_at_each_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = a_shown_job(state=jobs_pb2.RUNNING)
    further = a_shown_job(state=jobs_pb2.RUNNING, iterations_done=10.0)
    ended = a_shown_job(state=jobs_pb2.SUCCEEDED, iterations_done=1000.0)
    states: list[str] = []

    def details(job: jobs_pb2.Job) -> JobDetails:
        states.append(jobs_pb2.JobState.Name(job.state))
        return JobDetails(network="rank 1")

    watch.watch_job([running, further, ended], details, Output.TABLE)
    views = capsys.readouterr().out.split("\n\n")
    assert len(views) == 2
    assert states == ["RUNNING", "SUCCEEDED"]
    for view in views:
        assert "requested" in view
        assert "rank 1" in view


def test_a_watched_job_is_redrawn_in_place_on_a_terminal(screen: io.StringIO) -> None:
    running, ended = a_shown_job(state=jobs_pb2.RUNNING), a_shown_job(state=jobs_pb2.SUCCEEDED)
    watch.watch_job([running, ended], lambda job: JobDetails(), Output.TABLE)
    text = screen.getvalue()
    assert "\x1b[1A" in text  # the cursor goes up, so the view stays where it is
    assert text.rindex("SUCCEEDED") > text.find("RUNNING")
