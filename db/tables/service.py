"""Tables of the service itself: repeated requests, and the leases of replicas."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import BYTEA

from tessera.db.tables.columns import metadata, moment_column, reference_column, text_column

request_ids = sa.Table(
    "request_ids",
    metadata,
    text_column("id", primary_key=True),
    text_column("method"),
    text_column("digest"),
    sa.Column("response", BYTEA),  # NULL only inside the transaction that stores it
    moment_column("created_at"),
    sa.Index(None, "created_at"),
)

leases = sa.Table(
    "leases",
    metadata,
    reference_column("cluster_id", "clusters.id", primary_key=True),
    text_column("holder"),
    moment_column("expires_at"),
)
