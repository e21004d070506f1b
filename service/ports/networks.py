"""Networks of clusters, and their plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.network.outcome import NetworkPlanRecord
from tessera.formulation.records.clusters import TopologyRecord
from tessera.formulation.records.rounds import NetworkCommit
from tessera.formulation.topologies.described import DescribedTopology


class NetworkWriter(Protocol):
    """Changes of networks in one transaction.

    If a version is None, it matches any stored version.
    """

    def set_topology(
        self, cluster: str, described: DescribedTopology, version: int | None
    ) -> TopologyRecord:
        """Describe the cluster's network. If ``version`` is 0, there must be none yet.

        Raises:
            NotFound: the cluster. StaleEtag.
        """
        ...

    def drop_topology(
        self, cluster: str, version: int | None = None, *, allow_missing: bool = False
    ) -> None:
        """Delete the network and its plans.

        Raises:
            NotFound: the cluster; or its network, unless ``allow_missing``. StaleEtag.
        """
        ...


class NetworkStore(Protocol):
    """The part of a store that keeps networks and network plans."""

    def has_topology(self, cluster: str) -> bool:
        """Return whether the cluster's network is described. Raises NotFound: the cluster."""
        ...

    def get_topology(
        self, cluster: str, cancelled: Callable[[], bool] = never_cancelled
    ) -> TopologyRecord:
        """Return the cluster's network.

        Raises:
            NotFound: the cluster, or its network. DeadlineTooShort: it was cancelled.
        """
        ...

    def commit_network(self, plan: NetworkCommit) -> NetworkPlanRecord | None:
        """Put a network plan that was made between rounds in force.

        Return None if it changes nothing. Decisions for allocations that have gone in the meantime
        are left out.

        Raises:
            RoundSuperseded: a round was committed since; its own plan stays in force.
            StaleEtag: the topology has changed since.
            NotFound: the cluster, or its network.
        """
        ...

    def network_in_force(self, cluster: str, job: str = "") -> NetworkPlanRecord:
        """Return the network plan in force, by rank.

        If ``job`` is given, only its decisions are included.

        Raises:
            NotFound: the cluster, its network, or a plan.
        """
        ...

    def list_network_plans(self, cluster: str, before: int, limit: int) -> list[NetworkPlanRecord]:
        """Return plans with a number below ``before`` (0: all) without decisions, newest first.

        Raises NotFound.
        """
        ...
