"""Requests for the output of jobs, and where it is."""

from __future__ import annotations

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""


def downgrade() -> None:
    """Undo the migration."""
