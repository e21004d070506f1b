"""What jobs report of their training."""

from __future__ import annotations

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""


def downgrade() -> None:
    """Undo the migration."""
