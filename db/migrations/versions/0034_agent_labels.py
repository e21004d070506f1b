"""The labels that agents give to their nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Agents give labels when they register next."""
    op.add_column(
        "nodes",
        sa.Column(
            "agent_labels",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
    )
    op.create_check_constraint(
        op.f("ck_nodes_agent_labels"), "nodes", "jsonb_typeof(agent_labels) = 'object'"
    )


def downgrade() -> None:
    """Undo the migration. Agents' labels are lost, so jobs that require them wait."""
    op.drop_column("nodes", "agent_labels")
