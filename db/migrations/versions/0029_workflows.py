"""Dependencies and arrays of jobs, and webhooks that report events of jobs."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

TRANSITIONS = """
CREATE OR REPLACE FUNCTION check_job_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.state, NEW.state) NOT IN (
        ('queued', 'cancelled'),
        ('queued', 'failed'),
        ('queued', 'held'),
        ('queued', 'rejected'),
        ('queued', 'starting'),
        ('held', 'cancelled'),
        ('held', 'queued'),{held_rejected}
        ('starting', 'cancelling'),
        ('starting', 'failing'),
        ('starting', 'holding'),
        ('starting', 'running'),
        ('starting', 'stopping'),
        ('starting', 'succeeded'),
        ('running', 'cancelling'),
        ('running', 'failing'),
        ('running', 'holding'),
        ('running', 'starting'),
        ('running', 'stopping'),
        ('running', 'succeeded'),
        ('stopping', 'cancelling'),
        ('stopping', 'failing'),
        ('stopping', 'holding'),
        ('stopping', 'queued'),
        ('stopping', 'starting'),
        ('stopping', 'succeeded'),
        ('holding', 'cancelling'),
        ('holding', 'held'),
        ('holding', 'stopping'),
        ('holding', 'succeeded'),
        ('cancelling', 'cancelled'),
        ('cancelling', 'succeeded'),
        ('failing', 'failed')
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot become %', OLD.state, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_transition';
    END IF;
    RETURN NEW;
END $$
"""


def _text(name: str, default: str | None = None) -> sa.Column[str]:
    default_sql = None if default is None else sa.text(f"'{default}'")
    return sa.Column(name, sa.Text(collation="C"), server_default=default_sql, nullable=False)


def _count(name: str, default: str | None = "0") -> sa.Column[int]:
    default_sql = None if default is None else sa.text(default)
    return sa.Column(name, sa.BigInteger(), server_default=default_sql, nullable=False)


def _moment(name: str, **more: Any) -> sa.Column[Any]:
    return sa.Column(name, postgresql.TIMESTAMP(timezone=True), **more)


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False)


def upgrade() -> None:
    """Apply the migration. No job waits for another one, and there are no arrays and no webhooks."""
    now: dict[str, Any] = {"server_default": sa.text("now()"), "nullable": False}
    op.create_table(
        "job_arrays",
        _id(),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        _text("name"),
        _text("tenant", ""),
        _count("size", None),
        _count("running_limit"),
        _count("ended"),
        _count("lost"),
        _moment("created_at", **now),
        sa.CheckConstraint("size > 0 AND running_limit >= 0", name=op.f("ck_job_arrays_size")),
        sa.CheckConstraint(
            "lost BETWEEN 0 AND ended AND ended <= size", name=op.f("ck_job_arrays_ends")
        ),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_job_arrays_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_arrays")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_job_arrays_cluster_id_name")),
    )
    op.add_column("jobs", _count("unmet"))
    op.add_column("jobs", sa.Column("array_id", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("array_index", sa.BigInteger(), nullable=True))
    op.create_foreign_key(op.f("fk_jobs_array_id"), "jobs", "job_arrays", ["array_id"], ["id"])
    op.create_index(
        "ix_jobs_array_id",
        "jobs",
        ["array_id"],
        postgresql_where=sa.text("array_id IS NOT NULL"),
    )
    op.create_check_constraint(
        op.f("ck_jobs_dependencies"),
        "jobs",
        "unmet = 0 OR (unmet > 0 AND state IN ('queued', 'held', 'cancelled', 'rejected'))",
    )
    op.create_check_constraint(
        op.f("ck_jobs_array"), "jobs", "(array_id IS NULL) = (array_index IS NULL)"
    )
    op.create_table(
        "job_dependencies",
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        _text("name"),
        _text("tenant"),
        _text("condition"),
        sa.Column("met", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("on_job_id", sa.BigInteger(), nullable=True),
        sa.Column("on_array_id", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "condition IN ('succeeded', 'ended', 'failed')",
            name=op.f("ck_job_dependencies_condition"),
        ),
        sa.CheckConstraint(
            "num_nonnulls(on_job_id, on_array_id) <= 1", name=op.f("ck_job_dependencies_target")
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_dependencies_job_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["on_job_id"],
            ["jobs.id"],
            name=op.f("fk_job_dependencies_on_job_id"),
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(
            ["on_array_id"],
            ["job_arrays.id"],
            name=op.f("fk_job_dependencies_on_array_id"),
            ondelete="SET NULL",
        ),
        sa.PrimaryKeyConstraint("job_id", "position", name=op.f("pk_job_dependencies")),
    )
    for column in ("on_job_id", "on_array_id"):
        op.create_index(
            op.f(f"ix_job_dependencies_{column}"),
            "job_dependencies",
            [column],
            postgresql_where=sa.text(f"{column} IS NOT NULL"),
        )
    op.execute(TRANSITIONS.format(held_rejected="\n        ('held', 'rejected'),"))
    op.create_table(
        "webhooks",
        _id(),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        _text("name"),
        _text("tenant", ""),
        sa.Column("all_tenants", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        _text("url"),
        sa.Column("events", postgresql.ARRAY(sa.Text(collation="C")), nullable=False),
        sa.Column("labels", postgresql.JSONB(), nullable=False),
        _text("salt"),
        _text("created_by"),
        _moment("created_at", **now),
        _count("delivered"),
        _moment("delivered_at", nullable=True),
        _count("failures"),
        _text("last_error", ""),
        _moment("retry_at", nullable=True),
        _moment("claimed_until", nullable=True),
        sa.Column("dead", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint("delivered >= 0 AND failures >= 0", name=op.f("ck_webhooks_counts")),
        sa.CheckConstraint("jsonb_typeof(labels) = 'object'", name=op.f("ck_webhooks_labels")),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_webhooks_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_webhooks_cluster_id_name")),
    )
    op.create_table(
        "webhook_events",
        _id(),
        sa.Column("webhook_id", sa.BigInteger(), nullable=False),
        _moment("at", **now),
        _text("event"),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name=op.f("fk_webhook_events_webhook_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_events")),
    )
    op.create_index(op.f("ix_webhook_events_webhook_id_id"), "webhook_events", ["webhook_id", "id"])


def downgrade() -> None:
    """Undo the migration. Webhooks are lost, and no job waits for another one any more."""
    op.drop_table("webhook_events")
    op.drop_table("webhooks")
    op.execute(TRANSITIONS.format(held_rejected=""))
    op.drop_table("job_dependencies")
    op.drop_constraint(op.f("ck_jobs_array"), "jobs", type_="check")
    op.drop_constraint(op.f("ck_jobs_dependencies"), "jobs", type_="check")
    for name in ("array_index", "array_id", "unmet"):
        op.drop_column("jobs", name)
    op.drop_table("job_arrays")
