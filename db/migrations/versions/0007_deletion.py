"""Deletion of clusters, nodes, GPU types and Cells, and the reason, author and time of drains."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_INDEXES = (
    ("jobs", "workload_id", ""),
    ("jobs", "cell_type_id", "cell_type_id IS NOT NULL"),
    ("jobs", "cell_plan_id", "cell_plan_id IS NOT NULL"),
    ("jobs", "leader_id", "leader_id IS NOT NULL"),
    ("nodes", "gpu_type_id", ""),
    ("estimates", "plan_id", ""),
    ("measurements", "plan_id", ""),
)
"""Indexes for the foreign keys that a deletion checks, with the predicates of partial ones."""


def _whole(name: str, default: str | None = None) -> sa.Column[int]:
    default_sql = None if default is None else sa.text(default)
    return sa.Column(name, sa.BigInteger(), server_default=default_sql, nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(collation="C"), server_default=sa.text("''"), nullable=False)


def _moment(name: str) -> sa.Column[object]:
    return sa.Column(name, postgresql.TIMESTAMP(timezone=True), nullable=True)


def upgrade() -> None:
    """Apply the migration. Nothing is deleted, and no reasons for drains are known."""
    op.add_column("clusters", _moment("deleted_at"))
    op.add_column("clusters", _whole("node_version", "0"))
    op.create_table(
        "high_water",
        sa.Column("one", sa.Boolean(), server_default=sa.true(), nullable=False),
        _whole("version"),
        _whole("epoch"),
        _whole("revision"),
        sa.CheckConstraint("one", name=op.f("ck_high_water_one")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_high_water")),
    )
    op.add_column(
        "agents",
        sa.Column(
            "deleted_nodes", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False
        ),
    )
    op.add_column("nodes", _text("drain_reason"))
    op.add_column("nodes", _text("drained_by"))
    op.add_column("nodes", _moment("drained_at"))
    op.create_check_constraint(
        op.f("ck_nodes_drain"),
        "nodes",
        "draining OR (drained_at IS NULL AND drain_reason = '' AND drained_by = '')",
    )
    for table, column, where in _INDEXES:
        op.create_index(
            op.f(f"ix_{table}_{column}"),
            table,
            [column],
            postgresql_where=sa.text(where) if where else None,
        )


def downgrade() -> None:
    """Undo the migration.

    Deleted clusters must be gone, because the older release would show them again.
    """
    op.execute("""
DO $$
BEGIN
    IF EXISTS (SELECT FROM clusters WHERE deleted_at IS NOT NULL) THEN
        RAISE EXCEPTION 'deleted clusters are still being removed; let a server of this release finish';
    END IF;
END $$
""")
    for table, column, _ in reversed(_INDEXES):
        op.drop_index(op.f(f"ix_{table}_{column}"), table)
    op.drop_constraint(op.f("ck_nodes_drain"), "nodes")
    op.drop_column("nodes", "drained_at")
    op.drop_column("nodes", "drained_by")
    op.drop_column("nodes", "drain_reason")
    op.drop_column("agents", "deleted_nodes")
    op.drop_table("high_water")
    op.drop_column("clusters", "node_version")
    op.drop_column("clusters", "deleted_at")
