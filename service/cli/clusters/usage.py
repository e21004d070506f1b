"""The command that shows what tenants have used."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.names import cluster_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    parse_past,
)
from tessera.service.cli.render import (
    Column,
    format_number,
    format_span,
    format_time,
    print_line,
    print_note,
    show_items,
)
from tessera.v1 import tenants_pb2

_Row = tenants_pb2.UsageRow

FIGURES: Final[Sequence[Column[_Row]]] = (
    Column("GPU-HOURS", lambda r: format_number(r.gpu_hours), right=True),
    Column("EFFECTIVE", lambda r: format_number(r.effective_gpu_hours), right=True),
    Column("LOST", lambda r: format_number(r.lost_gpu_hours), right=True),
    Column("CPU-HOURS", lambda r: format_number(r.cpu_hours), right=True, wide=True),
    Column("SHARE", lambda r: _percent(r), right=True),
    Column("QUOTA", lambda r: _quota(r), right=True),
    Column("JOBS", lambda r: str(r.jobs_ended), right=True),
    Column("FINISHED", lambda r: str(r.jobs_finished), right=True, wide=True),
    Column("MEAN WAIT", lambda r: _waiting(r), right=True),
    Column("PREEMPTIONS", lambda r: str(r.preemptions), right=True),
)


def add_commands(app: typer.Typer) -> None:
    """Add the command."""
    app.command("usage", rich_help_panel="Clusters")(show_usage)


def show_usage(
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="Count this tenant only. Repeatable.")
    ] = None,
    since: Annotated[
        str,
        typer.Option(help="Count from this time on: an age, e.g. 7d, or a time (RFC 3339)."),
    ] = "7d",
    until: Annotated[
        str, typer.Option(help="Count until this time: an age or a time. Default: now.")
    ] = "",
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP",
            help="Group by tenant, type, user, day or label:KEY. Repeatable. Default: tenant.",
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print all figures as CSV, with a header.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what the jobs of tenants have used: GPU-hours, effective GPU-hours, waits and losses.

    Effective GPU-hours count each allocation by its speed, compared with the job's best Cell. The share
    is that of the GPUs that the cluster has at present. Lost hours are those before programs trained.
    """
    if as_csv and output is not Output.TABLE:
        raise InvalidInput("--csv", "contradicts --output; omit one of the two")
    groups, now = by or ["tenant"], current_timestamp()
    request = tenants_pb2.GetUsageRequest(
        parent=cluster_name(cluster),
        tenants=tenant or (),
        start_time=parse_past("--since", since, now),
        end_time=parse_past("--until", until, now) if until else None,
        group_by=groups,
    )
    with connect(server) as client:
        used = client.call(client.stubs.tenants.GetUsage, request)
    if as_csv:
        print_line(_csv_of(groups, used.rows))
        return
    columns = [_group_column(group) for group in groups]
    show_items(used, used.rows, [*columns, *FIGURES], output)
    print_note(f"from {format_time(used.start_time)} to {format_time(used.end_time)}")


def _group_column(group: str) -> Column[_Row]:
    return Column(group.upper(), lambda row: row.group[group] or "(none)")


def _csv_of(groups: Sequence[str], rows: Sequence[_Row]) -> str:
    """Return rows as CSV. Figures that are unset are empty."""
    figures = [known for known in _Row.DESCRIPTOR.fields if known.name != "group"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*groups, *(known.name for known in figures)])
    for row in rows:
        present = {known.name: value for known, value in row.ListFields()}
        values = [
            present.get(known.name, "" if known.has_presence else getattr(row, known.name))
            for known in figures
        ]
        writer.writerow([*(row.group[group] for group in groups), *values])
    return text.getvalue().rstrip("\n")


def _percent(row: _Row) -> str:
    return f"{row.capacity_share:.1%}" if row.HasField("capacity_share") else ""


def _quota(row: _Row) -> str:
    """Return the part of the quota that was used."""
    if not row.HasField("quota_gpu_hours"):
        return ""
    if row.quota_gpu_hours <= 0:
        return "0"
    return f"{row.gpu_hours / row.quota_gpu_hours:.0%} of {format_number(row.quota_gpu_hours)}"


def _waiting(row: _Row) -> str:
    return format_span(row.mean_waiting_seconds) if row.HasField("mean_waiting_seconds") else ""
