"""Networks of clusters, the traffic of execution plans, and network plans."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _whole(name: str, default: str | None = None) -> sa.Column[int]:
    default_sql = None if default is None else sa.text(default)
    return sa.Column(name, sa.BigInteger(), server_default=default_sql, nullable=False)


def _name(name: str, default: str | None = None) -> sa.Column[str]:
    default_sql = None if default is None else sa.text(default)
    return sa.Column(name, sa.Text(collation="C"), server_default=default_sql, nullable=False)


def upgrade() -> None:
    """Apply the migration. No network is described yet, and no traffic is known."""
    op.add_column("estimates", _name("traffic", "''"))
    op.add_column(
        "agents",
        sa.Column(
            "network_remarks", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False
        ),
    )
    op.create_table(
        "networks",
        _whole("cluster_id"),
        _name("topology"),
        _whole("version", "1"),
        _whole("last_plan", "0"),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_networks_cluster_id")
        ),
        sa.PrimaryKeyConstraint("cluster_id", name=op.f("pk_networks")),
    )
    op.create_table(
        "network_plans",
        _whole("cluster_id"),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column(
            "planned_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        _name("cause"),
        _whole("round"),
        _whole("levels"),
        _whole("changed"),
        sa.Column("seconds", postgresql.DOUBLE_PRECISION(), nullable=False),
        sa.Column("notes", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_network_plans_cluster_id")
        ),
        sa.PrimaryKeyConstraint("cluster_id", "number", name=op.f("pk_network_plans")),
        sa.CheckConstraint(
            "number > 0 AND levels > 0 AND changed >= 0", name=op.f("ck_network_plans_counts")
        ),
        sa.CheckConstraint(
            "seconds >= 0 AND seconds < 'Infinity'", name=op.f("ck_network_plans_seconds")
        ),
    )
    op.create_table(
        "standings",
        _whole("job_id"),
        _whole("generation"),
        _whole("rank"),
        _whole("level"),
        _whole("tag", "-1"),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_standings_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_standings")),
        sa.CheckConstraint(
            "rank >= 0 AND level >= 0 AND tag BETWEEN -1 AND 63", name=op.f("ck_standings_numbers")
        ),
    )

    op.create_table(
        "measured_traffic",
        _whole("job_id"),
        _whole("node_id"),
        _whole("generation"),
        sa.Column("period_s", postgresql.DOUBLE_PRECISION(), nullable=False),
        sa.Column("sent_bytes", postgresql.DOUBLE_PRECISION(), nullable=False),
        sa.Column("unhindered", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_measured_traffic_job_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["node_id"], ["nodes.id"], name=op.f("fk_measured_traffic_node_id")
        ),
        sa.PrimaryKeyConstraint("job_id", "node_id", name=op.f("pk_measured_traffic")),
        sa.CheckConstraint(
            "period_s > 0 AND period_s < 'Infinity'", name=op.f("ck_measured_traffic_period")
        ),
        sa.CheckConstraint(
            "sent_bytes > 0 AND sent_bytes < 'Infinity'",
            name=op.f("ck_measured_traffic_sent_bytes"),
        ),
    )
    op.create_index(op.f("ix_measured_traffic_node_id"), "measured_traffic", ["node_id"])


def downgrade() -> None:
    """Undo the migration. Topologies are lost. Agents keep their last priorities."""
    op.drop_table("measured_traffic")
    op.drop_table("standings")
    op.drop_table("network_plans")
    op.drop_table("networks")
    op.drop_column("agents", "network_remarks")
    op.drop_column("estimates", "traffic")
