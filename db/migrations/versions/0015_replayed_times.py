"""The source of reported iteration times: jobs that were measured, and jobs that were replayed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Times that were stored before count as measured: nothing tells them apart."""
    op.add_column(
        "measurements",
        sa.Column("source", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
    )
    op.create_check_constraint(op.f("ck_measurements_source"), "measurements", "source IN (0, 3)")


def downgrade() -> None:
    """Undo the migration. Replayed times are deleted, because they would count as measured."""
    op.execute("DELETE FROM measurements WHERE source <> 0")
    op.drop_constraint(op.f("ck_measurements_source"), "measurements", type_="check")
    op.drop_column("measurements", "source")
