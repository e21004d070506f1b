"""Proofs of rounds: certificates of bounds, and answers that a clock ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Nothing is known of the proofs of earlier rounds."""
    op.add_column("rounds", sa.Column("proof", postgresql.BYTEA(), nullable=True))


def downgrade() -> None:
    """Undo the migration. Proofs are lost, and earlier releases cannot read who made them."""
    op.drop_column("rounds", "proof")
    op.execute("""
        UPDATE rounds SET summary = jsonb_set(
            summary - 'proved_by' - 'has_certificate', '{goals}', (
                SELECT coalesce(jsonb_agg(g.goal - 'proved_by' - 'certified' ORDER BY g.place), '[]')
                FROM jsonb_array_elements(summary -> 'goals') WITH ORDINALITY AS g (goal, place)
            )
        ) WHERE summary ? 'proved_by' OR summary ? 'has_certificate'
            OR summary -> 'goals' @> '[{"certified": true}]' OR summary -> 'goals' @? '$[*].proved_by'
    """)
