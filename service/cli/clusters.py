"""Commands on clusters and their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Final

import typer

from service.cli import yamlfile
from service.cli.client import CallFailed, Client, Exit, connect, new_request_id, now
from service.cli.clusterfile import ClusterFile, read_cluster
from service.cli.names import full_name, parent, short
from service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
)
from service.cli.render import Column, age, line, note, number, show_facts, show_list, show_message
from service.cli.tenants import apply_tenants
from tessera.v1 import clusters_pb2

GIB: Final = 2**30

NodeNames = Annotated[list[str], typer.Argument(metavar="NODE...", help="Ids or full names.")]

CLUSTERS: Final[Sequence[Column[clusters_pb2.Cluster]]] = (
    Column("CLUSTER", lambda c: short(c.name)),
    Column("GPU TYPES", lambda c: ", ".join(t.name for t in c.gpu_types)),
    Column("NODES", lambda c: number(c.nodes), right=True),
    Column("GPUS", lambda c: number(c.gpus), right=True),
    Column("LAST ROUND", lambda c: short(c.last_round), right=True),
)

NODES: Final[Sequence[Column[clusters_pb2.Node]]] = (
    Column("NODE", lambda n: short(n.name)),
    Column("STATE", lambda n: clusters_pb2.Node.State.Name(n.state)),
    Column("TYPE", lambda n: n.gpu_type),
    Column("GPUS", lambda n: str(n.gpus), right=True),
    Column("FREE", lambda n: str(n.free_gpus), right=True),
    Column("RACK", lambda n: n.rack),
    Column("JOBS", lambda n: ", ".join(short(j) for j in n.jobs)),
    Column("HEARD", lambda n: _heard(n.silent_s), wide=True, right=True),
    Column("NETWORK", lambda n: "; ".join(n.network_remarks), wide=True),
)


def add(app: typer.Typer) -> None:
    """Add the commands on clusters and nodes."""
    panel = "Clusters"
    group = typer.Typer(
        help="Describe a cluster to the server, or look at it.", no_args_is_help=True
    )
    group.command("apply")(apply)
    group.command("get")(get)
    group.command("list")(list_clusters)
    app.add_typer(group, name="cluster", rich_help_panel=panel)
    app.command("nodes", rich_help_panel=panel)(list_nodes)
    app.command("drain", rich_help_panel=panel)(drain)
    app.command("undrain", rich_help_panel=panel)(undrain)


def apply(
    file: Annotated[str, typer.Option("--file", "-f", help="YAML of a cluster; '-' for stdin.")],
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Annotated[
        str,
        typer.Option("--cluster", "-c", envvar="TESSERA_CLUSTER",
                     help="The cluster's id; left out: as the file says, else 'default'."),
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:  # fmt: skip
    """Create a cluster or change it: its GPU types, its nodes, its tenants (all or none of each)."""
    described = read_cluster(yamlfile.read(file), file)
    name = parent(cluster or described.name or DEFAULT_CLUSTER)
    with connect(server) as client:
        found = apply_cluster(client, name, described, validate_only=validate_only)
    show_list(clusters_pb2.ListClustersResponse(clusters=[found]), [found], CLUSTERS, output)
    what = f"{len(described.gpu_types)} GPU types, {len(described.nodes):,} nodes"
    what += f", {len(described.tenants):,} tenants" if described.tenants else ""
    note(f"{what}: valid, nothing changed" if validate_only else f"{what} applied")


def get(
    name: Annotated[str, typer.Argument(metavar="CLUSTER", help="Left out: --cluster.")] = "",
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a cluster."""
    with connect(server) as client:
        found = _get(client, parent(name or cluster))
    if output is Output.NAME:
        line(found.name)
    elif not show_message(found, output):
        memory = ", ".join(f"{t.name} ({_gpu_type(t)})" for t in found.gpu_types)
        show_facts((
            ("cluster", found.name), ("GPU types", memory), ("nodes", number(found.nodes)),
            ("GPUs", number(found.gpus)), ("last round", short(found.last_round)),
            ("created", f"{age(found.create_time, now())} ago"),
        ))  # fmt: skip


def list_clusters(server: Server = DEFAULT_SERVER, output: OutputOption = Output.TABLE) -> None:
    """List clusters, by name."""
    with connect(server) as client:
        pages = client.pages(client.clusters.ListClusters, clusters_pb2.ListClustersRequest())
        found = list(chain.from_iterable(page.clusters for page in pages))
    show_list(clusters_pb2.ListClustersResponse(clusters=found), found, CLUSTERS, output)
    if not found:
        note("no clusters yet: `tessera cluster apply -f cluster.yaml` makes one")


def list_nodes(
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List nodes: their state, free GPUs, and the jobs that hold the others."""
    with connect(server) as client:
        request = clusters_pb2.ListNodesRequest(parent=parent(cluster))
        pages = client.pages(client.clusters.ListNodes, request)
        found = list(chain.from_iterable(page.nodes for page in pages))
    _show_nodes(found, output)
    if not found:
        note(f"cluster {short(parent(cluster))} has no nodes; name them in `tessera cluster apply`")


def drain(
    names: NodeNames,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Drain nodes: nothing new starts there, and the next round moves away what runs there."""
    request = clusters_pb2.DrainNodesRequest(
        parent=parent(cluster), names=[full_name(cluster, "nodes", name) for name in names],
        validate_only=validate_only, request_id=new_request_id(),
    )  # fmt: skip
    with connect(server) as client:
        _show_nodes(client.call(client.clusters.DrainNodes, request).nodes, output)


def undrain(
    names: NodeNames,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let rounds use drained nodes again."""
    request = clusters_pb2.UndrainNodesRequest(
        parent=parent(cluster), names=[full_name(cluster, "nodes", name) for name in names],
        validate_only=validate_only, request_id=new_request_id(),
    )  # fmt: skip
    with connect(server) as client:
        _show_nodes(client.call(client.clusters.UndrainNodes, request).nodes, output)


def apply_cluster(
    client: Client, name: str, described: ClusterFile, *, validate_only: bool
) -> clusters_pb2.Cluster:
    """Create or change a cluster, its nodes and its tenants, and return it.

    With ``validate_only`` the nodes are checked on the server only where it knows their types already, and
    the tenants not at all: their quotas are held against nodes that are stored.
    """
    upsert = clusters_pb2.UpsertClusterRequest(
        cluster=clusters_pb2.Cluster(name=name, gpu_types=described.gpu_types),
        validate_only=validate_only, request_id=new_request_id(),
    )  # fmt: skip
    found = client.call(client.clusters.UpsertCluster, upsert)
    if validate_only and not _known_types(client, name) >= {n.gpu_type for n in described.nodes}:
        return found
    if described.nodes:
        nodes = clusters_pb2.UpsertNodesRequest(
            parent=name, validate_only=validate_only, request_id=new_request_id(),
            nodes=[
                clusters_pb2.Node(
                    name=full_name(name, "nodes", n.name), gpu_type=n.gpu_type, gpus=n.gpus,
                    rack=n.rack,
                )
                for n in described.nodes
            ],
        )  # fmt: skip
        client.call(client.clusters.UpsertNodes, nodes)
    if described.tenants and not validate_only:
        apply_tenants(client, name, described.tenants, validate_only=False)
    return found if validate_only else _get(client, name)


def _known_types(client: Client, name: str) -> set[str]:
    """Return the GPU types that the cluster has now; none where it does not exist."""
    try:
        return {kind.name for kind in _get(client, name).gpu_types}
    except CallFailed as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        return set()


def _get(client: Client, name: str) -> clusters_pb2.Cluster:
    return client.call(client.clusters.GetCluster, clusters_pb2.GetClusterRequest(name=name))


def _show_nodes(nodes: Sequence[clusters_pb2.Node], output: Output) -> None:
    show_list(clusters_pb2.ListNodesResponse(nodes=nodes), nodes, NODES, output)


def _gpu_type(kind: clusters_pb2.GpuType) -> str:
    said = [f"{number(kind.memory_bytes / GIB)} GiB"]
    if kind.dollars_per_hour:
        said.append(f"${number(kind.dollars_per_hour)}/h")
    if kind.watts:
        said.append(f"{number(kind.watts)} W")
    return ", ".join(said)


def _heard(silent_s: float) -> str:
    return "never" if silent_s < 0 else f"{silent_s:.0f}s ago"
