"""The whole store, and the part of it that automatic estimates need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tessera.formulation.records.estimates import EstimationInputs
from tessera.formulation.records.store import Retention
from tessera.formulation.snapshot import Snapshot
from tessera.service.ports.agents import AgentStore
from tessera.service.ports.clusters import ClusterStore
from tessera.service.ports.estimates import EstimateStore
from tessera.service.ports.forecasts import ForecastStore
from tessera.service.ports.jobs import JobFinder, JobStore
from tessera.service.ports.networks import NetworkStore
from tessera.service.ports.policies import PolicyStore
from tessera.service.ports.reservations import ReservationStore
from tessera.service.ports.rounds import RoundStore
from tessera.service.ports.tenants import TenantStore
from tessera.service.ports.writer import Transactions, Writer


class EstimationStore(Transactions, JobFinder, Protocol):
    """The part of a store that automatic estimates need. Every method is one transaction."""

    def estimation(self, cluster: str) -> EstimationInputs:
        """Return everything that a cluster's estimates are computed from. Raises NotFound."""
        ...


class Store(
    EstimationStore,
    ClusterStore,
    TenantStore,
    JobStore,
    PolicyStore,
    ReservationStore,
    EstimateStore,
    NetworkStore,
    RoundStore,
    ForecastStore,
    AgentStore,
    Protocol,
):
    """The place where everything is kept, except requests for output and webhooks.

    Every method is one transaction, and safe to call from any thread.
    """

    def rehearse(
        self,
        cluster: str,
        works: Sequence[Callable[[Writer], bytes]],
        use_half_life_s: float = 0.0,
    ) -> tuple[Snapshot, EstimationInputs]:
        """Return what a round, and what estimates, would see after ``works``, in that order.

        Everything is checked as in ``write``, and rolled back. ``use_half_life_s`` is as in
        ``snapshot``.

        Raises:
            NotFound: the cluster. What ``works`` raise.
        """
        ...

    def purge(self) -> bool:
        """Remove a batch of rows of deleted clusters; return whether there may be more."""
        ...

    def prune_batch(self, cluster: str, retention: Retention) -> dict[str, int]:
        """Delete a bounded number of old rows of each kind; return the deleted numbers by kind.

        Nothing is left to delete if all are 0. Raises NotFound.
        """
        ...

    def ready(self) -> None:
        """Check the connection and the schema. Raises Unavailable, NotMigrated."""
        ...
