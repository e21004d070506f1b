"""``tessera cells``: list or delete the Cells for which a cluster has estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import HOST_RESOURCES
from tessera.service.cli.client import connect
from tessera.service.cli.clusters.hostview import show_needs
from tessera.service.cli.deletion import Yes, confirm_deletion
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
    refuse_options,
)
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_number,
    print_line,
    print_note,
    show_message,
    show_table,
)
from tessera.v1.estimates_pb2 import (
    CellEstimate,
    DeleteCellsRequest,
    DeleteCellsResponse,
    EstimateSource,
    ListCellsRequest,
    ListCellsResponse,
    Workload,
)

CELL_COLUMNS: Final[Sequence[Column[CellEstimate]]] = (
    Column("MODEL", lambda c: _model(c.workload)),
    Column("BATCH", lambda c: str(c.workload.global_batch), right=True),
    Column("TYPE", lambda c: c.cell.gpu_type),
    Column("GPUS", lambda c: str(c.cell.gpus), right=True),
    Column("NODES", lambda c: str(c.nodes), right=True),
    Column("STAGES", lambda c: str(c.cell.pipeline_degree or ""), right=True),
    Column(
        "S/ITERATION",
        lambda c: "infeasible" if c.infeasible else format_number(c.iter_time_s),
        right=True,
    ),
    Column("SOURCE", lambda c: EstimateSource.Name(c.source)),
    *(
        Column[CellEstimate](r.row.upper(), show_needs(r), wide=True, right=True)
        for r in HOST_RESOURCES
    ),
    Column("PLAN", lambda c: c.cell.plan, wide=True),
    Column("FROM", lambda c: c.provenance, wide=True),
)

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME[/PARAMS]",
        help="List or delete only this model's Cells. Needs --batch.",
        show_default=False,
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        min=0,
        max=limits.MAX_BATCH,
        help="Global batch of the workload that --model names.",
        show_default=False,
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add ``cells``."""
    group = typer.Typer(
        help="List or delete the Cells for which a cluster has estimates.",
        invoke_without_command=True,
    )
    group.callback()(list_cells)
    group.command("delete")(delete_cells)
    app.add_typer(group, name="cells", rich_help_panel="Estimates")


def list_cells(
    context: typer.Context,
    model: Model = "",
    batch: Batch = 0,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List or delete the Cells for which a cluster has estimates.

    A Cell is a workload on a number of GPUs of one type with a number of pipeline stages.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    request = ListCellsRequest(
        parent=cluster_name(cluster), workload=_workload(model, batch), page_size=10_000
    )
    with connect(server) as client:
        cells = list(
            client.pages(client.stubs.estimates.ListCells, request, lambda page: page.cells)
        )
    if show_message(ListCellsResponse(cells=cells), output):
        return
    if output is Output.NAME:
        for cell in cells:
            print_line(f"{_model(cell.workload)}@{cell.workload.global_batch}")
    elif cells:
        show_table(cells, [c for c in CELL_COLUMNS if output is Output.WIDE or not c.wide])
    else:
        print_note(
            "no Cells match; `tessera import profiles` and `tessera import samples` add some"
        )


def delete_cells(
    model: Model = "",
    batch: Batch = 0,
    gpu_type: Annotated[
        str, typer.Option(help="Delete only Cells on this GPU type.", show_default=False)
    ] = "",
    gpus: Annotated[
        int,
        typer.Option(
            min=0,
            max=limits.MAX_GPUS,
            help="Delete only Cells with this number of GPUs.",
            show_default=False,
        ),
    ] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all Cells of the cluster.")
    ] = False,
    yes: Yes = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete the Cells that match all options. No job may run on one of them.

    Measurements and profiles are kept, and the server estimates the workloads of live jobs again.
    """
    if everything == bool(model or gpu_type or gpus):
        raise InvalidInput(
            "--model, --gpu-type, --gpus, --all",
            "give some of these to choose Cells, or --all alone",
        )
    request = DeleteCellsRequest(
        parent=cluster_name(cluster),
        workload=_workload(model, batch),
        gpu_type=gpu_type,
        gpus=gpus,
        all=everything,
        validate_only=True,
    )
    with connect(server) as client:
        count = client.call(client.stubs.estimates.DeleteCells, request).deleted
        if count and not validate_only:
            where = f"of cluster {short_name(cluster_name(cluster))}"
            confirm_deletion(
                f"Delete the estimates of {count_noun(count, 'Cell')} {where}?", yes=yes
            )
            request.validate_only = False
            count = client.call(client.stubs.estimates.DeleteCells, request).deleted
    show_message(DeleteCellsResponse(deleted=count), output)
    what = count_noun(count, "Cell")
    print_note(f"{what} would be deleted; nothing changed" if validate_only else f"{what} deleted")


def _workload(model: str, batch: int) -> Workload | None:
    """Return the workload that the options name, or None if they name none. Raises InvalidInput."""
    if bool(model) != bool(batch):
        raise InvalidInput("--model, --batch", "name a workload together, so give both")
    name, slash, params = model.partition("/")
    if model and (not name or "/" in params or (slash and not params)):
        raise InvalidInput("--model", "must be NAME or NAME/PARAMS, e.g. bert/1.3B")
    return Workload(model=name, params=params, global_batch=batch) if model else None


def _model(workload: Workload) -> str:
    return f"{workload.model}/{workload.params}" if workload.params else workload.model
