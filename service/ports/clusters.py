"""Clusters with their GPU types and nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tessera.formulation.records.clusters import ClusterRecord, NodeRecord, NodeSpec, TenantSpec
from tessera.formulation.runtime_offers import RuntimeLack
from tessera.formulation.values import GpuType


class ClusterWriter(Protocol):
    """Changes of clusters, GPU types and nodes in one transaction.

    If a version is None, it matches any stored version.
    """

    def upsert_cluster(
        self,
        name: str,
        gpu_types: Sequence[GpuType],
        version: int | None,
        nodes: Sequence[NodeSpec] = (),
        tenants: Sequence[TenantSpec] = (),
    ) -> ClusterRecord:
        """Create the cluster or replace its GPU types, then create or change nodes and tenants.

        Raises:
            InvalidInput: a type that nodes, Cells, jobs or quotas still use is missing.
            StaleEtag: ``version`` is not the stored one.
            The errors of ``upsert_nodes`` and of ``upsert_tenants``.
        """
        ...

    def delete_cluster(self, name: str, version: int | None, *, force: bool) -> None:
        """Delete a cluster. After the commit it cannot be found, and its name is free.

        Raises:
            NotFound, StaleEtag.
            InUse: a job is live or still holds GPUs; or an agent is connected, unless ``force``.
        """
        ...

    def delete_gpu_types(
        self, cluster: str, names: Sequence[str], version: int | None, *, allow_missing: bool
    ) -> ClusterRecord:
        """Delete GPU types of a cluster, all or none.

        Raises:
            NotFound: the cluster, or a type unless ``allow_missing``. StaleEtag.
            InUse: nodes, users' Cells, quotas or live jobs name one.
            InvalidInput: none would remain.
        """
        ...

    def upsert_nodes(self, cluster: str, nodes: Sequence[NodeSpec]) -> list[NodeRecord]:
        """Create or change nodes, all or none.

        Raises:
            NotFound, StaleEtag.
            InvalidInput: unknown GPU type, or a count outside 1..64.
            NotAllowed: a node whose GPUs are held would change type or lose GPUs.
        """
        ...

    def drain_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        *,
        draining: bool,
        reason: str = "",
        drained_by: str = "",
    ) -> list[NodeRecord]:
        """Mark nodes as draining, or not. Raises NotFound.

        A reason replaces the reason of a node that is already draining. If ``reason`` is "", the
        old one stays. A node that health had drained stays drained until it is undrained. The
        present faults of a node that is undrained are excused until they are gone.
        """
        ...

    def delete_nodes(
        self,
        cluster: str,
        names: Sequence[str],
        versions: Mapping[str, int],
        *,
        allow_missing: bool,
    ) -> None:
        """Delete nodes, all or none. Nodes in ``versions`` must be at that version.

        An agent that runs on a deleted node is informed. It does not register the node again until
        it is restarted or a user creates the node again. The node is removed from the lists of
        nodes that jobs avoid.

        Raises:
            NotFound: the cluster, or a node unless ``allow_missing``. StaleEtag. InUse: jobs hold
                GPUs there.
        """
        ...


class ClusterStore(Protocol):
    """The part of a store that keeps clusters and nodes."""

    def get_cluster(self, cluster: str) -> ClusterRecord:
        """Return a cluster. Raises NotFound."""
        ...

    def list_clusters(self, after: str, limit: int) -> list[ClusterRecord]:
        """Return clusters whose name sorts after ``after``, by name."""
        ...

    def get_node(self, cluster: str, name: str) -> NodeRecord:
        """Return a node. Raises NotFound."""
        ...

    def list_nodes(self, cluster: str, after: str, limit: int) -> list[NodeRecord]:
        """Return nodes whose name sorts after ``after``, by name. Raises NotFound (the cluster)."""
        ...

    def find_lacks(self, cluster: str, runtimes: Collection[str]) -> dict[str, RuntimeLack]:
        """Return the ``runtimes`` that no node with an agent offers, by name."""
        ...
