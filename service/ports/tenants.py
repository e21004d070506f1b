"""The settings of tenants, and what their jobs have used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.usage import ClusterUsage, UsageQuery


class TenantWriter(Protocol):
    """Changes of tenants' settings in one transaction."""

    def upsert_tenants(self, cluster: str, tenants: Sequence[TenantSpec]) -> list[TenantSpec]:
        """Create tenants or replace their settings, all or none.

        Raises:
            NotFound: the cluster.
            InvalidInput: unknown GPU type; quotas that together exceed the cluster.
        """
        ...

    def delete_tenants(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete the settings of tenants, but not their jobs.

        Raises:
            NotFound: the cluster, or a tenant unless ``allow_missing``.
        """
        ...


class TenantStore(Protocol):
    """The part of a store that keeps tenants, and sums what they use."""

    def list_tenants(self, cluster: str) -> list[TenantSpec]:
        """Return the tenants that have settings, by name. Raises NotFound (the cluster)."""
        ...

    def sum_usage(self, cluster: str, query: UsageQuery) -> ClusterUsage:
        """Return what the jobs of a cluster have used, by the query's groups.

        Raises:
            NotFound: the cluster.
            InvalidInput: there are too many groups.
        """
        ...
