"""Common values of a store's calls: repeated requests, retention, limits."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The identity that makes a call safe to repeat: id, method, digest of the body (AIP-155)."""

    id: str
    method: str
    digest: str  # SHA-256 of the deterministic encoding of the request, hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Ages and counts up to which a store keeps data that is not current. Infinity means forever."""

    requests_s: float = math.inf
    """Time for which request ids are kept. A call that is repeated later is carried out again."""
    rounds_s: float = math.inf
    """Time for which rounds with their decisions, and network plans, are kept."""
    least_rounds: int = 0
    """Rounds of each cluster that are kept, whatever their age."""
    most_rounds: float = math.inf
    """Largest number of rounds of each cluster that are kept, whatever their age."""
    most_snapshots: float = math.inf
    """Latest rounds of each cluster whose snapshots are kept."""
    jobs_s: float = math.inf
    """Time since their end for which jobs and their histories are kept.

    It also holds for older history entries of live jobs, for measurements, and for tokens and join
    tokens since they ended.
    """
    audit_s: float = math.inf
    """Time for which entries of the audit log are kept."""
    usage_s: float = math.inf
    """Time for which daily sums of what deleted jobs have used are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Upper bounds on what users can create: clusters overall, and the rest for each cluster.

    ``open_jobs`` is the largest number of live jobs of each tenant in a cluster.
    """

    clusters: int = 1000
    nodes: int = 20_000
    models: int = 1000
    tenants: int = 10_000
    open_jobs: int = 1_000_000

    def of(self, kind: str) -> int:
        """Return the bound of a kind. A cluster has no more agents than nodes."""
        return int(getattr(self, "nodes" if kind == "agents" else kind))
