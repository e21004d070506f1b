"""The execution plans that users state for their jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.add_column("jobs", sa.Column("stated_plan_id", sa.BigInteger(), nullable=True))
    op.add_column(
        "jobs",
        sa.Column(
            "stated_plan_first", sa.Boolean(), server_default=sa.text("false"), nullable=False
        ),
    )
    op.create_foreign_key(
        op.f("fk_jobs_stated_plan_id"), "jobs", "plans", ["stated_plan_id"], ["id"]
    )
    op.create_check_constraint(
        op.f("ck_jobs_stated_plan"), "jobs", "NOT stated_plan_first OR stated_plan_id IS NOT NULL"
    )
    op.create_index(
        op.f("ix_jobs_stated_plan_id"),
        "jobs",
        ["stated_plan_id"],
        postgresql_where=sa.text("stated_plan_id IS NOT NULL"),
    )


def downgrade() -> None:
    """Undo the migration. Jobs run by the plans that rounds choose."""
    op.drop_index(op.f("ix_jobs_stated_plan_id"), "jobs")
    op.drop_constraint(op.f("ck_jobs_stated_plan"), "jobs", type_="check")
    op.drop_constraint(op.f("fk_jobs_stated_plan_id"), "jobs", type_="foreignkey")
    op.drop_column("jobs", "stated_plan_first")
    op.drop_column("jobs", "stated_plan_id")
