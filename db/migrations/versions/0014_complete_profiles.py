"""Complete profiles: what they do not have does not run, so nothing is inferred from them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. No stored profile is known to be complete."""
    op.add_column(
        "estimates",
        sa.Column("complete", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )


def downgrade() -> None:
    """Undo the migration. Rates of other shapes are inferred from complete profiles again."""
    op.drop_column("estimates", "complete")
