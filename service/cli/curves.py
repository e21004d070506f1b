"""The command that shows how a job's speed depends on resources."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tessera.formulation import limits
from tessera.formulation.errors import InvalidInput
from tessera.formulation.release import install_hint
from tessera.service.cli.client import CallFailed, Exit, connect
from tessera.service.cli.curveview import CurveOf, curve_parts
from tessera.service.cli.names import full_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    JobName,
    Server,
)
from tessera.service.cli.render import as_json, print_line, print_note, show_parts
from tessera.v1 import jobs_pb2

SUFFIXES: Final = (".svg", ".png")
"""The kinds of picture files."""

_PICTURE: Final = "tessera.service.cli.curvepicture"
"""The module that draws. Only servers have its libraries, so it is imported when it is needed."""


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
    picture: Annotated[
        str, typer.Option(metavar="FILE", help="Also draw the curves into this file, .svg or .png.")
    ] = "",
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
    draw = _drawer(picture) if picture else None
    with connect(server) as client:
        request = jobs_pb2.GetJobCurvesRequest(
            name=full_name(cluster, "jobs", name), gpus=gpus or 0
        )
        curves = client.call(client.stubs.jobs.GetJobCurves, request)
    if json:
        print_line(as_json(curves))
    else:
        show_parts(curve_parts(curves, of))
    if draw is not None:
        draw(Path(picture), curves, of)
        print_note(f"drawn into {picture}")


def _drawer(picture: str) -> Any:
    """Return the function that draws a picture, after a check of the file's name."""
    if Path(picture).suffix.lower() not in SUFFIXES:
        raise InvalidInput("--picture", f"must end with {' or '.join(SUFFIXES)}")
    try:
        return importlib.import_module(_PICTURE).draw_curves
    except ModuleNotFoundError as error:
        raise CallFailed(
            f"`--picture` needs {error.name}; install it with: {install_hint('server')}",
            Exit.REFUSED,
        ) from error
