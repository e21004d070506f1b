"""Rates of nodes' hosts that profiling tasks measured: copies to GPUs, and updates of states."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. No host was measured yet."""
    op.create_table(
        "host_profiles",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=False),
        sa.Column("task", sa.Text(collation="C"), nullable=False),
        sa.Column("rates", postgresql.JSONB(), nullable=False),
        sa.Column(
            "added_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"],
            ["gpu_types.id"],
            name=op.f("fk_host_profiles_gpu_type_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_host_profiles")),
        sa.UniqueConstraint("gpu_type_id", "task", name=op.f("uq_host_profiles_task")),
        sa.CheckConstraint("jsonb_typeof(rates) = 'object'", name=op.f("ck_host_profiles_rates")),
    )


def downgrade() -> None:
    """Undo the migration. Measured rates of hosts are lost."""
    op.drop_table("host_profiles")
