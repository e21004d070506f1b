"""Views that are redrawn whenever something changes, on a terminal and elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len
from rich.console import Console

from tessera.service.cli import watch
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.jobview import JobDetails, job_columns, job_lines
from tessera.service.cli.options import Output
from tessera.service.cli.render import fit_rows
from tessera.v1 import estimates_pb2, jobs_pb2

START_S = 1_800_000_000


class UserInterrupt(Exception):
    """A simulated Ctrl-C of the user."""


class MinuteClock:
    """A clock for ages that advances by a minute whenever it is read."""

    def __init__(self) -> None:
        self.seconds = START_S

    def __call__(self) -> Timestamp:
        self.seconds += 60
        return Timestamp(seconds=self.seconds)


def a_job(name: str = "j", **fields: object) -> jobs_pb2.Job:
    job = jobs_pb2.Job(
        name=f"clusters/c/jobs/{name}",
        iterations=1000,
        requested_gpus=8,
        workload=estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256),
        state=jobs_pb2.QUEUED,
        create_time=Timestamp(seconds=START_S),
    )
    job.MergeFrom(jobs_pb2.Job(**fields))  # type: ignore[arg-type] # fields of Job
    return job


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the text that the views write to a terminal of 80 columns."""
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=80, height=30, color_system=None)
    monkeypatch.setattr(watch, "console_for", lambda fold: console)
    monkeypatch.setattr(watch, "current_timestamp", MinuteClock())
    return sent


def readings(
    *frames: list[jobs_pb2.Job], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[jobs_pb2.Job]]:
    """Yield readings of the list of jobs. After the last one the user stops the command."""
    monkeypatch.setattr("tessera.service.cli.watch.time.sleep", lambda seconds: None)
    yield from frames
    raise UserInterrupt


def watch_frames(
    frames: list[list[jobs_pb2.Job]], monkeypatch: pytest.MonkeyPatch, output: Output = Output.TABLE
) -> None:
    frames_left = readings(*frames, monkeypatch=monkeypatch)
    with pytest.raises(UserInterrupt):
        watch.watch_list(
            watch.watched_jobs(
                lambda: next(frames_left),
                lambda: "next round: within seconds",
                partial(job_lines, expand=False),
            ),
            output,
        )


def test_without_a_terminal_each_change_prints_one_whole_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, runs = a_job("a"), a_job("b", state=jobs_pb2.RUNNING)
    later = a_job("b", state=jobs_pb2.RUNNING, iterations_done=500.0, service_gpu_seconds=9.0)
    ended = a_job("b", state=jobs_pb2.SUCCEEDED)
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
    members = [
        a_job(f"sweep.{i}", array=jobs_pb2.ArrayMember(array="clusters/c/arrays/sweep", index=i))
        for i in range(3)
    ]
    started = [a_job(member.name.rpartition("/")[2]) for member in members]
    for job, member in zip(started, members, strict=True):
        job.CopyFrom(member)
    started[0].state = jobs_pb2.RUNNING
    watch_frames([[*members, a_job("b")], [*started, a_job("b")]], monkeypatch)
    tables = [text.splitlines() for text in capsys.readouterr().out.split("\n\n")]
    assert [[line.split()[0] for line in lines[1:]] for lines in tables] == [["sweep", "b"]] * 2
    assert "3 QUEUED" in tables[0][1]
    assert "1 RUNNING, 2 QUEUED" in tables[1][1]
    watch_frames([members, started], monkeypatch, Output.NAME)
    assert capsys.readouterr().out.split() == [
        *(member.name for member in members),
        started[0].name,
    ]


def test_on_a_terminal_the_table_fits_and_its_ages_advance(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    job = a_job("a-job-with-a-very-long-name-" * 4)
    watch_frames([[job], [job]], monkeypatch)
    text = terminal.getvalue()
    assert "next round: within seconds" in text
    rows = [row for row in text.splitlines() if "QUEUED" in row]
    assert rows
    assert all(cell_len(row) <= 80 + len("\x1b[2K\x1b[1A" * 4) for row in rows)
    ages = [row.split()[-1] for row in rows]
    assert len(set(ages)) == len(ages)


def test_the_longest_texts_are_cut_to_fit_and_numbers_never(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = [a_job("x" * 90, iterations_done=372.6), a_job("y")]
    table = fit_rows(jobs, job_columns(jobs, Timestamp(seconds=START_S + 90)), 80, wide=False)
    Console(width=80).print(table)
    header, first, second = capsys.readouterr().out.splitlines()
    assert max(map(len, (header, first, second))) <= 80
    assert "…" in first
    assert "37.2" in first
    assert "1m30s" in first
    assert first.index("QUEUED") == second.index("QUEUED") == header.index("STATE")


@pytest.mark.parametrize(
    ("ended", "code", "message"),
    [
        (
            a_job(state=jobs_pb2.FAILED, last_error="exit status 3"),
            Exit.JOB_FAILED,
            "j failed: exit status 3",
        ),
        (a_job(state=jobs_pb2.CANCELLED), Exit.JOB_CANCELLED, "j cancelled"),
        (
            a_job(state=jobs_pb2.REJECTED, reason=jobs_pb2.Reason(message="too late")),
            Exit.JOB_REJECTED,
            "j rejected: too late",
        ),
    ],
)
@pytest.mark.parametrize("output", [Output.TABLE, Output.JSON, Output.NAME])
def test_the_exit_code_and_the_error_show_how_a_watched_job_ended(
    ended: jobs_pb2.Job, code: Exit, message: str, output: Output
) -> None:
    with pytest.raises(CallFailed, match=message) as failed:
        watch.watch_job([a_job(state=jobs_pb2.RUNNING), ended], lambda job: JobDetails(), output)
    assert failed.value.exit_code is code


def test_a_watched_job_is_shown_in_full_at_each_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = a_job(state=jobs_pb2.RUNNING)
    further = a_job(state=jobs_pb2.RUNNING, iterations_done=10.0)
    ended = a_job(state=jobs_pb2.SUCCEEDED, iterations_done=1000.0)
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


def test_a_watched_job_is_redrawn_in_place_on_a_terminal(terminal: io.StringIO) -> None:
    running, ended = a_job(state=jobs_pb2.RUNNING), a_job(state=jobs_pb2.SUCCEEDED)
    watch.watch_job([running, ended], lambda job: JobDetails(), Output.TABLE)
    text = terminal.getvalue()
    assert "\x1b[1A" in text  # the cursor goes up, so the view stays where it is
    assert text.rindex("SUCCEEDED") > text.find("RUNNING")
