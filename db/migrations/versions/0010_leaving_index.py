"""An index of jobs that are leaving: each turn of a cluster looks for them, and there are few."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.create_index(
        op.f("ix_jobs_leaving"),
        "jobs",
        ["cluster_id", "id"],
        postgresql_where=sa.text("state IN ('cancelling', 'failing', 'holding', 'stopping')"),
    )


def downgrade() -> None:
    """Undo the migration."""
    op.drop_index(op.f("ix_jobs_leaving"), "jobs")
