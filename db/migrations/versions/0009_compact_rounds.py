"""Smaller rounds: decisions in compressed pages, and snapshots as differences from others."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Stored rounds are not changed and can still be read."""
    op.alter_column("rounds", "snapshot", existing_type=postgresql.BYTEA(), nullable=True)
    op.add_column("rounds", sa.Column("base", sa.BigInteger()))
    op.create_check_constraint(op.f("ck_rounds_base"), "rounds", "base < number")
    op.create_table(
        "decision_pages",
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("page", sa.BigInteger(), nullable=False),
        sa.Column("first_job_id", sa.BigInteger(), nullable=False),
        sa.Column("document", postgresql.BYTEA(), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster_id", "round"],
            ["rounds.cluster_id", "rounds.number"],
            name=op.f("fk_decision_pages_cluster_id_round"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("cluster_id", "round", "page", name=op.f("pk_decision_pages")),
    )
    op.create_index(
        op.f("ix_jobs_ended_at"),
        "jobs",
        ["cluster_id", "ended_at"],
        postgresql_where=sa.text("ended_at IS NOT NULL"),
    )


def downgrade() -> None:
    """Undo the migration.

    Rounds that an earlier release could not read are lost. Jobs, nodes and estimates are kept.
    """
    op.execute("""
        DELETE FROM rounds r WHERE r.base IS NOT NULL OR r.snapshot IS NULL OR EXISTS (
            SELECT FROM decision_pages p WHERE p.cluster_id = r.cluster_id AND p.round = r.number)
    """)
    op.drop_index(op.f("ix_jobs_ended_at"), "jobs")
    op.drop_table("decision_pages")
    op.drop_constraint(op.f("ck_rounds_base"), "rounds", type_="check")
    op.drop_column("rounds", "base")
    op.alter_column("rounds", "snapshot", existing_type=postgresql.BYTEA(), nullable=False)
