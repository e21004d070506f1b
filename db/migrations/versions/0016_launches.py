"""The way in which jobs are started."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Jobs that were stored before go on as they were: they are replayed."""
    op.add_column(
        "jobs",
        sa.Column("runtime", sa.Text(collation="C"), server_default="replay", nullable=False),
    )
    op.add_column(
        "jobs",
        sa.Column(
            "launch",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
    )
    op.execute("""
        UPDATE jobs j SET runtime = 'profile' FROM workloads w
        WHERE w.id = j.workload_id AND w.model = 'tessera.profiling'""")
    op.alter_column("jobs", "runtime", server_default=None)
    op.create_check_constraint(
        op.f("ck_jobs_launch"), "jobs", "runtime <> '' AND jsonb_typeof(launch) = 'object'"
    )


def downgrade() -> None:
    """Undo the migration. All jobs are replayed, and those with another command than fail-at fail."""
    op.drop_constraint(op.f("ck_jobs_launch"), "jobs", type_="check")
    op.drop_column("jobs", "launch")
    op.drop_column("jobs", "runtime")
