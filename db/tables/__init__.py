"""The tables, with constraints and triggers that make the database refuse invalid states."""

from tessera.db.tables import (
    access,
    clusters,
    estimates,
    forecasts,
    jobs,
    policies,
    reservations,
    rounds,
    service,
    triggers,
    usage,
    webhooks,
)
from tessera.db.tables.columns import metadata
from tessera.db.tables.jobs import LEAVES, LIVE

__all__ = [
    "LEAVES",
    "LIVE",
    "access",
    "clusters",
    "estimates",
    "forecasts",
    "jobs",
    "metadata",
    "policies",
    "reservations",
    "rounds",
    "service",
    "triggers",
    "usage",
    "webhooks",
]
