"""Uncertainty of estimates, the service's own estimates, models, and measurements of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_FLOAT = postgresql.DOUBLE_PRECISION


def _name(name: str, default: str | None = None) -> sa.Column[str]:
    default_sql = None if default is None else sa.text(f"'{default}'")
    return sa.Column(name, sa.Text(collation="C"), server_default=default_sql, nullable=False)


def _whole(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[int]:
    default_sql = None if default is None else sa.text(default)
    return sa.Column(name, sa.BigInteger(), server_default=default_sql, nullable=nullable)


def _key() -> sa.Column[int]:
    return sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False)


def upgrade() -> None:
    """Apply the migration.

    Stored estimates were written by users, and their uncertainty is unknown.
    """
    op.add_column("workloads", _name("derived_from", ""))
    op.add_column("workloads", sa.Column("waits_for", postgresql.JSONB()))
    op.add_column("estimates", sa.Column("sd", _FLOAT(), nullable=True))
    derived: sa.Column[bool] = sa.Column(
        "derived", sa.Boolean(), server_default=sa.false(), nullable=False
    )
    op.add_column("estimates", derived)
    op.create_check_constraint(op.f("ck_estimates_sd"), "estimates", "sd >= 0 AND sd < 'Infinity'")
    op.create_table(
        "models",
        _key(),
        _whole("cluster_id"),
        _name("model"),
        _name("params"),
        _name("architecture"),
        sa.Column("reading", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_models_cluster_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint(
            "cluster_id", "model", "params", name=op.f("uq_models_cluster_id_model_params")
        ),
    )
    _create_measurements()


def _create_measurements() -> None:
    references = {
        "workload_id": "workloads.id",
        "gpu_type_id": "gpu_types.id",
        "plan_id": "plans.id",
    }
    op.create_table(
        "measurements",
        _key(),
        _whole("workload_id"),
        _whole("gpu_type_id"),
        _whole("gpus"),
        _whole("nodes"),
        _whole("pipeline_degree"),
        _whole("plan_id"),
        _whole("job_id", nullable=True),
        _whole("generation"),
        _whole("skipped", default="0"),
        sa.Column(
            "samples", postgresql.ARRAY(_FLOAT()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("iter_time_s", _FLOAT(), nullable=True),
        sa.Column(
            "changed_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        *(
            sa.ForeignKeyConstraint([column], [target], name=op.f(f"fk_measurements_{column}"))
            for column, target in references.items()
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_measurements_job_id"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurements")),
        sa.UniqueConstraint("job_id", "generation", name=op.f("uq_measurements_job_id_generation")),
        sa.CheckConstraint(
            "gpus > 0 AND nodes BETWEEN 1 AND gpus", name=op.f("ck_measurements_shape")
        ),
        sa.CheckConstraint(
            "iter_time_s > 0 AND iter_time_s < 'Infinity'", name=op.f("ck_measurements_iter_time")
        ),
    )
    op.create_index(op.f("ix_measurements_workload_id"), "measurements", ["workload_id"])
    op.create_index(op.f("ix_measurements_gpu_type_id"), "measurements", ["gpu_type_id"])


def downgrade() -> None:
    """Undo the migration. Estimates made by the service are kept, as if users had written them."""
    op.drop_table("measurements")
    op.drop_table("models")
    op.drop_constraint(op.f("ck_estimates_sd"), "estimates")
    for table, columns in (
        ("estimates", ("sd", "derived")),
        ("workloads", ("derived_from", "waits_for")),
    ):
        for name in columns:
            op.drop_column(table, name)
