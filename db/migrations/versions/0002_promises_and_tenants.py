"""Promises and service of jobs, tenants with quotas, and the cost of GPUs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

CHECKS = {
    "gpu_types": {
        "dollars": "dollars_per_hour >= 0 AND dollars_per_hour < 'Infinity'",
        "watts": "watts >= 0 AND watts < 'Infinity'",
    },
    "jobs": {
        "pinned_type": "NOT pinned_type OR requested_type <> ''",
        "since": "(since_at IS NOT NULL) = (state IN ('running', 'starting'))",
        "service": "service_gpu_s >= 0 AND service_gpu_s < 'Infinity'",
        "certificate": ("jsonb_typeof(certificate) = 'array' AND (admitted OR certificate = '[]')"),
        "rejection": "rejection IS NULL OR state = 'rejected'",
        "opportunistic": "NOT opportunistic OR state IN ('running', 'starting')",
    },
}

FLAGS = {
    "jobs": ("pinned_type", "admitted", "opportunistic"),
    "decisions": ("admitted", "opportunistic"),
}

REALS = {"gpu_types": ("dollars_per_hour", "watts"), "jobs": ("service_gpu_s",)}

MOMENTS = ("queued_at", "since_at")


def upgrade() -> None:
    """Apply the migration.

    Facts that were not recorded begin now: service at 0, and allocations at this moment.
    """
    for table, names in FLAGS.items():
        for name in names:
            flag: sa.Column[bool] = sa.Column(
                name, sa.Boolean(), server_default=sa.false(), nullable=False
            )
            op.add_column(table, flag)
    for table, names in REALS.items():
        for name in names:
            real: sa.Column[float] = sa.Column(
                name, postgresql.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False
            )
            op.add_column(table, real)
    certificate = sa.Column(
        "certificate", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False
    )
    op.add_column("jobs", certificate)
    op.add_column("jobs", sa.Column("rejection", postgresql.JSONB()))
    for name in MOMENTS:
        op.add_column("jobs", sa.Column(name, postgresql.TIMESTAMP(timezone=True)))
    op.execute("""
        UPDATE jobs SET queued_at = created_at,
            since_at = CASE WHEN state IN ('running', 'starting') THEN now() END
    """)
    op.alter_column("jobs", "queued_at", nullable=False, server_default=sa.text("now()"))
    for table, checks in CHECKS.items():
        for name, check in checks.items():
            op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, check)
    _create_tables()


def _create_tables() -> None:
    op.create_table(
        "job_avoids",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("node_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_avoids_job_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_job_avoids_node_id")),
        sa.PrimaryKeyConstraint("job_id", "node_id", name=op.f("pk_job_avoids")),
    )
    op.create_index(op.f("ix_job_avoids_node_id"), "job_avoids", ["node_id"])
    op.create_table(
        "tenants",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("weight", postgresql.DOUBLE_PRECISION(), nullable=False),
        sa.Column("borrow_gpus", sa.BigInteger(), server_default=sa.text("-1"), nullable=False),
        sa.Column("lends", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.CheckConstraint("weight >= 0 AND weight < 'Infinity'", name=op.f("ck_tenants_weight")),
        sa.CheckConstraint("borrow_gpus >= -1", name=op.f("ck_tenants_borrow")),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_tenants_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_tenants_cluster_id_name")),
    )
    op.create_table(
        "quotas",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("tenant_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=True),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("gpus >= 0", name=op.f("ck_quotas_gpus")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_quotas_tenant_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"], ["gpu_types.id"], name=op.f("fk_quotas_gpu_type_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quotas")),
    )
    op.create_index(
        "uq_quotas_tenant_id",
        "quotas",
        ["tenant_id", sa.text("coalesce(gpu_type_id, 0)")],
        unique=True,
    )
    op.create_index(op.f("ix_quotas_gpu_type_id"), "quotas", ["gpu_type_id"])


def downgrade() -> None:
    """Undo the migration."""
    for table in ("quotas", "tenants", "job_avoids"):
        op.drop_table(table)
    for table, checks in CHECKS.items():
        for name in checks:
            op.drop_constraint(op.f(f"ck_{table}_{name}"), table)
    for name in (*MOMENTS, "certificate", "rejection"):
        op.drop_column("jobs", name)
    for columns in (REALS, FLAGS):
        for table, names in columns.items():
            for name in names:
                op.drop_column(table, name)
