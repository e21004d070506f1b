"""Gaps of profiles with their reasons, and comparisons of collectives with those of XLA."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def _name(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=False)


def _moment(name: str) -> sa.Column[Any]:
    return sa.Column(
        name,
        postgresql.TIMESTAMP(timezone=True),
        server_default=sa.text("now()"),
        nullable=False,
    )


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), server_default=sa.text("false"), nullable=False)


def upgrade() -> None:
    """Apply the migration. No profile has a gap yet, and nothing was compared."""
    _create_gaps()
    op.create_table(
        "collective_checks",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        *map(_name, ("model", "params")),
        sa.Column("dp", sa.BigInteger(), nullable=False),
        sa.Column("tp", sa.BigInteger(), nullable=False),
        _flag("zero"),
        *map(_name, ("release", "note", "problem")),
        _flag("differs"),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        _moment("checked_at"),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_collective_checks_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collective_checks")),
        sa.UniqueConstraint(
            "cluster_id",
            "model",
            "params",
            "dp",
            "tp",
            "zero",
            name=op.f("uq_collective_checks_degrees"),
        ),
        sa.CheckConstraint(
            "dp > 0 AND tp > 0 AND dp * tp > 1", name=op.f("ck_collective_checks_degrees")
        ),
    )


def _create_gaps() -> None:
    op.create_table(
        "profile_gaps",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("workload_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=False),
        *map(_name, ("task", "source")),
        sa.Column("left_out", postgresql.JSONB(), nullable=False),
        _name("reason"),
        _moment("added_at"),
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
    """Undo the migration. Why sizes were left out is lost, and collectives are compared again."""
    op.drop_table("collective_checks")
    op.drop_table("profile_gaps")
