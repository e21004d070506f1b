"""``--watch``: a list, or one job, shown again whenever it changes.

On a terminal, the view is redrawn in place, with columns fitted to its width and ages that advance.
Elsewhere, a whole view is printed for each change. As JSON, YAML or names, the changed items are
printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tessera.service.cli.client import CallFailed, Exit, current_timestamp
from tessera.service.cli.jobs.jobview import JobDetails, job_parts
from tessera.service.cli.names import short_name
from tessera.service.cli.options import Output
from tessera.service.cli.render import (
    Lines,
    as_json,
    console_for,
    fit_rows,
    make_table,
    print_line,
    show_message,
)
from tessera.v1 import clusters_pb2, jobs_pb2, scheduler_pb2

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


_M = TypeVar("_M", jobs_pb2.Job, clusters_pb2.Node, scheduler_pb2.Round)


# no slots: Python 3.11 cannot make a parametrised generic frozen with slots
@dataclass(frozen=True, kw_only=True)
class WatchedList(Generic[_M]):
    """A list to show again and again.

    ``lines`` are shown for the items at a time, and ``empty`` without items. ``steady``
    are fields whose change is no change of an item. ``moving`` are fields that change all the time,
    so that views are not printed again for them; they include the steady ones. ``footer`` is called
    as often as ``read``.
    """

    read: Callable[[], list[_M]]
    lines: Callable[[Sequence[_M], Timestamp], Lines[_M]]
    empty: str
    steady: Sequence[str] = ()
    moving: Sequence[str] = ()
    footer: Callable[[], str] = lambda: ""


def watched_jobs(
    read: Callable[[], list[jobs_pb2.Job]],
    footer: Callable[[], str],
    lines: Callable[[Sequence[jobs_pb2.Job], Timestamp], Lines[jobs_pb2.Job]],
) -> WatchedList[jobs_pb2.Job]:
    """Return a list of jobs to watch."""
    return WatchedList(
        read=read,
        lines=lines,
        empty="no jobs",
        steady=CHANGING_FIELDS[:2],
        moving=CHANGING_FIELDS,
        footer=footer,
    )


def watch_list(watched: WatchedList[_M], output: Output) -> None:
    """Show all items of a list until the user interrupts."""
    if output not in (Output.TABLE, Output.WIDE):
        for items in changed_items(watched.read, watched.steady, lambda: time.sleep(POLL_S)):
            _print_each(items, output)
        return
    console, wide = console_for(fold=True), output is Output.WIDE
    if not console.is_terminal:
        before: list[_M] | None = None
        for items in _repeated(watched.read):
            settled = [_without(item, watched.moving) for item in items]
            if settled != before:
                _print_apart(
                    console_for(fold=False), _list_view(watched, items, None, wide=wide), before
                )
            before = settled
        return

    shown: list[_M] = []
    below = ""

    def view() -> RenderableType:
        return Group(_list_view(watched, shown, console.width, wide=wide), Text(below, "dim"))

    with live_view(console, view) as live:
        for items in _repeated(watched.read):
            shown, below = items, watched.footer()
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


def changed_items(
    read: Callable[[], list[_M]], steady: Sequence[str], pause: Callable[[], None]
) -> Iterator[list[_M]]:
    """Yield all items, then after each ``pause`` the items that are new or changed.

    A change of the ``steady`` fields alone is not a change.
    """
    before: dict[str, _M] = {}
    while True:
        items = read()
        after = {item.name: _without(item, steady) for item in items}
        if changed := [item for item in items if before.get(item.name) != after[item.name]]:
            yield changed
        before = after
        pause()


def _repeated(read: Callable[[], list[_M]]) -> Iterator[list[_M]]:
    while True:
        yield read()
        time.sleep(POLL_S)


def _without(item: _M, fields: Sequence[str]) -> _M:
    copied = type(item)()
    copied.CopyFrom(item)
    for name in fields:
        copied.ClearField(name)  # type: ignore[arg-type] # names of its fields
    return copied


def _print_each(items: Iterable[_M], output: Output) -> None:
    for item in items:
        if output is Output.JSON:
            print_line(as_json(item, indent=None))
        elif output is Output.NAME:
            print_line(item.name)
        else:
            print_line("---")
            show_message(item, output)


def _list_view(
    watched: WatchedList[_M], items: Sequence[_M], width: int | None, *, wide: bool
) -> RenderableType:
    """Return items as a table with their ages now. If ``width`` is None, the table is not cut."""
    if not items:
        return Text(watched.empty)
    lines, columns = watched.lines(items, current_timestamp())
    if width is None:
        return make_table(lines, columns, wide=wide)
    return fit_rows(lines, columns, width, wide=wide)


def live_view(console: Console, view: Callable[[], RenderableType]) -> Live:
    """Return a view that is redrawn in place, on a terminal."""
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

    with live_view(console_for(fold=True), view) as live:
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
