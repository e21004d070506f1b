"""Tables of the service itself: repeated requests, and the leases of replicas."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import BYTEA

from tessera.db.schema.tables.columns import (
    count_column,
    flag_column,
    metadata,
    moment_column,
    reference_column,
    text_column,
)

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

log_reads = sa.Table(
    "log_reads",
    metadata,
    text_column("id", primary_key=True),
    # Not foreign keys: the rows live for seconds, and must not lock rows that rounds change.
    count_column("cluster_id", None),
    count_column("agent_id", None),
    text_column("client"),
    moment_column("asked_at"),
    text_column("job"),
    count_column("job_number", None),
    count_column("generation", None),
    count_column("rank", None),
    text_column("node"),
    count_column("first_byte", None),
    count_column("max_bytes", None),
    flag_column("answered"),
    count_column("answer_first_byte"),
    sa.Column("data", BYTEA),
    flag_column("ended"),
    text_column("error", default=""),
    sa.Index(None, "agent_id"),
    sa.Index(None, "cluster_id"),
    prefixes=["UNLOGGED"],
)
"""Requests for the output of ranks, and their answers until they are delivered. If the database's
server crashes, all of them are lost, and clients ask again.
"""
