"""Commands on clusters and their GPU types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tessera.client import Client, NotFound
from tessera.service.cli import yamlfile
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.deletion import (
    AllowMissing,
    Yes,
    confirm_deletion,
    outcome_of,
    show_deleted,
)
from tessera.service.cli.names import cluster_name, full_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    FileCluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
)
from tessera.service.cli.render import (
    GIB,
    Column,
    count_noun,
    format_age,
    format_number,
    print_line,
    print_note,
    show_facts,
    show_list,
    show_message,
    show_table,
)
from tessera.v1 import clusters_pb2

if TYPE_CHECKING:
    from tessera.service.cli.clusters.clusterfile import ClusterFile

CLUSTER_COLUMNS: Final[Sequence[Column[clusters_pb2.Cluster]]] = (
    Column("CLUSTER", lambda c: short_name(c.name)),
    Column("GPU TYPES", lambda c: ", ".join(t.name for t in c.gpu_types)),
    Column("NODES", lambda c: format_number(c.nodes), right=True),
    Column("GPUS", lambda c: format_number(c.gpus), right=True),
    Column("LAST ROUND", lambda c: short_name(c.last_round), right=True),
)

TYPE_COLUMNS: Final[Sequence[Column[clusters_pb2.GpuType]]] = (
    Column("TYPE", lambda t: t.name),
    Column("MEMORY", lambda t: f"{format_number(t.memory_bytes / GIB)} GiB", right=True),
    Column(
        "$/HOUR",
        lambda t: format_number(t.dollars_per_hour) if t.dollars_per_hour else "",
        right=True,
    ),
    Column("WATTS", lambda t: format_number(t.watts) if t.watts else "", right=True),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands on clusters."""
    panel = "Clusters"
    group = typer.Typer(help="Describe, show, list or delete clusters.", no_args_is_help=True)
    group.command("apply")(apply_cluster_file)
    group.command("get")(show_cluster)
    group.command("list")(list_clusters)
    group.command("delete")(delete_cluster)
    types = typer.Typer(help="List or delete the GPU types of a cluster.", no_args_is_help=True)
    types.command("list")(list_types)
    types.command("delete")(delete_types)
    group.add_typer(types, name="types")
    app.add_typer(group, name="cluster", rich_help_panel=panel)


def apply_cluster_file(
    file: Annotated[
        str,
        typer.Option("--file", "-f", help="YAML file that describes the cluster; '-' for stdin."),
    ],
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: FileCluster = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Create or change a cluster: its GPU types, nodes and tenants (all or none)."""
    from tessera.service.cli.clusters import clusterfile  # noqa: PLC0415 - pydantic starts slowly

    described = clusterfile.read_cluster(yamlfile.read_text(file), file)
    name = cluster_name(cluster or described.name or DEFAULT_CLUSTER)
    with connect(server) as client:
        applied = apply_cluster(client, name, described, validate_only=validate_only)
    show_list(
        clusters_pb2.ListClustersResponse(clusters=[applied]), [applied], CLUSTER_COLUMNS, output
    )
    what = f"{len(described.gpu_types)} GPU types, {len(described.nodes):,} nodes"
    what += f", {len(described.tenants):,} tenants" if described.tenants else ""
    print_note(f"{what}: valid, nothing changed" if validate_only else f"{what} applied")


def show_cluster(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER", help="The cluster's id or full name. Default: --cluster."
        ),
    ] = "",
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a cluster."""
    with connect(server) as client:
        stored = _get(client, cluster_name(name or cluster))
    if output is Output.NAME:
        print_line(stored.name)
    elif not show_message(stored, output):
        gpu_types = ", ".join(f"{t.name} ({_gpu_type(t)})" for t in stored.gpu_types)
        show_facts(
            (
                ("cluster", stored.name),
                ("GPU types", gpu_types),
                ("nodes", format_number(stored.nodes)),
                ("GPUs", format_number(stored.gpus)),
                ("last round", short_name(stored.last_round)),
                ("created", f"{format_age(stored.create_time, current_timestamp())} ago"),
            )
        )


def list_clusters(server: Server = DEFAULT_SERVER, output: OutputOption = Output.TABLE) -> None:
    """List clusters by name."""
    with connect(server) as client:
        request = clusters_pb2.ListClustersRequest()
        clusters = list(
            client.pages(client.stubs.clusters.ListClusters, request, lambda page: page.clusters)
        )
    show_list(
        clusters_pb2.ListClustersResponse(clusters=clusters), clusters, CLUSTER_COLUMNS, output
    )
    if not clusters:
        print_note("no clusters yet; `tessera cluster apply -f cluster.yaml` creates one")


def delete_cluster(
    name: Annotated[str, typer.Argument(metavar="CLUSTER", help="The cluster's id or full name.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete the cluster even if agents are connected, but never with live jobs.",
        ),
    ] = False,
    etag: Annotated[
        str,
        typer.Option(
            help="Delete only if `cluster get` still shows this etag.", show_default=False
        ),
    ] = "",
    allow_missing: AllowMissing = False,
    yes: Yes = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a cluster with its nodes, Cells, models, tenants, ended jobs and rounds.

    The server refuses this while the cluster has live jobs. Files of jobs, such as checkpoints, are kept.
    """
    full = cluster_name(name)
    request = clusters_pb2.DeleteClusterRequest(
        name=full,
        etag=etag,
        force=force,
        allow_missing=allow_missing,
        validate_only=validate_only,
    )
    with connect(server) as client:
        if not validate_only:
            confirm_deletion(_question(client, full, allow_missing=allow_missing), yes=yes)
        client.call(client.stubs.clusters.DeleteCluster, request)
    show_deleted([full], output)
    print_note(f"{full} {'can be deleted; nothing changed' if validate_only else 'deleted'}")


def _question(client: Client, name: str, *, allow_missing: bool) -> str:
    """Return the question before a deletion, with the cluster's contents. Raises CallError."""
    try:
        stored = _get(client, name)
    except NotFound:
        if not allow_missing:
            raise
        return f"Delete cluster {short_name(name)}, which does not exist?"
    rounds = int(short_name(stored.last_round) or 0)
    counts = (stored.nodes, "node"), (stored.gpus, "GPU"), (rounds, "round")
    contents = ", ".join(count_noun(count, noun) for count, noun in counts)
    return (
        f"Delete cluster {short_name(name)} ({contents}) with all its Cells, models, tenants and"
        " ended jobs?"
    )


def list_types(
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the GPU types of a cluster."""
    with connect(server) as client:
        stored = _get(client, cluster_name(cluster))
    _show_types(stored, output)


def delete_types(
    names: Annotated[list[str], typer.Argument(metavar="TYPE...", help="Names of the GPU types.")],
    etag: Annotated[
        str,
        typer.Option(
            help="Delete only if `cluster get` still shows this etag.", show_default=False
        ),
    ] = "",
    allow_missing: AllowMissing = False,
    yes: Yes = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete GPU types (all or none). No node, Cell, quota or live job may use them."""
    request = clusters_pb2.DeleteGpuTypesRequest(
        parent=cluster_name(cluster),
        gpu_types=names,
        etag=etag,
        allow_missing=allow_missing,
        validate_only=validate_only,
    )
    what = count_noun(len(names), "GPU type")
    if not validate_only:
        where = f"of cluster {short_name(cluster_name(cluster))}"
        confirm_deletion(f"Delete {', '.join(names)} {where} and all measurements on it?", yes=yes)
    with connect(server) as client:
        changed = client.call(client.stubs.clusters.DeleteGpuTypes, request)
    _show_types(changed, output)
    print_note(outcome_of(what, validate_only=validate_only))


def _show_types(cluster: clusters_pb2.Cluster, output: Output) -> None:
    if output is Output.NAME:
        for kind in cluster.gpu_types:
            print_line(kind.name)
    elif not show_message(cluster, output):
        show_table(cluster.gpu_types, TYPE_COLUMNS)


def apply_cluster(
    client: Client, name: str, described: ClusterFile, *, validate_only: bool
) -> clusters_pb2.Cluster:
    """Create or change a cluster, its nodes and its tenants, all or none, and return it."""
    request = clusters_pb2.UpsertClusterRequest(
        cluster=clusters_pb2.Cluster(name=name, gpu_types=described.gpu_types, etag=described.etag),
        nodes=described.nodes,
        tenants=described.tenants,
        validate_only=validate_only,
    )
    for node in request.nodes:
        node.name = full_name(name, "nodes", node.name)
    for tenant in request.tenants:
        tenant.name = full_name(name, "tenants", tenant.name)
    return client.call(client.stubs.clusters.UpsertCluster, request)


def _get(client: Client, name: str) -> clusters_pb2.Cluster:
    return client.call(client.stubs.clusters.GetCluster, clusters_pb2.GetClusterRequest(name=name))


def _gpu_type(kind: clusters_pb2.GpuType) -> str:
    parts = [f"{format_number(kind.memory_bytes / GIB)} GiB"]
    if kind.dollars_per_hour:
        parts.append(f"${format_number(kind.dollars_per_hour)}/h")
    if kind.watts:
        parts.append(f"{format_number(kind.watts)} W")
    return ", ".join(parts)
