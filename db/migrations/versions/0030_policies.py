"""Standing policies of rounds, by version, and the shadows that are compared with them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0030"
down_revision = "0029"
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
    op.create_table(
        "shadows",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("options", postgresql.JSONB(), nullable=False),
        sa.Column("set_by", sa.Text(collation="C"), nullable=False),
        sa.Column(
            "set_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("message", sa.Text(collation="C"), nullable=False),
        sa.CheckConstraint("jsonb_typeof(options) = 'object'", name=op.f("ck_shadows_options")),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_shadows_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shadows")),
        sa.UniqueConstraint("cluster_id", name=op.f("uq_shadows_cluster_id")),
    )
    op.create_table(
        "shadow_rounds",
        sa.Column("shadow_id", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        sa.CheckConstraint("number > 0", name=op.f("ck_shadow_rounds_number")),
        sa.ForeignKeyConstraint(
            ["shadow_id"],
            ["shadows.id"],
            name=op.f("fk_shadow_rounds_shadow_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("shadow_id", "number", name=op.f("pk_shadow_rounds")),
    )


def downgrade() -> None:
    """Undo the migration. Policies are lost; rounds follow the server's settings again."""
    op.drop_table("shadow_rounds")
    op.drop_table("shadows")
    op.drop_table("policies")
