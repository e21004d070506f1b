"""``tessera nodes``: list nodes, and delete those that are permanently gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Final

import typer

from tessera.client import Client
from tessera.formulation.base.resources import HOST_RESOURCES
from tessera.formulation.base.selectors import Selector
from tessera.formulation.job.runtimes import PROFILER, REPLAY
from tessera.service.cli.client import connect
from tessera.service.cli.clusters.hostview import show_capacity
from tessera.service.cli.completion import complete_nodes
from tessera.service.cli.deletion import (
    AllowMissing,
    Yes,
    confirm_deletion,
    outcome_of,
    show_deleted,
)
from tessera.service.cli.jobs.watch import WatchedList, watch_list
from tessera.service.cli.names import cluster_name, full_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
    WatchList,
    refuse_options,
)
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_time,
    print_note,
    show_list,
)
from tessera.service.cli.rounds.nextround import next_round_line
from tessera.v1 import clusters_pb2

NodeNames = Annotated[
    list[str],
    typer.Argument(
        metavar="NODE...", help="Ids or full names of the nodes.", autocompletion=complete_nodes
    ),
]

NOT_FOR_PROGRAMS: Final = (REPLAY, PROFILER)
"""Runtimes that each agent offers, and that run no program of a user."""

SILENCE_FIELDS: Final = ("silent_s",)
"""The field that changes while nothing happens to a node."""

NODE_COLUMNS: Final[Sequence[Column[clusters_pb2.Node]]] = (
    Column("NODE", lambda n: short_name(n.name)),
    Column("STATE", lambda n: _state(n)),
    Column("TYPE", lambda n: n.gpu_type),
    Column("GPUS", lambda n: str(n.gpus), right=True),
    Column("FREE", lambda n: str(n.free_gpus), right=True),
    *(
        Column[clusters_pb2.Node](r.row.upper(), show_capacity(r), right=True)
        for r in HOST_RESOURCES
    ),
    Column("RACK", lambda n: n.rack),
    Column("RUNTIMES", lambda n: _runtimes(n)),
    Column(
        "LABELS",
        lambda n: ", ".join(f"{k}={v}" for k, v in sorted(labels_of(n).items())),
        wide=True,
    ),
    Column("JOBS", lambda n: ", ".join(short_name(j) for j in n.jobs)),
    Column("MISSING RUNTIMES", lambda n: _runtimes(n, is_missing=True), wide=True),
    Column("TOOLS", lambda n: ", ".join(n.tools), wide=True),
    Column("LAST REPORT", lambda n: _last_report(n.silent_s), wide=True, right=True),
    Column("DRAINED BY", lambda n: n.drained_by, wide=True),
    Column("SINCE", lambda n: format_time(n.drain_time), wide=True),
    Column("REASON", lambda n: n.drain_reason, wide=True),
    Column("FAULTS", lambda n: "; ".join(n.faults), wide=True),
    Column("PROBATION UNTIL", lambda n: format_time(n.probation_end_time), wide=True),
    Column("NETWORK", lambda n: "; ".join(n.network_remarks), wide=True),
)


def add_commands(app: typer.Typer) -> None:
    """Add ``nodes``."""
    group = typer.Typer(
        help="List nodes with their state, free GPUs and jobs, or delete nodes.",
        invoke_without_command=True,
    )
    group.callback()(list_nodes)
    group.command("delete")(delete_nodes)
    app.add_typer(group, name="nodes", rich_help_panel="Clusters")


def list_nodes(
    context: typer.Context,
    watch: WatchList = False,
    selector: Annotated[
        str,
        typer.Option(
            metavar="LABELS",
            help="Only the nodes with these labels, e.g. 'zone=a, disk in (ssd, nvme), owner!=lab'.",
        ),
    ] = "",
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List nodes with their state, free GPUs and jobs, or delete nodes."""
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    wanted = Selector.read("--selector", selector)
    with connect(server) as client:

        def read() -> list[clusters_pb2.Node]:
            nodes = read_nodes(client, cluster_name(cluster))
            return [node for node in nodes if wanted.matches(labels_of(node))]

        if watch:
            footer = partial(next_round_line, client, cluster_name(cluster))
            watch_list(_watched(read, footer), output)
            return
        nodes = read()
    show_nodes(nodes, output)
    if not nodes and selector:
        print_note(f"no node has the labels {wanted}; `tessera nodes --output wide` lists labels")
    elif not nodes:
        print_note(
            f"cluster {short_name(cluster_name(cluster))} has no nodes; add them with"
            " `tessera cluster apply -f FILE`"
        )


def delete_nodes(
    names: NodeNames,
    allow_missing: AllowMissing = False,
    yes: Yes = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete nodes (all or none). Drain them first: no job may use them.

    Past rounds remain readable. A running agent does not register a deleted node again until it restarts.
    """
    nodes = [full_name(cluster, "nodes", name) for name in names]
    request = clusters_pb2.DeleteNodesRequest(
        parent=cluster_name(cluster),
        names=nodes,
        allow_missing=allow_missing,
        validate_only=validate_only,
    )
    what = count_noun(len(nodes), "node")
    if not validate_only:
        confirm_deletion(f"Delete {what} of cluster {short_name(cluster_name(cluster))}?", yes=yes)
    with connect(server) as client:
        client.call(client.stubs.clusters.DeleteNodes, request)
    show_deleted(nodes, output)
    print_note(outcome_of(what, validate_only=validate_only))


def read_nodes(client: Client, cluster: str) -> list[clusters_pb2.Node]:
    """Return the nodes of ``clusters/{cluster}``. Raises CallError."""
    request = clusters_pb2.ListNodesRequest(parent=cluster)
    return list(client.pages(client.stubs.clusters.ListNodes, request, lambda page: page.nodes))


def _watched(
    read: Callable[[], list[clusters_pb2.Node]], footer: Callable[[], str]
) -> WatchedList[clusters_pb2.Node]:
    return WatchedList(
        read=read,
        lines=lambda nodes, now: (nodes, NODE_COLUMNS),
        empty="no nodes",
        steady=SILENCE_FIELDS,
        moving=SILENCE_FIELDS,
        footer=footer,
    )


def show_nodes(nodes: Sequence[clusters_pb2.Node], output: Output) -> None:
    """Print nodes."""
    show_list(clusters_pb2.ListNodesResponse(nodes=nodes), nodes, NODE_COLUMNS, output)


def _state(node: clusters_pb2.Node) -> str:
    """Return a node's state as it is shown: DRAINED without jobs, PROBATION if it will return soon."""
    if node.HasField("probation_end_time"):
        return "PROBATION"
    return "DRAINED" if node.drained else clusters_pb2.Node.State.Name(node.state)


def labels_of(node: clusters_pb2.Node) -> dict[str, str]:
    """Return the labels by which jobs select the node: its agent's, and over them those stated."""
    return {**node.agent_labels, **node.labels}


def _runtimes(node: clusters_pb2.Node, *, is_missing: bool = False) -> str:
    """Return the runtimes for programs that the node offers, with versions, or those that it lacks."""
    return "; ".join(
        f"{offer.runtime} ({detail})" if detail else offer.runtime
        for offer in node.runtimes
        if offer.runtime not in NOT_FOR_PROGRAMS and bool(offer.problem) is is_missing
        for detail in (offer.problem or offer.version,)
    )


def _last_report(silent_s: float) -> str:
    return "never" if silent_s < 0 else f"{silent_s:.0f}s ago"
