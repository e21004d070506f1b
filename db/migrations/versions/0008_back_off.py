"""A back-off for jobs that failed: they wait before they are tried again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration.

    No job waits after a failure yet, and running times count from the next start.
    """
    op.add_column(
        "jobs", sa.Column("failures", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    for name in ("retry_at", "ran_at"):
        op.add_column("jobs", sa.Column(name, postgresql.TIMESTAMP(timezone=True), nullable=True))
    op.create_check_constraint(op.f("ck_jobs_back_off"), "jobs", "failures >= 0")


def downgrade() -> None:
    """Undo the migration. The next round may start jobs that failed."""
    op.drop_constraint(op.f("ck_jobs_back_off"), "jobs")
    for name in ("ran_at", "retry_at", "failures"):
        op.drop_column("jobs", name)
