"""Starts that failed on nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Starts that failed before are not known."""
    op.add_column(
        "nodes",
        sa.Column("failed_starts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
    )
    op.create_table(
        "failed_starts",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("node_id", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "node_id", name=op.f("pk_failed_starts")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_failed_starts_job_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["node_id"], ["nodes.id"], name=op.f("fk_failed_starts_node_id"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_failed_starts_node_id"), "failed_starts", ["node_id"])
    op.execute(
        "CREATE TRIGGER schema_fence BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON failed_starts"
        " FOR EACH STATEMENT EXECUTE FUNCTION check_stated_schema()"
    )


def downgrade() -> None:
    """Undo the migration. Drains for failed starts become those of an operator."""
    op.drop_table("failed_starts")
    op.drop_column("nodes", "failed_starts")
