"""The tables, with constraints and triggers that make the database refuse invalid states."""

from tessera.db.schema.tables import (
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
from tessera.db.schema.tables.columns import metadata
from tessera.db.schema.tables.jobs import LEAVES, LIVE

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
