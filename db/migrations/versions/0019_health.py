"""The health of nodes: the faults that agents report, and drains that these faults cause."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. No faults are known, and all drains are those of operators."""
    op.add_column(
        "nodes",
        sa.Column("health_drain", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    for name in ("faults", "excused_faults"):
        op.add_column(
            "nodes",
            sa.Column(name, postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
        )
    op.add_column(
        "nodes",
        sa.Column("probation_until", postgresql.TIMESTAMP(timezone=True), nullable=True),
    )
    op.create_check_constraint(
        op.f("ck_nodes_health_drain"), "nodes", "draining OR NOT health_drain"
    )
    op.create_check_constraint(
        op.f("ck_nodes_probation"), "nodes", "health_drain OR probation_until IS NULL"
    )


def downgrade() -> None:
    """Undo the migration. Nodes that health drained stay drained until an operator undrains them."""
    op.drop_constraint(op.f("ck_nodes_probation"), "nodes", type_="check")
    op.drop_constraint(op.f("ck_nodes_health_drain"), "nodes", type_="check")
    for name in ("probation_until", "excused_faults", "faults", "health_drain"):
        op.drop_column("nodes", name)
