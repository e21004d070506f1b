"""CPU cores, host memory, submitted plans and techniques; nodes never give more than they have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

FUNCTIONS = (
    """
CREATE FUNCTION require_node_capacity(node bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    has record;
    needs record;
BEGIN
    IF NOT EXISTS (
        SELECT FROM nodes n WHERE n.id = node
            AND (coalesce(n.cpus, n.found_cpus) IS NOT NULL
                OR coalesce(n.host_bytes, n.found_host_bytes) IS NOT NULL)
    ) THEN
        RETURN;
    END IF;
    -- Whoever gives something of this node away waits here, and then sees what others gave.
    SELECT n.name, coalesce(n.cpus, n.found_cpus) AS cpus,
        coalesce(n.host_bytes, n.found_host_bytes) AS host_bytes
    INTO has FROM nodes n WHERE n.id = node FOR NO KEY UPDATE;
    -- A job's share is that of its GPUs here, rounded up, as in formulation.demand. Whole parts and
    -- the rest are multiplied separately, so that nothing overflows.
    SELECT coalesce(sum(cell_cpus / cell_gpus * gpus
            + (cell_cpus % cell_gpus * gpus + cell_gpus - 1) / cell_gpus), 0) AS cpus,
        coalesce(sum(cell_host_bytes / cell_gpus * gpus
            + (cell_host_bytes % cell_gpus * gpus + cell_gpus - 1) / cell_gpus), 0) AS host_bytes
    INTO needs FROM (
        SELECT j.cell_cpus, j.cell_host_bytes, j.cell_gpus, count(*) AS gpus
        FROM allocations a JOIN jobs j ON j.id = a.job_id
        WHERE a.node_id = node AND a.hold <> 'releasing' AND j.cell_gpus > 0 GROUP BY j.id
    ) AS shares;
    IF needs.cpus > has.cpus THEN
        RAISE EXCEPTION 'node % has % CPU cores, but its jobs need %; stop or move one of them first,'
            ' or state more cores', has.name, has.cpus, needs.cpus
            USING ERRCODE = 'check_violation', CONSTRAINT = 'node_capacity';
    END IF;
    IF needs.host_bytes > has.host_bytes THEN
        RAISE EXCEPTION 'node % has % bytes of host memory, but its jobs need %; stop or move one of'
            ' them first, or state more memory', has.name, has.host_bytes, needs.host_bytes
            USING ERRCODE = 'check_violation', CONSTRAINT = 'node_capacity';
    END IF;
END $$
""",
    """
CREATE FUNCTION check_allocation_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(NEW.node_id);
    RETURN NULL;
END $$
""",
    """
CREATE FUNCTION check_job_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(a.node_id) FROM (
        SELECT DISTINCT node_id FROM allocations WHERE job_id = NEW.id AND hold <> 'releasing'
        ORDER BY node_id
    ) AS a;
    RETURN NULL;
END $$
""",
    """
CREATE FUNCTION check_node_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(NEW.id);
    RETURN NULL;
END $$
""",
)

TRIGGERS = (
    """
CREATE CONSTRAINT TRIGGER allocations_capacity AFTER INSERT ON allocations
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.hold <> 'releasing') EXECUTE FUNCTION check_allocation_capacity()
""",
    """
CREATE CONSTRAINT TRIGGER allocations_moved_capacity AFTER UPDATE OF node_id, job_id, hold ON allocations
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.hold <> 'releasing' AND (
    OLD.hold = 'releasing' OR NEW.node_id <> OLD.node_id OR NEW.job_id <> OLD.job_id
)) EXECUTE FUNCTION check_allocation_capacity()
""",
    """
CREATE CONSTRAINT TRIGGER jobs_capacity AFTER UPDATE OF cell_cpus, cell_host_bytes, cell_gpus ON jobs
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN ((NEW.cell_cpus > 0 OR NEW.cell_host_bytes > 0)
    AND (NEW.cell_cpus, NEW.cell_host_bytes, NEW.cell_gpus)
        IS DISTINCT FROM (OLD.cell_cpus, OLD.cell_host_bytes, OLD.cell_gpus))
EXECUTE FUNCTION check_job_capacity()
""",
    """
CREATE CONSTRAINT TRIGGER nodes_capacity
AFTER UPDATE OF cpus, host_bytes, found_cpus, found_host_bytes ON nodes
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN ((NEW.cpus, NEW.host_bytes, NEW.found_cpus, NEW.found_host_bytes)
    IS DISTINCT FROM (OLD.cpus, OLD.host_bytes, OLD.found_cpus, OLD.found_host_bytes))
EXECUTE FUNCTION check_node_capacity()
""",
)

CHECKS = {
    "nodes": {
        "resources": "cpus >= 0 AND host_bytes >= 0 AND found_cpus >= 0 AND found_host_bytes >= 0"
    },
    "estimates": {"demand": "cpus >= 0 AND host_bytes >= 0"},
    "jobs": {
        "techniques": "requested_cpus >= 0 AND jsonb_typeof(techniques) = 'array'",
        "cell_demand": "cell_cpus >= 0 AND cell_host_bytes >= 0"
        " AND (cell_gpus IS NOT NULL OR (cell_cpus = 0 AND cell_host_bytes = 0))",
    },
}

COUNTS = {
    "estimates": ("cpus", "host_bytes"),
    "jobs": ("requested_cpus", "cell_cpus", "cell_host_bytes"),
}
"""Columns of numbers of which nothing was known: 0."""

NODE_COLUMNS = ("cpus", "host_bytes", "found_cpus", "found_host_bytes")


def upgrade() -> None:
    """Apply the migration. No node states its cores or memory, and no Cell is known to need any."""
    for name in NODE_COLUMNS:
        op.add_column("nodes", sa.Column(name, sa.BigInteger(), nullable=True))
    for table, names in COUNTS.items():
        for name in names:
            column = sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)
            op.add_column(table, column)
    op.add_column(
        "jobs",
        sa.Column("techniques", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
    )
    op.add_column("jobs", sa.Column("submitted_plan_id", sa.BigInteger(), nullable=True))
    op.create_foreign_key(
        op.f("fk_jobs_submitted_plan_id"), "jobs", "plans", ["submitted_plan_id"], ["id"]
    )
    op.create_index(
        op.f("ix_jobs_submitted_plan_id"),
        "jobs",
        ["submitted_plan_id"],
        postgresql_where=sa.text("submitted_plan_id IS NOT NULL"),
    )
    for table, checks in CHECKS.items():
        for name, condition in checks.items():
            op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, condition)
    for statement in (*FUNCTIONS, *TRIGGERS):
        op.execute(statement)


def downgrade() -> None:
    """Undo the migration. Jobs are no longer limited by techniques, cores or host memory."""
    for trigger, table in (
        ("allocations_capacity", "allocations"),
        ("allocations_moved_capacity", "allocations"),
        ("jobs_capacity", "jobs"),
        ("nodes_capacity", "nodes"),
    ):
        op.execute(f"DROP TRIGGER {trigger} ON {table}")
    for function in (
        "check_allocation_capacity()",
        "check_job_capacity()",
        "check_node_capacity()",
        "require_node_capacity(bigint)",
    ):
        op.execute(f"DROP FUNCTION {function}")
    for table, checks in CHECKS.items():
        for name in checks:
            op.drop_constraint(op.f(f"ck_{table}_{name}"), table, type_="check")
    op.drop_index(op.f("ix_jobs_submitted_plan_id"), "jobs")
    op.drop_constraint(op.f("fk_jobs_submitted_plan_id"), "jobs", type_="foreignkey")
    for name in ("submitted_plan_id", "techniques", *COUNTS["jobs"]):
        op.drop_column("jobs", name)
    for name in COUNTS["estimates"]:
        op.drop_column("estimates", name)
    for name in NODE_COLUMNS:
        op.drop_column("nodes", name)
