"""``--watch``: the jobs of a cluster, or one job, shown again whenever they change.

On a terminal, the view is redrawn in place, with columns fitted to its width and ages that advance.
Elsewhere, a whole view is printed for each change. As JSON, YAML or names, the changed jobs are
printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tessera.service.cli.client import CallFailed, Exit, current_timestamp
from tessera.service.cli.jobview import JobDetails, job_columns, job_parts
from tessera.service.cli.names import short_name
from tessera.service.cli.options import Output
from tessera.service.cli.render import (
    as_json,
    console_for,
    fit_rows,
    make_table,
    print_line,
    show_message,
)
from tessera.v1 import jobs_pb2

POLL_S: Final = 2.0
"""Seconds between two readings of the list of jobs."""

FRAMES_PER_S: Final = 1.0
"""Redraws of the view on a terminal, per second, so that ages advance between two changes."""

EXIT_CODES: Final = {
    jobs_pb2.SUCCEEDED: Exit.OK,
    jobs_pb2.FAILED: Exit.JOB_FAILED,
    jobs_pb2.CANCELLED: Exit.JOB_CANCELLED,
    jobs_pb2.REJECTED: Exit.JOB_REJECTED,
}
"""Exit codes by the state in which a watched job ended."""

CHANGING_FIELDS: Final = (
    *("service_gpu_seconds", "run_seconds"),
    *("iterations_done", "training", "forecast"),
)
"""Fields that change constantly while a job waits or runs."""


def watch_jobs(
    read: Callable[[], list[jobs_pb2.Job]], footer: Callable[[], str], output: Output
) -> None:
    """Show all jobs that ``read`` returns until the user interrupts.

    ``footer`` is called as often as ``read``.
    """
    if output not in (Output.TABLE, Output.WIDE):
        for jobs in changed_jobs(read, lambda: time.sleep(POLL_S)):
            _print_each(jobs, output)
        return
    console, wide = console_for(fold=True), output is Output.WIDE
    if not console.is_terminal:
        before: list[jobs_pb2.Job] | None = None
        for jobs in _repeated(read):
            if before is None or _all_settled(jobs) != _all_settled(before):
                _print_apart(console_for(fold=False), _list_view(jobs, None, wide=wide), before)
            before = jobs
        return

    shown: list[jobs_pb2.Job] = []
    below = ""

    def view() -> RenderableType:
        return Group(_list_view(shown, console.width, wide=wide), Text(below, "dim"))

    with _live(console, view) as live:
        for jobs in _repeated(read):
            shown, below = jobs, footer()
            live.refresh()


def watch_job(
    updates: Iterable[jobs_pb2.Job], details: Callable[[jobs_pb2.Job], JobDetails], output: Output
) -> None:
    """Show a job until it has ended.

    Raises:
        CallFailed: the job did not succeed. The message is its error, and the exit code says how it
            ended.
    """
    last = jobs_pb2.Job()
    if output not in (Output.TABLE, Output.WIDE):
        for last in updates:
            _print_each([last], output)
    elif not console_for(fold=True).is_terminal:
        last = _print_views(updates, details)
    else:
        last = _redraw(updates, details)
    require_success(last)


def require_success(job: jobs_pb2.Job) -> None:
    """Check that a watched job has succeeded. Raises CallFailed with its error."""
    code = EXIT_CODES.get(job.state, Exit.REFUSED)
    if code is Exit.OK:
        return
    state = jobs_pb2.JobState.Name(job.state).lower()
    cause = job.last_error or job.reason.message
    raise CallFailed(f"{short_name(job.name)} {state}" + (f": {cause}" if cause else ""), code)


def changed_jobs(
    read: Callable[[], list[jobs_pb2.Job]], pause: Callable[[], None]
) -> Iterator[list[jobs_pb2.Job]]:
    """Yield all jobs, then after each ``pause`` the jobs that are new or changed.

    An increase of the GPU time that a job has used (``service_gpu_seconds``) is not a change.
    """
    before: dict[str, jobs_pb2.Job] = {}
    while True:
        jobs = read()
        after = {job.name: _without(job, CHANGING_FIELDS[:2]) for job in jobs}
        if changed := [job for job in jobs if before.get(job.name) != after[job.name]]:
            yield changed
        before = after
        pause()


def _repeated(read: Callable[[], list[jobs_pb2.Job]]) -> Iterator[list[jobs_pb2.Job]]:
    while True:
        yield read()
        time.sleep(POLL_S)


def _without(job: jobs_pb2.Job, fields: Sequence[str]) -> jobs_pb2.Job:
    copied = jobs_pb2.Job()
    copied.CopyFrom(job)
    for name in fields:
        copied.ClearField(name)  # type: ignore[arg-type] # names of CHANGING_FIELDS
    return copied


def _all_settled(jobs: Sequence[jobs_pb2.Job]) -> list[jobs_pb2.Job]:
    """Return the jobs without the fields that change all the time."""
    return [_without(job, CHANGING_FIELDS) for job in jobs]


def _print_each(jobs: Iterable[jobs_pb2.Job], output: Output) -> None:
    for job in jobs:
        if output is Output.JSON:
            print_line(as_json(job, indent=None))
        elif output is Output.NAME:
            print_line(job.name)
        else:
            print_line("---")
            show_message(job, output)


def _list_view(jobs: Sequence[jobs_pb2.Job], width: int | None, *, wide: bool) -> RenderableType:
    """Return jobs as a table with their ages now. If ``width`` is None, the table is not cut."""
    if not jobs:
        return Text("no jobs")
    columns = job_columns(jobs, current_timestamp())
    if width is None:
        return make_table(jobs, columns, wide=wide)
    return fit_rows(jobs, columns, width, wide=wide)


def _live(console: Console, view: Callable[[], RenderableType]) -> Live:
    return Live(
        get_renderable=view,
        console=console,
        refresh_per_second=FRAMES_PER_S,
        vertical_overflow="ellipsis",
    )


def _job_view(job: jobs_pb2.Job, details: JobDetails, moment: Timestamp) -> RenderableType:
    return Group(*job_parts(job, moment, details))


def _print_views(
    updates: Iterable[jobs_pb2.Job], details: Callable[[jobs_pb2.Job], JobDetails]
) -> jobs_pb2.Job:
    """Print a job's whole view for each change except progress; return its last state."""
    console, before = console_for(fold=False), None
    job = jobs_pb2.Job()
    for job in updates:
        settled = _without(job, CHANGING_FIELDS)
        if settled != before:
            _print_apart(console, _job_view(job, details(job), current_timestamp()), before)
        before = settled
    return job


def _redraw(
    updates: Iterable[jobs_pb2.Job], details: Callable[[jobs_pb2.Job], JobDetails]
) -> jobs_pb2.Job:
    """Draw a job's view in place; return its last state."""
    job, known = jobs_pb2.Job(), JobDetails()

    def view() -> RenderableType:
        return _job_view(job, known, current_timestamp()) if job.name else Text("")

    with _live(console_for(fold=True), view) as live:
        for update in updates:
            known = details(update)
            job = update
            live.refresh()
    return job


def _print_apart(console: Console, view: RenderableType, before: object) -> None:
    """Print a view, separated from the previous one by an empty line."""
    if before is not None:
        console.print()
    console.print(view)
