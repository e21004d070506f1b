"""What calls of a store have in common: repeats, limits, how long what is over is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What makes a call safe to repeat: its id, its method and a digest of its body (AIP-155)."""

    id: str
    method: str
    digest: str  # SHA-256 of the deterministic encoding of the request, hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Ages and counts up to which a store keeps what is over. Infinity: for ever."""

    requests_s: float = math.inf
    """Request ids: a call that is repeated later is carried out again."""
    rounds_s: float = math.inf
    """Rounds with their decisions, and network plans."""
    least_rounds: int = 0
    """Rounds of each cluster that stay, however old they are."""
    most_rounds: float = math.inf
    """Rounds of each cluster that stay, however young the others are."""
    most_snapshots: float = math.inf
    """Latest rounds of each cluster whose snapshots stay."""
    jobs_s: float = math.inf
    """Jobs since their end, with their histories; older entries of live jobs' histories; measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds on what users can create: clusters in all, and the rest for each cluster."""

    clusters: int = 1000
    nodes: int = 20_000
    models: int = 1000
    tenants: int = 10_000

    def of(self, kind: str) -> int:
        """Return the bound of a kind; a cluster has no more agents than nodes."""
        return int(getattr(self, "nodes" if kind == "agents" else kind))
