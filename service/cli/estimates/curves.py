"""The command that shows how a job's speed depends on resources."""

from __future__ import annotations

from typing import Annotated

import typer

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.client import connect
from tessera.service.cli.estimates.curveview import CurveOf, curve_parts
from tessera.service.cli.names import full_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    JobName,
    Server,
)
from tessera.service.cli.render import as_json, print_line, show_parts
from tessera.v1 import jobs_pb2


def add_commands(app: typer.Typer) -> None:
    """Add the command on curves."""
    app.command("curve", rich_help_panel="Jobs")(show_curve)


def show_curve(
    name: JobName,
    of: Annotated[
        CurveOf | None,
        typer.Option("--of", help="Show only the curve of this resource.", show_choices=True),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.MAX_GPUS,
            help="Number of GPUs for the curves of CPU cores, host memory and bandwidth. Default: as many"
            " as the job holds or else requests.",
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object with all curves instead of tables."),
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Show how fast a job would be with other resources, each time by its best execution plan."""
    if json and of is not None:
        raise InvalidInput("--of", "chooses a table, but --json prints all curves; leave one out")
    with connect(server) as client:
        request = jobs_pb2.GetJobCurvesRequest(
            name=full_name(cluster, "jobs", name), gpus=gpus or 0
        )
        curves = client.call(client.stubs.jobs.GetJobCurves, request)
    if json:
        print_line(as_json(curves))
    else:
        show_parts(curve_parts(curves, of))
