"""``tessera reserve``: reservations of GPUs or nodes for some jobs, and maintenance windows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Annotated, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.base.errors import InvalidInput
from tessera.service import durations
from tessera.service.cli import options
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.deletion import AllowMissing
from tessera.service.cli.names import cluster_name, full_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
)
from tessera.service.cli.render import Column, print_note, show_list
from tessera.v1 import reservations_pb2 as pb

_CLOCK_TIMES: Final = ("%H:%M", "%H:%M:%S")
"""The forms of a time without a date."""

TimeZone = Annotated[
    str,
    typer.Option(
        "--time-zone",
        metavar="ZONE",
        help="Time zone of times without one, and of the answer, e.g. Europe/Berlin. Default: yours.",
        show_default=False,
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands on reservations."""
    group = typer.Typer(
        help="Reserve GPUs or nodes for a time, or plan maintenance.", no_args_is_help=True
    )
    group.command("create")(create_reservation)
    group.command("list")(list_reservations)
    group.command("update")(update_reservation)
    group.command("delete")(delete_reservations)
    app.add_typer(group, name="reserve", rich_help_panel="Clusters")


def create_reservation(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of the new reservation.")],
    gpus: Annotated[
        int, typer.Option(min=0, help="Number of GPUs of --gpu-type.", show_default=False)
    ] = 0,
    gpu_type: Annotated[str, typer.Option(help="GPU type of the GPUs.", show_default=False)] = "",
    nodes: Annotated[
        str, typer.Option(help="Nodes in place of GPUs, e.g. n1,n2.", show_default=False)
    ] = "",
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            help="Start: a time, e.g. '2026-12-01 09:00' or 22:00, or a duration from now. Default: now.",
            show_default=False,
        ),
    ] = "",
    end: Annotated[
        str,
        typer.Option(
            "--to",
            help="End: a time, e.g. '2026-12-01 17:00', or 17:00 for the next 17:00 after the start.",
            show_default=False,
        ),
    ] = "",
    length: Annotated[
        str,
        typer.Option("--for", help="Length in place of --to, e.g. 3h.", show_default=False),
    ] = "",
    tenant: Annotated[
        str, typer.Option(help="Serve the jobs of this tenant.", show_default=False)
    ] = "",
    label: Annotated[
        str, typer.Option(help="Serve the jobs with this label, e.g. team=nlp.", show_default=False)
    ] = "",
    maintenance: Annotated[
        bool, typer.Option("--maintenance", help="Serve no job: the nodes are under maintenance.")
    ] = False,
    reason: Annotated[
        str,
        typer.Option(
            help="Reason, which `tessera reserve list -o wide` shows.", show_default=False
        ),
    ] = "",
    time_zone: TimeZone = "",
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Reserve GPUs or nodes for a time.

    During the window they serve only the jobs of --tenant or with --label, and under maintenance no
    job. Others use them until it begins, and are then moved or suspended.
    """
    zone = find_time_zone(time_zone)
    now = current_timestamp().ToDatetime(UTC)
    start = parse_moment("--from", begin, now, zone) if begin else now
    key, equals, value = label.partition("=")
    if label and not (key and equals):
        raise InvalidInput("--label", f"{label!r} must be KEY=VALUE, e.g. team=nlp")
    message = pb.Reservation(
        name=full_name(cluster, "reservations", name),
        end_time=options.to_timestamp("--to", _end_of(start, end, length, zone)),
        gpu_type=gpu_type,
        gpus=gpus,
        nodes=map(short_name, options.split_words(nodes)),
        tenant=tenant,
        label_key=key,
        label_value=value,
        maintenance=maintenance,
        reason=reason,
    )
    if begin:
        message.start_time.CopyFrom(options.to_timestamp("--from", start))
    request = pb.CreateReservationRequest(
        parent=cluster_name(cluster),
        reservation=message,
        validate_only=validate_only,
    )
    with connect(server) as client:
        created = client.call(client.stubs.clusters.CreateReservation, request)
    _show([created], output, zone)
    if validate_only:
        print_note("valid; nothing changed")


def list_reservations(
    time_zone: TimeZone = "",
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List reservations by start. Those that have ended stay for 30 days."""
    zone = find_time_zone(time_zone)
    with connect(server) as client:
        request = pb.ListReservationsRequest(parent=cluster_name(cluster))
        found = list(
            client.pages(
                client.stubs.clusters.ListReservations, request, lambda page: page.reservations
            )
        )
    _show(sorted(found, key=lambda r: (r.start_time.ToNanoseconds(), r.name)), output, zone)
    if not found:
        print_note("nothing is reserved; `tessera reserve create` reserves GPUs or nodes")


def update_reservation(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of the reservation.")],
    begin: Annotated[
        str, typer.Option("--from", help="New start, as for create.", show_default=False)
    ] = "",
    end: Annotated[
        str, typer.Option("--to", help="New end, as for create.", show_default=False)
    ] = "",
    time_zone: TimeZone = "",
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change the times of a reservation."""
    if not (begin or end):
        raise InvalidInput("--from", "state a new start, a new end, or both")
    zone, now = find_time_zone(time_zone), current_timestamp().ToDatetime(UTC)
    request = pb.UpdateReservationRequest(
        name=full_name(cluster, "reservations", name),
        validate_only=validate_only,
    )
    start = parse_moment("--from", begin, now, zone) if begin else now
    if begin:
        request.start_time.CopyFrom(options.to_timestamp("--from", start))
    if end:
        request.end_time.CopyFrom(
            options.to_timestamp("--to", parse_moment("--to", end, start, zone))
        )
    with connect(server) as client:
        changed = client.call(client.stubs.clusters.UpdateReservation, request)
    _show([changed], output, zone)
    if validate_only:
        print_note("valid; nothing changed")


def delete_reservations(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Ids or full names of reservations.")
    ],
    allow_missing: AllowMissing = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Delete reservations. Their GPUs serve all jobs from the next round on."""
    request = pb.DeleteReservationsRequest(
        parent=cluster_name(cluster),
        names=[full_name(cluster, "reservations", name) for name in names],
        allow_missing=allow_missing,
        validate_only=validate_only,
    )
    with connect(server) as client:
        client.call(client.stubs.clusters.DeleteReservations, request)
    deleted = ", ".join(map(short_name, names))
    print_note("valid; nothing changed" if validate_only else f"deleted: {deleted}")


def find_time_zone(name: str) -> tzinfo | None:
    """Return a time zone by name, or None for that of this machine. Raises InvalidInput."""
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise InvalidInput(
            "--time-zone", f"{name!r} is not known; write e.g. Europe/Berlin"
        ) from None


def parse_moment(where: str, text: str, after: datetime, zone: tzinfo | None) -> datetime:
    """Return a point in time.

    ``text`` is a time with a date, a duration from ``after`` such as ``2h``, or a time without a
    date, which means the next one after ``after``. Without an offset, it is in ``zone``, or in that
    of this machine if that is None.

    Raises:
        InvalidInput: another text.
    """
    if durations.is_duration(text):
        return _later(where, after, text)
    for form in _CLOCK_TIMES:
        try:
            clock = datetime.strptime(text.strip(), form).time()  # noqa: DTZ007 - it has no date
        except ValueError:
            continue
        day = after.astimezone(zone).date()
        moments = (_in_zone(datetime.combine(day + timedelta(days=d), clock), zone) for d in (0, 1))
        return next(moment for moment in moments if moment > after)
    try:
        return _in_zone(datetime.fromisoformat(text.strip()), zone)
    except ValueError:
        raise InvalidInput(
            where, f"{text!r} is not a time; write e.g. '2026-12-01 09:00', 17:00 or 2h"
        ) from None


def _later(where: str, moment: datetime, length: str) -> datetime:
    """Return the time ``length`` after ``moment``. Raises InvalidInput."""
    try:
        return moment + timedelta(seconds=options.parse_seconds(where, length))
    except OverflowError:
        raise InvalidInput(where, f"{length!r} ends after the year 9999") from None


def _in_zone(moment: datetime, zone: tzinfo | None) -> datetime:
    """Return ``moment`` with a time zone. One that has none is in ``zone``, or this machine's."""
    if moment.tzinfo is not None:
        return moment
    return moment.astimezone() if zone is None else moment.replace(tzinfo=zone)


def _end_of(start: datetime, end: str, length: str, zone: tzinfo | None) -> datetime:
    if bool(end) == bool(length):
        raise InvalidInput("--to", "state the end with --to, or the length with --for")
    if length:
        return _later("--for", start, length)
    return parse_moment("--to", end, start, zone)


def _show(reservations: Sequence[pb.Reservation], output: Output, zone: tzinfo | None) -> None:
    """Print reservations, with times in ``zone``, or in that of this machine if it is None."""
    columns: Sequence[Column[pb.Reservation]] = (
        Column("RESERVATION", lambda r: short_name(r.name)),
        Column("STATE", lambda r: pb.Reservation.State.Name(r.state)),
        Column("FROM", lambda r: format_moment(r.start_time, zone)),
        Column("TO", lambda r: format_moment(r.end_time, zone)),
        Column("WHAT", _what),
        Column("FOR", _serves),
        Column("REASON", lambda r: r.reason, wide=True),
    )
    show_list(pb.ListReservationsResponse(reservations=reservations), reservations, columns, output)


def format_moment(moment: Timestamp, zone: tzinfo | None) -> str:
    """Return a time to the minute with its offset, in ``zone``, or in this machine's if it is None."""
    return moment.ToDatetime(UTC).astimezone(zone).strftime("%Y-%m-%d %H:%M %z")


def _what(reservation: pb.Reservation) -> str:
    if reservation.nodes:
        return ",".join(reservation.nodes)
    return f"{reservation.gpus} x {reservation.gpu_type}"


def _serves(reservation: pb.Reservation) -> str:
    if reservation.maintenance:
        return "maintenance"
    if reservation.tenant:
        return f"tenant {reservation.tenant}"
    label = f"{reservation.label_key}={reservation.label_value}"
    return f"label {label}" if reservation.label_key else "others"
