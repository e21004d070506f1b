"""The use of host memory by jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

COUNTS = "ck_stints_counts"


def upgrade() -> None:
    """Apply the migration. What jobs used before is not known, and counts as 0."""
    op.add_column(
        "stints",
        sa.Column("host_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
    )
    op.add_column(
        "usage_days",
        sa.Column(
            "host_byte_s", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False
        ),
    )
    op.drop_constraint(op.f(COUNTS), "stints", type_="check")
    op.create_check_constraint(op.f(COUNTS), "stints", "gpus > 0 AND cpus >= 0 AND host_bytes >= 0")


def downgrade() -> None:
    """Undo the migration. The use of host memory is lost."""
    op.drop_constraint(op.f(COUNTS), "stints", type_="check")
    op.create_check_constraint(op.f(COUNTS), "stints", "gpus > 0 AND cpus >= 0")
    op.drop_column("usage_days", "host_byte_s")
    op.drop_column("stints", "host_bytes")
