"""The changes of clusters, GPU types and nodes that users request."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tessera.db.agents import agents
from tessera.db.base.limits import require_few, require_few_clusters
from tessera.db.base.rows import nodes_named
from tessera.db.base.turn import Turn
from tessera.db.clusters import inventory
from tessera.db.clusters.tenants import upsert_tenants
from tessera.db.store.reads import get_cluster
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import ClusterRecord, NodeRecord, NodeSpec, TenantSpec


def upsert_cluster(
    connection: sa.Connection,
    name: str,
    gpu_types: Sequence[GpuType],
    version: int | None,
    nodes: Sequence[NodeSpec] = (),
    tenants: Sequence[TenantSpec] = (),
) -> ClusterRecord:
    """Create the cluster or replace its GPU types, then create or change nodes and tenants.

    Raises:
        InvalidInput: a type that nodes, Cells, jobs or quotas still use is missing.
        StaleEtag: ``version`` is given, and it is not the stored one.
        LimitReached: there would be too many clusters.
        The errors of ``upsert_nodes`` and of ``upsert_tenants``.
    """
    if inventory.put_types(connection, name, gpu_types, version):
        require_few_clusters(connection)
    if nodes:
        upsert_nodes(connection, name, nodes)
    if tenants:
        upsert_tenants(connection, name, tenants)
    return get_cluster(connection, name)


def delete_gpu_types(
    connection: sa.Connection,
    cluster: str,
    names: Sequence[str],
    version: int | None,
    *,
    allow_missing: bool,
) -> ClusterRecord:
    """Delete GPU types of a cluster, all or none. The cluster's version rises.

    Raises:
        NotFound: the cluster, or a type unless ``allow_missing``. StaleEtag.
        InUse: nodes, users' Cells, quotas or live jobs name one. InvalidInput: none would remain.
    """
    inventory.delete_types(connection, cluster, names, version, allow_missing=allow_missing)
    return get_cluster(connection, cluster)


def upsert_nodes(
    connection: sa.Connection, cluster: str, nodes: Sequence[NodeSpec]
) -> list[NodeRecord]:
    """Create or change nodes, all or none. A node's version rises only if it changed.

    Agents that still run on deleted nodes get them back.

    Raises:
        NotFound: the cluster; or a version was given for a node that does not exist. StaleEtag.
        InvalidInput: a node named twice, unknown GPU type, or a count outside 1..64.
        NotAllowed: a node whose GPUs are held would change type or lose GPUs, or a node would have
            fewer CPU cores or less host memory than its jobs need.
        LimitReached: the cluster would have too many nodes.
    """
    turn = Turn.take(connection, cluster)
    names = [node.name for node in nodes]
    turn.needs_round = inventory.put_nodes(turn, nodes)
    agents.give_nodes_back(turn, names)
    turn.end()
    require_few(connection, cluster, "nodes")
    return nodes_named(connection, turn.cluster, names)
