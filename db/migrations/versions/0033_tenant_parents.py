"""The parents of tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. No tenant has a parent yet."""
    op.add_column("tenants", sa.Column("parent_id", sa.BigInteger(), nullable=True))
    op.create_foreign_key(
        op.f("fk_tenants_parent_id"),
        "tenants",
        "tenants",
        ["parent_id"],
        ["id"],
        ondelete="SET NULL",
    )
    op.create_index(op.f("ix_tenants_parent_id"), "tenants", ["parent_id"])


def downgrade() -> None:
    """Undo the migration. Parents are lost, so quotas count for each tenant alone."""
    op.drop_column("tenants", "parent_id")
