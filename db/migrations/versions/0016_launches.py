"""The way in which jobs are started."""

from __future__ import annotations

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""


def downgrade() -> None:
    """Undo the migration."""
