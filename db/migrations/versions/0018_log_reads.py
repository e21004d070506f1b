"""Requests for the output of jobs, and where it is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import BYTEA, JSONB, TIMESTAMP

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_KEEP_PRESENT_STARTS = """
INSERT INTO job_starts (job_id, generation, shares)
SELECT s.job_id, s.generation, jsonb_agg(jsonb_build_array(s.node, s.gpus) ORDER BY s.node)
FROM (SELECT l.job_id, l.generation, n.name AS node, jsonb_agg(l.gpu ORDER BY l.gpu) AS gpus
    FROM allocations l JOIN nodes n ON n.id = l.node_id GROUP BY 1, 2, 3) AS s
GROUP BY s.job_id, s.generation
"""


def upgrade() -> None:
    """Apply the migration. Of starts before it, only those that still hold GPUs are known."""
    op.create_table(
        "job_starts",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column(
            "given_at", TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.Column("shares", JSONB(), nullable=False),
        sa.CheckConstraint("generation > 0", name=op.f("ck_job_starts_generation")),
        sa.CheckConstraint("jsonb_typeof(shares) = 'array'", name=op.f("ck_job_starts_shares")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_starts_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "generation", name=op.f("pk_job_starts")),
    )
    op.execute(_KEEP_PRESENT_STARTS)
    name = sa.Text(collation="C")
    op.create_table(
        "log_reads",
        sa.Column("id", name, nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("agent_id", sa.BigInteger(), nullable=False),
        sa.Column("client", name, nullable=False),
        sa.Column(
            "asked_at", TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.Column("job", name, nullable=False),
        sa.Column("job_number", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("node", name, nullable=False),
        sa.Column("first_byte", sa.BigInteger(), nullable=False),
        sa.Column("max_bytes", sa.BigInteger(), nullable=False),
        sa.Column("answered", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "answer_first_byte", sa.BigInteger(), server_default=sa.text("0"), nullable=False
        ),
        sa.Column("data", BYTEA()),
        sa.Column("ended", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("error", name, server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_log_reads")),
        prefixes=["UNLOGGED"],
    )
    op.create_index(op.f("ix_log_reads_agent_id"), "log_reads", ["agent_id"])
    op.create_index(op.f("ix_log_reads_cluster_id"), "log_reads", ["cluster_id"])


def downgrade() -> None:
    """Undo the migration. Where earlier generations of jobs ran is forgotten."""
    op.drop_table("log_reads")
    op.drop_table("job_starts")
