"""Tables of reservations and maintenance windows."""

from __future__ import annotations

import sqlalchemy as sa

from tessera.db.schema.tables.columns import (
    count_column,
    flag_column,
    id_column,
    metadata,
    moment_column,
    reference_column,
    text_column,
)

reservations = sa.Table(
    "reservations",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    count_column("version", 1),
    moment_column("start_at"),
    moment_column("end_at"),
    reference_column("gpu_type_id", "gpu_types.id", nullable=True),  # NULL for one of nodes
    count_column("gpus", 0),
    text_column("tenant", default=""),
    text_column("label_key", default=""),
    text_column("label_value", default=""),
    flag_column("maintenance"),
    text_column("reason", default=""),
    moment_column("created_at"),
    sa.UniqueConstraint("cluster_id", "name"),
    sa.Index(None, "gpu_type_id"),
    sa.CheckConstraint("start_at < end_at", name="times"),
    sa.CheckConstraint(
        "gpus >= 0 AND (gpu_type_id IS NULL) = (gpus = 0) AND (NOT maintenance OR gpus = 0)",
        name="gpus",
    ),
    sa.CheckConstraint(
        "(maintenance AND tenant = '' AND label_key = '')"
        " OR (NOT maintenance AND (tenant = '') <> (label_key = ''))",
        name="serves",
    ),
)

reservation_nodes = sa.Table(
    "reservation_nodes",
    metadata,
    reference_column("reservation_id", "reservations.id", ondelete="CASCADE", primary_key=True),
    reference_column("node_id", "nodes.id", primary_key=True),
    sa.Index(None, "node_id"),
)
