"""Plans that programs may try at launch, and estimates that such a tuning measured."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_NAME = sa.Text(collation="C")


def upgrade() -> None:
    """Apply the migration. No estimate was measured by a tuning."""
    op.add_column(
        "estimates", sa.Column("tuned", _NAME, server_default=sa.text("''"), nullable=False)
    )
    op.add_column(
        "trainings",
        sa.Column("tuned_generation", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
    )
    op.create_table(
        "tunings",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("workload_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=False),
        sa.Column("plan_id", sa.BigInteger(), nullable=False),
        sa.Column("runtime", _NAME, nullable=False),
        sa.Column("space", _NAME, nullable=False),
        sa.Column("plans", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("space_plans", sa.BigInteger(), nullable=False),
        sa.Column("whole_plans", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "space_plans >= 0 AND whole_plans >= space_plans", name=op.f("ck_tunings_counts")
        ),
        sa.ForeignKeyConstraint(
            ["workload_id"],
            ["workloads.id"],
            name=op.f("fk_tunings_workload_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"],
            ["gpu_types.id"],
            name=op.f("fk_tunings_gpu_type_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["plan_id"], ["plans.id"], name=op.f("fk_tunings_plan_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tunings")),
        sa.UniqueConstraint(
            "plan_id", "gpu_type_id", "workload_id", "runtime", "space", name="uq_tunings_plan"
        ),
    )
    op.create_index(op.f("ix_tunings_workload_id"), "tunings", ["workload_id"])
    op.create_index(op.f("ix_tunings_gpu_type_id"), "tunings", ["gpu_type_id"])


def downgrade() -> None:
    """Undo the migration. Times that tunings measured stay estimates."""
    op.drop_table("tunings")
    op.drop_column("trainings", "tuned_generation")
    op.drop_column("estimates", "tuned")
