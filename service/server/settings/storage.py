"""The amount that the database keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tessera.formulation.records.store import Retention, StoreLimits
from tessera.service.server.settings.values import Count, Days, Limit

MIN_KEPT_ROUNDS: Final = 100
"""Number of latest rounds of each cluster that retention never deletes, however old they are."""


@dataclass(frozen=True, kw_only=True)
class StorageSettings:
    """The times for which history is kept, and the numbers of things that users may create."""

    retain_requests_days: Days = 1.0
    """Days for which a repeated request gets its first answer again. In this setting and the next
    six, 0 keeps everything for ever.
    """
    retain_rounds_days: Days = 30.0
    """Days for which rounds with their decisions, and network plans, are kept. The last 100 of a
    cluster are always kept.
    """
    retain_rounds: Count = 10_000
    """Number of latest rounds that are kept for each cluster. Older ones are deleted, however
    recent they are.
    """
    retain_snapshots: Count = 2_000
    """Number of latest rounds of a cluster that can be replayed. Only they keep snapshots."""
    retain_jobs_days: Days = 30.0
    """Days for which ended jobs are kept, and tokens that have ended. Older history of live jobs is
    deleted, too.
    """
    retain_usage_days: Days = 1100.0
    """Days for which the daily sums of what deleted jobs have used are kept."""
    retain_audit_days: Days = 365.0
    """Days for which entries of the audit log are kept."""
    max_clusters: Limit = 1000
    """Largest number of clusters."""
    max_nodes: Limit = 20_000
    """Largest number of nodes in a cluster, and largest number of agents."""
    max_models: Limit = 1000
    """Largest number of models that users can describe in a cluster."""
    max_tenants: Limit = 10_000
    """Largest number of tenants that can have settings in a cluster."""
    max_open_jobs: Limit = 1_000_000
    """Largest number of live jobs of one tenant in a cluster."""

    def retention(self) -> Retention:
        """Return how much history the database keeps."""
        return Retention(
            requests_s=_days_s(self.retain_requests_days),
            rounds_s=_days_s(self.retain_rounds_days),
            least_rounds=MIN_KEPT_ROUNDS,
            most_rounds=self.retain_rounds or math.inf,
            most_snapshots=self.retain_snapshots or math.inf,
            jobs_s=_days_s(self.retain_jobs_days),
            audit_s=_days_s(self.retain_audit_days),
            usage_s=_days_s(self.retain_usage_days),
        )

    def limits(self) -> StoreLimits:
        """Return the largest numbers of things that users can create."""
        return StoreLimits(
            clusters=self.max_clusters,
            nodes=self.max_nodes,
            models=self.max_models,
            tenants=self.max_tenants,
            open_jobs=self.max_open_jobs,
        )


def _days_s(days: float) -> float:
    """Return days in seconds. 0 days are infinite."""
    return days * 86_400.0 if days else math.inf
