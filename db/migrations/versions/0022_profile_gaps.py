"""Gaps of profiles: the sizes that profiling tasks left out at a limit, with the reasons."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0022"
down_revision = "0019"
branch_labels = None
depends_on = None


def _name(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=False)


def upgrade() -> None:
    """Apply the migration. No profile has a gap yet."""
    op.create_table(
        "profile_gaps",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("workload_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=False),
        *map(_name, ("task", "source")),
        sa.Column("left_out", postgresql.JSONB(), nullable=False),
        _name("reason"),
        sa.Column(
            "added_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["workload_id"],
            ["workloads.id"],
            name=op.f("fk_profile_gaps_workload_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"],
            ["gpu_types.id"],
            name=op.f("fk_profile_gaps_gpu_type_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profile_gaps")),
        sa.UniqueConstraint(
            "workload_id", "gpu_type_id", "task", "source", name=op.f("uq_profile_gaps_task")
        ),
        sa.CheckConstraint(
            "jsonb_typeof(left_out) = 'array' AND left_out <> '[]' AND reason <> ''",
            name=op.f("ck_profile_gaps_content"),
        ),
    )
    op.create_index(op.f("ix_profile_gaps_gpu_type_id"), "profile_gaps", ["gpu_type_id"])


def downgrade() -> None:
    """Undo the migration. Why sizes were left out is lost."""
    op.drop_table("profile_gaps")
