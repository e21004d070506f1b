"""Deletion of the comparisons of collectives with those of XLA, and of foresight."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. What was compared is lost. Neither estimates nor decisions depend on it.

    A recorded round that was decided with foresight is replayed without it.
    """
    op.drop_table("collective_checks")
    op.execute("""
UPDATE rounds SET summary = (summary - 'foresight') #- '{options,foresight}'
WHERE summary ? 'foresight' OR summary->'options' ? 'foresight'
""")
    op.execute("UPDATE policies SET options = options - 'foresight'")
    op.execute("UPDATE shadows SET options = options - 'foresight'")


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=False)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), server_default=sa.text("false"), nullable=False)


def downgrade() -> None:
    """Undo the migration. Nothing was compared."""
    op.create_table(
        "collective_checks",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        *map(_text, ("model", "params")),
        sa.Column("dp", sa.BigInteger(), nullable=False),
        sa.Column("tp", sa.BigInteger(), nullable=False),
        _flag("zero"),
        *map(_text, ("release", "note", "problem")),
        _flag("differs"),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        sa.Column(
            "checked_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_collective_checks_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collective_checks")),
        sa.UniqueConstraint(
            "cluster_id",
            "model",
            "params",
            "dp",
            "tp",
            "zero",
            name=op.f("uq_collective_checks_degrees"),
        ),
        sa.CheckConstraint(
            "dp > 0 AND tp > 0 AND dp * tp > 1", name=op.f("ck_collective_checks_degrees")
        ),
    )
