"""Allowed GPU types, node labels and selectors, and longest run times."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0028"
down_revision = "0026"
branch_labels = None
depends_on = None

TRANSITIONS = (
    ("queued", "cancelled"),
    ("queued", "failed"),
    ("queued", "held"),
    ("queued", "rejected"),
    ("queued", "starting"),
    ("held", "cancelled"),
    ("held", "queued"),
    ("starting", "cancelling"),
    ("starting", "failing"),
    ("starting", "holding"),
    ("starting", "running"),
    ("starting", "stopping"),
    ("starting", "succeeded"),
    ("running", "cancelling"),
    ("running", "failing"),
    ("running", "holding"),
    ("running", "starting"),
    ("running", "stopping"),
    ("running", "succeeded"),
    ("stopping", "cancelling"),
    ("stopping", "failing"),
    ("stopping", "holding"),
    ("stopping", "queued"),
    ("stopping", "starting"),
    ("stopping", "succeeded"),
    ("holding", "cancelling"),
    ("holding", "held"),
    ("holding", "stopping"),
    ("holding", "succeeded"),
    ("cancelling", "cancelled"),
    ("cancelling", "succeeded"),
    ("failing", "failed"),
)
"""The changes of state of a job."""

NEW_TRANSITIONS = frozenset({("queued", "failed"), ("stopping", "failing")})
"""Those of jobs that have run for their longest run time."""

CHECKS = {
    "allowed_types": "jsonb_typeof(allowed_types) = 'array'",
    "run_time": "longest_run_s > 0 AND longest_run_s <= 'Infinity' AND run_s >= 0"
    " AND run_s < 'Infinity'",
}


def _function(pairs: list[tuple[str, str]]) -> str:
    """Return the statement that makes the trigger function allow only these changes of state."""
    listed = ",\n        ".join(f"('{before}', '{after}')" for before, after in pairs)
    return f"""
CREATE OR REPLACE FUNCTION check_job_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.state, NEW.state) NOT IN (
        {listed}
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot become %', OLD.state, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_transition';
    END IF;
    RETURN NEW;
END $$
"""


def upgrade() -> None:
    """Apply the migration. Jobs may run on all types and nodes, and as long as they like.

    The time that running jobs had before their present allocation is not known.
    """
    for name in ("node_selector", "preferred_labels"):
        op.add_column(
            "jobs",
            sa.Column(name, sa.Text(collation="C"), server_default=sa.text("''"), nullable=False),
        )
    for name, default in (("longest_run_s", "'Infinity'"), ("run_s", "0")):
        op.add_column(
            "jobs",
            sa.Column(
                name, postgresql.DOUBLE_PRECISION(), server_default=sa.text(default), nullable=False
            ),
        )
    for table, name, default in (("jobs", "allowed_types", "'[]'"), ("nodes", "labels", "'{}'")):
        op.add_column(
            table,
            sa.Column(name, postgresql.JSONB(), server_default=sa.text(default), nullable=False),
        )
    for name, condition in CHECKS.items():
        op.create_check_constraint(op.f(f"ck_jobs_{name}"), "jobs", condition)
    op.create_check_constraint(op.f("ck_nodes_labels"), "nodes", "jsonb_typeof(labels) = 'object'")
    op.execute(_function(list(TRANSITIONS)))


def downgrade() -> None:
    """Undo the migration. Rounds may give jobs any type and node again, for any time."""
    op.execute(_function([pair for pair in TRANSITIONS if pair not in NEW_TRANSITIONS]))
    op.drop_constraint(op.f("ck_nodes_labels"), "nodes")
    for name in CHECKS:
        op.drop_constraint(op.f(f"ck_jobs_{name}"), "jobs")
    op.drop_column("nodes", "labels")
    for name in ("allowed_types", "run_s", "longest_run_s", "preferred_labels", "node_selector"):
        op.drop_column("jobs", name)
