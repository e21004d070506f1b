"""The commands ``queue``, which lists waiting jobs, and ``top``, a live picture of a cluster."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.text import Text

from tessera.client import Client
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.clusters.nodes import read_nodes
from tessera.service.cli.completion import complete_tenants
from tessera.service.cli.jobs.forecastview import listed_band, listed_position, span_until
from tessera.service.cli.jobs.jobview import job_columns, workload_key
from tessera.service.cli.jobs.watch import live_view, watch_list, watched_jobs
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    WatchList,
    parse_seconds,
)
from tessera.service.cli.render import (
    Column,
    console_for,
    count_noun,
    fit_rows,
    format_age,
    format_number,
    format_percent,
    make_table,
    print_note,
    show_list,
    show_parts,
)
from tessera.service.cli.rounds.nextround import next_round_line
from tessera.v1 import clusters_pb2, jobs_pb2

WAITING: Final = (jobs_pb2.QUEUED, jobs_pb2.HELD)
"""States of jobs that hold no GPUs and have not ended."""

LIVE: Final = (
    *WAITING,
    jobs_pb2.STARTING,
    jobs_pb2.RUNNING,
    jobs_pb2.STOPPING,
    jobs_pb2.HOLDING,
    jobs_pb2.CANCELLING,
    jobs_pb2.FAILING,
)
"""States of jobs that have not ended."""

LARGEST_JOBS: Final = 8
"""Number of running jobs, and of waiting jobs, that ``top`` lists."""

BAR_WIDTH: Final = 24
"""Width in characters of the bar of a GPU type."""

MIN_REFRESH_S: Final = 1.0
"""Shortest time in seconds between two readings of ``top``."""

Tenant = Annotated[
    list[str] | None,
    typer.Option(
        help="List only jobs of this tenant. Repeatable.", autocompletion=complete_tenants
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add ``queue`` and ``top``."""
    app.command("queue", rich_help_panel="Jobs")(list_queue)
    app.command("top", rich_help_panel="Clusters")(show_top)


def list_queue(
    tenant: Tenant = None,
    watch: WatchList = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List waiting jobs by expected start: why they wait, and when they start and finish.

    Positions and times are forecasts, but a promised start is a promise. Jobs without a forecast come
    next, in order of submission, and held jobs last.
    """
    with connect(server) as client:

        def read() -> list[jobs_pb2.Job]:
            jobs = read_jobs(client, cluster_name(cluster), WAITING)
            return order_queue(job for job in jobs if not tenant or job.tenant in tenant)

        footer = partial(next_round_line, client, cluster_name(cluster))
        if watch:
            watch_list(
                watched_jobs(read, footer, lambda jobs, now: (jobs, queue_columns(jobs, now))),
                output,
            )
            return
        jobs = read()
        show_list(
            jobs_pb2.ListJobsResponse(jobs=jobs),
            jobs,
            queue_columns(jobs, current_timestamp()),
            output,
        )
        if output in (Output.TABLE, Output.WIDE):
            print_note(footer() if jobs else "no jobs wait")


def read_jobs(
    client: Client, cluster: str, states: Sequence[jobs_pb2.JobState.ValueType]
) -> list[jobs_pb2.Job]:
    """Return the jobs of ``clusters/{cluster}`` in these states, in order of submission."""
    request = jobs_pb2.ListJobsRequest(parent=cluster, states=states)
    return list(client.pages(client.stubs.jobs.ListJobs, request, lambda page: page.jobs))


def order_queue(jobs: Iterable[jobs_pb2.Job]) -> list[jobs_pb2.Job]:
    """Return waiting jobs by position; then those without one; then held ones."""

    def place(job: jobs_pb2.Job) -> tuple[bool, float]:
        return job.state == jobs_pb2.HELD, job.forecast.position or math.inf

    return sorted(jobs, key=place)


def queue_columns(jobs: Sequence[jobs_pb2.Job], now: Timestamp) -> Sequence[Column[jobs_pb2.Job]]:
    """Return the columns of a list of waiting jobs. Times are relative to ``now``.

    If no job has a promised start, there is no column of promised starts.
    """
    is_promised = any(job.HasField("start_by") for job in jobs)
    promise_columns = (Column[jobs_pb2.Job]("PROMISED START", lambda j: _promised_start(j, now)),)
    return (
        Column("POSITION", listed_position, right=True),
        Column("JOB", lambda j: short_name(j.name)),
        Column("TENANT", lambda j: j.tenant),
        Column("WANTS", wanted_gpus),
        Column("REASON", waiting_reason),
        *(promise_columns if is_promised else ()),
        Column("STARTS IN", lambda j: listed_band(j, "start", now)),
        Column("FINISHES IN", lambda j: listed_band(j, "finish", now)),
        Column("WAITS", lambda j: format_age(j.queue_time, now), right=True),
        Column("MODEL", lambda j: workload_key(j.workload), wide=True),
        Column("PRIORITY", lambda j: str(j.priority), wide=True, right=True),
        Column("WEIGHT", lambda j: format_number(j.weight), wide=True, right=True),
        Column("NEXT STEP", lambda j: j.reason.next_step, wide=True),
    )


def _promised_start(job: jobs_pb2.Job, time: Timestamp) -> str:
    return span_until(job.start_by, time) if job.HasField("start_by") else ""


def wanted_gpus(job: jobs_pb2.Job) -> str:
    """Return the GPUs that a job requests and its bounds, e.g. ``8 x a100 (4-16)``."""
    text = str(job.requested_gpus)
    if job.requested_gpu_type:
        text += f" x {job.requested_gpu_type}"
    if job.pinned_gpu_type:
        text += " only"
    if job.min_gpus or job.max_gpus:
        text += f" ({job.min_gpus or 1}-{job.max_gpus or ''})"
    return text


def waiting_reason(job: jobs_pb2.Job) -> str:
    """Return the code of the reason why a job waits; a new job has none before its first round."""
    if job.state == jobs_pb2.HELD:
        return job.reason.code or "HELD"
    return job.reason.code


def show_top(
    once: Annotated[
        bool, typer.Option("--once", help="Print the picture once, without refreshing it.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="Time between two readings.")
    ] = "5s",
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Show GPU use by type, running and waiting jobs and the next round, until Ctrl-C is pressed.

    Without a terminal, the picture is printed once.
    """
    pause_s = parse_seconds("--every", every)
    if pause_s < MIN_REFRESH_S:
        raise InvalidInput("--every", f"must be at least {MIN_REFRESH_S:g}s")
    console = console_for(fold=True)
    with connect(server) as client:
        read = partial(read_picture, client, cluster_name(cluster))
        if once or not console.is_terminal:
            show_parts(picture_parts(read(), current_timestamp(), None))
            return
        _redraw_picture(console, read, pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPicture:
    """The state of a cluster that ``top`` shows: its nodes, its jobs that have not ended, the next round."""

    cluster: str
    nodes: Sequence[clusters_pb2.Node]
    jobs: Sequence[jobs_pb2.Job]
    next_round: str


def read_picture(client: Client, cluster: str) -> ClusterPicture:
    """Return the picture of ``clusters/{cluster}`` now. Raises CallError."""
    return ClusterPicture(
        cluster=cluster,
        nodes=read_nodes(client, cluster),
        jobs=read_jobs(client, cluster, LIVE),
        next_round=next_round_line(client, cluster),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeUse:
    """The GPUs of a type, by their use.

    ``away`` are free, but on nodes that are drained or silent.
    """

    gpu_type: str
    nodes: int
    gpus: int
    used: int
    free: int
    away: int


def measure_use(nodes: Iterable[clusters_pb2.Node]) -> list[TypeUse]:
    """Return the use of each GPU type, by name."""
    of_type: dict[str, list[clusters_pb2.Node]] = {}
    for node in nodes:
        of_type.setdefault(node.gpu_type, []).append(node)
    uses = []
    for name, group in sorted(of_type.items()):
        ready = [node for node in group if node.state == clusters_pb2.Node.READY]
        gpus, idle = sum(n.gpus for n in group), sum(n.free_gpus for n in group)
        free = sum(n.free_gpus for n in ready)
        uses.append(
            TypeUse(
                gpu_type=name,
                nodes=len(group),
                gpus=gpus,
                used=gpus - idle,
                free=free,
                away=idle - free,
            )
        )
    return uses


USE_COLUMNS: Final[Sequence[Column[TypeUse]]] = (
    Column("GPU TYPE", lambda u: u.gpu_type),
    Column("NODES", lambda u: format_number(u.nodes), right=True),
    Column("GPUS", lambda u: format_number(u.gpus), right=True),
    Column("USED", lambda u: format_number(u.used), right=True),
    Column("FREE", lambda u: format_number(u.free), right=True),
    Column("AWAY", lambda u: format_number(u.away), right=True),
    Column("USED %", lambda u: format_percent(u.used, u.gpus), right=True),
    Column("", lambda u: use_bar(u)),
)


def use_bar(use: TypeUse) -> str:
    """Return a bar of the GPUs of a type: ``#`` for used ones, ``x`` for those away."""
    used = round(BAR_WIDTH * use.used / use.gpus) if use.gpus else 0
    away = round(BAR_WIDTH * use.away / use.gpus) if use.gpus else 0
    away = min(away, BAR_WIDTH - used)
    return f"[{'#' * used}{'.' * (BAR_WIDTH - used - away)}{'x' * away}]"


def picture_parts(
    picture: ClusterPicture, now: Timestamp, width: int | None
) -> list[RenderableType]:
    """Return the parts of a picture. If ``width`` is None, tables are not cut."""
    states = Counter(jobs_pb2.JobState.Name(job.state).lower() for job in picture.jobs)
    running = [job for job in picture.jobs if job.state not in WAITING]
    running.sort(key=lambda job: -job.allocation.cell.gpus)
    waiting = order_queue(job for job in picture.jobs if job.state in WAITING)
    counts = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))

    def table(items: Sequence[jobs_pb2.Job], waits: bool) -> RenderableType:
        columns = queue_columns(items, now) if waits else job_columns(items, now)
        if width is None:
            return make_table(items, columns, wide=False)
        return fit_rows(items, columns, width, wide=False)

    head = f"cluster {short_name(picture.cluster)}   {picture.next_round}".rstrip()
    parts: list[RenderableType] = [Text(head, "bold"), Text("")]
    parts.append(make_table(measure_use(picture.nodes), USE_COLUMNS, wide=True))
    parts += [Text(""), Text(f"{count_noun(len(picture.jobs), 'job')}: {counts or 'none'}")]
    for items, waits, title in ((running, False, "Running"), (waiting, True, "Waiting")):
        if items:
            shown = items[:LARGEST_JOBS]
            which = f"{title}: {len(shown)} of {len(items):,}" if len(shown) < len(items) else title
            parts += [Text(""), Text(which, "bold"), table(shown, waits)]
    return parts


def _redraw_picture(console: Console, read: Callable[[], ClusterPicture], pause_s: float) -> None:
    """Draw the picture in place until Ctrl-C is pressed, which is the way to leave it."""
    shown: ClusterPicture | None = None

    def view() -> RenderableType:
        if shown is None:
            return Text("")
        return Group(*picture_parts(shown, current_timestamp(), console.width))

    try:
        with live_view(console, view) as live:
            while True:
                shown = read()
                live.refresh()
                time.sleep(pause_s)
    except KeyboardInterrupt:
        return
