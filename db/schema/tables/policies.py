"""Tables of the standing policies of rounds."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from tessera.db.schema.tables.columns import metadata, moment_column, reference_column, text_column

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

__all__ = ["policies"]
