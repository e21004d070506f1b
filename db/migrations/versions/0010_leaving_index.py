"""Each turn of a cluster looks for jobs that have left: by an index, as there are few of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index(
        op.f("ix_jobs_leaving"),
        "jobs",
        ["cluster_id", "id"],
        postgresql_where=sa.text("state IN ('cancelling', 'failing', 'holding', 'stopping')"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_index(op.f("ix_jobs_leaving"), "jobs")
