"""The use of GPUs by jobs: stints, and their sums by day after the jobs are deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

Name = sa.Text(collation="C")
Moment = postgresql.TIMESTAMP(timezone=True)


def upgrade() -> None:
    """Apply the migration. Use is counted from the allocations on that jobs have now."""
    op.add_column(
        "jobs", sa.Column("submitted_by", Name, server_default=sa.text("''"), nullable=False)
    )
    op.add_column(
        "jobs", sa.Column("cell_effective_gpus", postgresql.DOUBLE_PRECISION(), nullable=True)
    )
    op.create_table(
        "stints",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu_type", Name, nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("cpus", sa.BigInteger(), nullable=False),
        sa.Column("effective_gpus", postgresql.DOUBLE_PRECISION(), nullable=False),
        sa.Column("began_at", Moment, nullable=False),
        sa.Column("trained_at", Moment, nullable=True),
        sa.Column("ended_at", Moment, nullable=False),
        sa.Column("ending", Name, nullable=False),
        sa.CheckConstraint("gpus > 0 AND cpus >= 0", name=op.f("ck_stints_counts")),
        sa.CheckConstraint(
            "effective_gpus >= 0 AND effective_gpus < 'Infinity'",
            name=op.f("ck_stints_effective_gpus"),
        ),
        sa.CheckConstraint("began_at <= ended_at", name=op.f("ck_stints_times")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_stints_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stints")),
    )
    op.create_index(op.f("ix_stints_job_id"), "stints", ["job_id"])
    op.create_table(
        "usage_days",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("tenant", Name, nullable=False),
        sa.Column("gpu_type", Name, nullable=False),
        sa.Column("submitted_by", Name, nullable=False),
        sa.Column("labels", postgresql.JSONB(), nullable=False),
        sa.Column("gpu_us", sa.BigInteger(), nullable=False),
        sa.Column("effective_gpu_s", postgresql.DOUBLE_PRECISION(), nullable=False),
        sa.Column("cpu_us", sa.BigInteger(), nullable=False),
        sa.Column("lost_gpu_us", sa.BigInteger(), nullable=False),
        sa.Column("preemptions", sa.BigInteger(), nullable=False),
        sa.Column("jobs_ended", sa.BigInteger(), nullable=False),
        sa.Column("jobs_finished", sa.BigInteger(), nullable=False),
        sa.Column("waited_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_usage_days_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_days")),
    )
    op.create_index(
        "uq_usage_days_group",
        "usage_days",
        [
            "cluster_id",
            "day",
            "tenant",
            "gpu_type",
            "submitted_by",
            sa.text("md5(CAST(labels AS text))"),
        ],
        unique=True,
    )


def downgrade() -> None:
    """Undo the migration. What jobs have used is lost."""
    op.drop_table("usage_days")
    op.drop_table("stints")
    op.drop_column("jobs", "cell_effective_gpus")
    op.drop_column("jobs", "submitted_by")
