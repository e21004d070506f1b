"""The contents of execution plans, which were only names."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Names of plans that were stored before stay without contents."""
    op.add_column(
        "plans",
        sa.Column("document", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False),
    )
    op.create_check_constraint(
        op.f("ck_plans_digest"),
        "plans",
        "document = '' OR name = encode(sha256(convert_to(document, 'UTF8')), 'hex')",
    )


def downgrade() -> None:
    """Undo the migration. Plans keep their digests as names, and lose their contents."""
    op.drop_constraint(op.f("ck_plans_digest"), "plans", type_="check")
    op.drop_column("plans", "document")
