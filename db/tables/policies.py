"""Tables of the standing policies of rounds."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from tessera.db.tables.columns import (
    id_column,
    metadata,
    moment_column,
    reference_column,
    text_column,
)

policies = sa.Table(
    "policies",
    metadata,
    reference_column("cluster_id", "clusters.id", primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("options", JSONB),  # those that it sets; NULL for the policy of the server's settings
    text_column("set_by"),
    moment_column("set_at"),
    text_column("message"),
    sa.CheckConstraint("version > 0", name="version"),
    sa.CheckConstraint("jsonb_typeof(options) = 'object'", name="options"),
)

shadows = sa.Table(  # at most one for each cluster; another one has another id
    "shadows",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    sa.Column("options", JSONB, nullable=False),
    text_column("set_by"),
    moment_column("set_at"),
    text_column("message"),
    sa.UniqueConstraint("cluster_id"),
    sa.CheckConstraint("jsonb_typeof(options) = 'object'", name="options"),
)

shadow_rounds = sa.Table(  # rounds by number, which may have been deleted
    "shadow_rounds",
    metadata,
    reference_column("shadow_id", "shadows.id", primary_key=True, ondelete="CASCADE"),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    moment_column("created_at", required=True),  # of the round
    sa.Column("document", JSONB, nullable=False),  # of tessera.db.shadows
    sa.CheckConstraint("number > 0", name="number"),
)

__all__ = ["policies", "shadow_rounds", "shadows"]
