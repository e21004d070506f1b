"""Layers measured on one device of a GPU type, and jobs that request these measurements."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def _name(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), nullable=False)


def _whole(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _real(name: str) -> sa.Column[float]:
    return sa.Column(name, postgresql.DOUBLE_PRECISION(), nullable=False)


def upgrade() -> None:
    """Apply the migration. No job has requested profiling yet."""
    profile: sa.Column[bool] = sa.Column(
        "profile", sa.Boolean(), server_default=sa.false(), nullable=False
    )
    op.add_column("jobs", profile)
    op.create_table(
        "profiles",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        _whole("workload_id"),
        _whole("gpu_type_id"),
        *map(_name, ("task", "source", "kind")),
        _whole("layers"),
        _real("samples"),
        _whole("tp"),
        _name("dtype"),
        _real("forward_s"),
        _real("backward_s"),
        _name("method"),
        _whole("repeats"),
        _real("device_s"),
        _name("device"),
        sa.Column("versions", postgresql.JSONB(), nullable=False),
        _name("date"),
        sa.Column(
            "added_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["workload_id"], ["workloads.id"], name=op.f("fk_profiles_workload_id")
        ),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"], ["gpu_types.id"], name=op.f("fk_profiles_gpu_type_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profiles")),
        sa.UniqueConstraint(
            "workload_id",
            "gpu_type_id",
            "task",
            "source",
            "kind",
            "samples",
            "tp",
            name=op.f("uq_profiles_layer"),
        ),
        sa.CheckConstraint(
            "layers > 0 AND tp > 0 AND repeats > 0", name=op.f("ck_profiles_counts")
        ),
        sa.CheckConstraint(
            "samples > 0 AND samples < 'Infinity'", name=op.f("ck_profiles_samples")
        ),
        sa.CheckConstraint(
            "forward_s > 0 AND forward_s < 'Infinity' AND backward_s >= 0"
            " AND backward_s < 'Infinity'",
            name=op.f("ck_profiles_times"),
        ),
        sa.CheckConstraint(
            "device_s >= 0 AND device_s < 'Infinity'", name=op.f("ck_profiles_device")
        ),
    )
    op.create_index(op.f("ix_profiles_gpu_type_id"), "profiles", ["gpu_type_id"])


def downgrade() -> None:
    """Undo the migration.

    Measured layers are lost, but estimates that were made from them are kept.
    """
    op.drop_table("profiles")
    op.drop_column("jobs", "profile")
