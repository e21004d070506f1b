"""Commands that decide a round, list and show rounds, and solve a stored round again."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.client import Client, DeadlineExceeded
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.client import CallFailed, Exit, connect, current_timestamp
from tessera.service.cli.jobs.watch import WatchedList, watch_list
from tessera.service.cli.names import cluster_name, full_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    RoundNumber,
    Server,
    WatchList,
)
from tessera.service.cli.render import print_line, print_note, show_list, show_message
from tessera.service.cli.rounds.nextround import next_round_line
from tessera.service.cli.rounds.roundoptions import override_options, with_round_options
from tessera.service.cli.rounds.roundview import round_columns, show_replay, show_round
from tessera.v1 import scheduler_pb2

DEFAULT_TIME_LIMIT: Final = "60s"

TimeLimit = Annotated[
    str,
    typer.Option(
        metavar="DURATION",
        help="Time limit of the whole call, e.g. 90s. The solver may use what loading and checking leave.",
    ),
]
OldDeadline = Annotated[str, typer.Option("--deadline", hidden=True)]
"""The earlier name of ``--time-limit``. It could be mistaken for a job's deadline."""

Everything = Annotated[
    bool, typer.Option("--all", "-a", help="Show decisions that change nothing (keep, wait), too.")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands on rounds."""
    panel = "Rounds"
    group = typer.Typer()
    group.callback(invoke_without_command=True)(schedule)
    group.command("show")(show_stored_round)
    app.add_typer(group, name="round", rich_help_panel=panel)
    app.command("rounds", rich_help_panel=panel)(list_rounds)
    app.command("replay", rich_help_panel=panel)(replay)


@with_round_options
def schedule(
    context: typer.Context,
    named: scheduler_pb2.RoundOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Decide the round without committing it.")
    ] = False,
    time_limit: TimeLimit = DEFAULT_TIME_LIMIT,
    deadline: OldDeadline = "",
    everything: Everything = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Decide a round now and commit it. `round show ROUND` shows an earlier round."""
    if context.invoked_subcommand is not None:
        return
    request = scheduler_pb2.ScheduleRequest(
        parent=cluster_name(cluster), options=named, dry_run=dry_run
    )
    deadline_s = limit_s(time_limit, deadline)
    with connect(server) as client:
        decided = _decide_round(client, request, deadline_s)
    show_decided(decided, output, everything=everything)
    if decided.outcome == "refused":
        raise CallFailed(
            "the round was refused, so the previous decisions remain in force: "
            + "; ".join(decided.violations),
            Exit.REFUSED,
        )


def limit_s(time_limit: str, deadline: str) -> float:
    """Return the time limit of a call in seconds.

    ``deadline`` is the value of the option's earlier name, or "" if it is not given.
    """
    if deadline:
        return options.parse_seconds("--deadline", deadline)
    return options.parse_seconds("--time-limit", time_limit)


def _decide_round(
    client: Client, request: scheduler_pb2.ScheduleRequest, deadline_s: float
) -> scheduler_pb2.Round:
    """Decide a round within the deadline."""
    try:
        return client.call(client.stubs.scheduler.Schedule, request, deadline_s)
    except DeadlineExceeded as error:
        unless = (
            "" if request.dry_run else " unless the commit was under way (see `tessera rounds`)"
        )
        raise CallFailed(
            f"time limit too short: the round was not decided within {deadline_s:g} s, and nothing was"
            f" committed{unless}; allow more time with --time-limit",
            Exit.REFUSED,
        ) from error


def show_stored_round(
    number: RoundNumber,
    everything: Everything = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a round: its decisions, objective, bound and shadow prices."""
    name = full_name(cluster, "rounds", number)
    with connect(server) as client:
        stored = client.call(
            client.stubs.scheduler.GetRound, scheduler_pb2.GetRoundRequest(name=name)
        )
    show_decided(stored, output, everything=everything)


def list_rounds(
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of rounds to list.")
    ] = 20,
    watch: WatchList = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List rounds, newest first."""
    with connect(server) as client:
        read = partial(read_rounds, client, cluster_name(cluster), limit)
        if watch:
            footer = partial(next_round_line, client, cluster_name(cluster))
            watched = WatchedList(
                read=read,
                lines=lambda rounds, now: (rounds, round_columns(now)),
                empty="no rounds yet",
                footer=footer,
            )
            watch_list(watched, output)
            return
        rounds = read()
    response = scheduler_pb2.ListRoundsResponse(rounds=rounds)
    show_list(response, rounds, round_columns(current_timestamp()), output)
    if not rounds:
        print_note("no rounds yet; `tessera round` runs one now")


def read_rounds(client: Client, cluster: str, limit: int) -> list[scheduler_pb2.Round]:
    """Return the last rounds of ``clusters/{cluster}``, newest first. Raises CallError."""
    request = scheduler_pb2.ListRoundsRequest(parent=cluster, page_size=min(limit, 1000))
    rounds = client.pages(client.stubs.scheduler.ListRounds, request, lambda page: page.rounds)
    return list(islice(rounds, limit))


@with_round_options
def replay(
    number: RoundNumber,
    named: scheduler_pb2.RoundOptions,
    save_snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the snapshot that the round was decided on to this file (JSON).",
        ),
    ] = None,
    time_limit: TimeLimit = DEFAULT_TIME_LIMIT,
    deadline: OldDeadline = "",
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Solve a stored round again, as recorded or with other options. Commits nothing.

    As recorded, the decisions must be the same again. If they are not, the exit code is 1.
    """
    name = full_name(cluster, "rounds", number)
    request = scheduler_pb2.ReplayRoundRequest(name=name, with_snapshot=save_snapshot is not None)
    with connect(server) as client:
        before = client.call(
            client.stubs.scheduler.GetRound,
            scheduler_pb2.GetRoundRequest(name=name, summary_only=True),
        )
        changed = bool(named.ListFields())
        if changed:  # options that are not named stay as recorded
            request.options.CopyFrom(before.options)
            override_options(request.options, named)
        replayed = client.call(
            client.stubs.scheduler.ReplayRound, request, limit_s(time_limit, deadline)
        )
    if save_snapshot is not None:
        _save(save_snapshot, replayed.snapshot)
    if output is Output.NAME:
        print_line(name)
    elif not show_message(replayed, output):
        show_replay(before, replayed)
    if not changed and not replayed.same_decisions:
        raise CallFailed(f"solving {name} again did not give the same decisions", Exit.REFUSED)


def show_decided(decided: scheduler_pb2.Round, output: Output, *, everything: bool) -> None:
    """Print a round in the requested format."""
    if output is Output.NAME:
        print_line(decided.name if decided.outcome != "dry_run" else "dry run")
    elif not show_message(decided, output):
        show_round(decided, everything=everything, wide=output is Output.WIDE)


def _save(path: Path, snapshot: bytes) -> None:
    if not snapshot:
        raise CallFailed("the server did not send a snapshot with the replay", Exit.REFUSED)
    try:
        path.write_bytes(snapshot)
    except OSError as error:
        raise InvalidInput("--save-snapshot", f"cannot write {path}: {error.strerror}") from error
    print_note(f"snapshot written to {path} ({len(snapshot):,} bytes)")
