"""The health of nodes."""

from __future__ import annotations

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""


def downgrade() -> None:
    """Undo the migration."""
