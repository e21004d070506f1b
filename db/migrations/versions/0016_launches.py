"""The way in which jobs are started."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.add_column(
        "jobs",
        sa.Column(
            "runtime", sa.Text(collation="C"), server_default=sa.text("'replay'"), nullable=False
        ),
    )


def downgrade() -> None:
    """Undo the migration."""
    op.drop_column("jobs", "runtime")
