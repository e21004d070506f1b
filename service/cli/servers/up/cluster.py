"""The cluster that ``tessera up`` describes to its server."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tessera.client import Client
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.clusters.clusters import apply_cluster
from tessera.service.cli.names import short_name
from tessera.service.cli.servers.up.processes import ClusterStart
from tessera.v1 import clusters_pb2

SHOWN_NODES: Final = 5
"""The number of nodes that an error names."""


def describe_cluster(plan: ClusterStart, client: Client) -> None:
    """Send the cluster to the server, unless an earlier ``run_up`` did.

    Raises:
        CallFailed: the database has another cluster of this name.
    """
    record = plan.home.record
    if record is None or record.applied == record.description:
        return
    if not record.applied:
        _require_same(plan, client)
    apply_cluster(client, plan.name, plan.described, validate_only=False)
    plan.home.save(replace(record, applied=record.description))


def _require_same(plan: ClusterStart, client: Client) -> None:
    """Check that the cluster does not exist yet, or has only nodes of the description."""
    request = clusters_pb2.ListClustersRequest()
    clusters = client.pages(client.stubs.clusters.ListClusters, request, lambda page: page.clusters)
    if plan.name not in {cluster.name for cluster in clusters}:
        return
    wanted = {node.name: (node.gpu_type, node.gpus) for node in plan.described.nodes}
    others = [
        short_name(node.name)
        for node in _nodes(client, plan.name)
        if wanted.get(short_name(node.name)) != (node.gpu_type, node.gpus)
    ]
    if others:
        more = ", ..." if len(others) > SHOWN_NODES else ""
        raise CallFailed(
            f"the database already has {plan.name} with other nodes ({', '.join(others[:SHOWN_NODES])}"
            f"{more}); nothing was changed. Choose another --cluster or --data-dir, or add --reset to delete"
            " it and start from scratch",
            Exit.REFUSED,
        )


def _nodes(client: Client, name: str) -> list[clusters_pb2.Node]:
    request = clusters_pb2.ListNodesRequest(parent=name)
    return list(client.pages(client.stubs.clusters.ListNodes, request, lambda page: page.nodes))


def reachable_nodes(client: Client, name: str) -> set[str]:
    """Return the names of the nodes whose agents are connected."""
    return {
        short_name(node.name)
        for node in _nodes(client, name)
        if node.state != clusters_pb2.Node.UNREACHABLE
    }
