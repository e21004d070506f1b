"""Tables of the forecasts of jobs, and of those that later ones learn from."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, JSONB

from tessera.db.schema.tables.columns import metadata, moment_column, one_of, reference_column
from tessera.formulation.records.forecasts import EVENTS

forecasts = sa.Table(  # the newest of each live job
    "forecasts",
    metadata,
    reference_column("job_id", "jobs.id", primary_key=True, ondelete="CASCADE"),
    moment_column("created_at", required=True),
    sa.Column("document", JSONB, nullable=False),  # of tessera.db.base.forecasts
)

forecast_spreads = sa.Table(  # of earlier forecasts, before their correction
    "forecast_spreads",
    metadata,
    reference_column("job_id", "jobs.id", primary_key=True, ondelete="CASCADE"),
    sa.Column("event", sa.Text(collation="C"), primary_key=True),
    moment_column("created_at", required=True),
    sa.Column("times_s", ARRAY(DOUBLE_PRECISION), nullable=False),
    sa.CheckConstraint("event IN " + one_of(list(EVENTS)), name="event"),
    sa.CheckConstraint("cardinality(times_s) > 0", name="times"),
)
"""The first forecast of each event of a job while it waited or ran, with the times in its futures,
in seconds from ``created_at``.

One for each event is enough to learn from, and later ones of the same job would say the same again.
"""

__all__ = ["forecast_spreads", "forecasts"]
