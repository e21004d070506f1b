"""Standing policies of rounds, by version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0030"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Rounds follow the server's settings until a policy is set."""
    op.create_table(
        "policies",
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("options", postgresql.JSONB(), nullable=True),
        sa.Column("set_by", sa.Text(collation="C"), nullable=False),
        sa.Column(
            "set_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("message", sa.Text(collation="C"), nullable=False),
        sa.CheckConstraint("version > 0", name=op.f("ck_policies_version")),
        sa.CheckConstraint("jsonb_typeof(options) = 'object'", name=op.f("ck_policies_options")),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_policies_cluster_id")
        ),
        sa.PrimaryKeyConstraint("cluster_id", "version", name=op.f("pk_policies")),
    )


def downgrade() -> None:
    """Undo the migration. Policies are lost; rounds follow the server's settings again."""
    op.drop_table("policies")
