"""Forecasts of when jobs start and finish."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0026"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. There are no forecasts until the first one is made."""
    op.create_table(
        "forecasts",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("made_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_forecasts_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_forecasts")),
    )
    op.create_table(
        "forecast_spreads",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.Text(collation="C"), nullable=False),
        sa.Column("made_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("times_s", postgresql.ARRAY(postgresql.DOUBLE_PRECISION()), nullable=False),
        sa.CheckConstraint("event IN ('start', 'finish')", name=op.f("ck_forecast_spreads_event")),
        sa.CheckConstraint("cardinality(times_s) > 0", name=op.f("ck_forecast_spreads_times")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_forecast_spreads_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "event", name=op.f("pk_forecast_spreads")),
    )


def downgrade() -> None:
    """Undo the migration. Forecasts are lost; they are made again after an upgrade."""
    op.drop_table("forecast_spreads")
    op.drop_table("forecasts")
