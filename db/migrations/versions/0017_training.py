"""Facts that jobs report of their training."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration. Jobs of earlier releases were replayed, and get no row."""
    op.create_table(
        "trainings",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        _whole("generation"),
        sa.Column("loss", sa.DOUBLE_PRECISION()),
        _whole("memory_bytes"),
        sa.Column("checkpoint_iterations", sa.DOUBLE_PRECISION()),
        sa.Column("checkpoint_at", postgresql.TIMESTAMP(timezone=True)),
        sa.Column("start_times", postgresql.JSONB()),
        sa.Column(
            "restarts_s",
            postgresql.ARRAY(sa.DOUBLE_PRECISION()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("restart_s", sa.DOUBLE_PRECISION()),
        _whole("restart_generation"),
        _text("exit_reason"),
        _text("remark"),
        sa.Column("failed_cell", postgresql.JSONB()),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_trainings_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_trainings")),
        sa.CheckConstraint(
            "loss > '-Infinity' AND loss < 'Infinity'", name=op.f("ck_trainings_loss")
        ),
        sa.CheckConstraint("memory_bytes >= 0", name=op.f("ck_trainings_memory")),
        sa.CheckConstraint(
            "checkpoint_iterations >= 0 AND checkpoint_iterations < 'Infinity'",
            name=op.f("ck_trainings_checkpoint"),
        ),
        sa.CheckConstraint(
            "restart_s > 0 AND restart_s < 'Infinity'", name=op.f("ck_trainings_restart")
        ),
    )


def downgrade() -> None:
    """Undo the migration. Plans that ran out of memory stay infeasible."""
    op.drop_table("trainings")


def _whole(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), server_default=sa.text("''"), nullable=False)
