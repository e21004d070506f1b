"""Reservations of GPUs and nodes, and maintenance windows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    moment = postgresql.TIMESTAMP(timezone=True)
    op.create_table(
        "reservations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("start_at", moment, server_default=sa.text("now()"), nullable=False),
        sa.Column("end_at", moment, server_default=sa.text("now()"), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=True),
        sa.Column("gpus", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        *(
            sa.Column(name, sa.Text(collation="C"), server_default=sa.text("''"), nullable=False)
            for name in ("tenant", "label_key", "label_value")
        ),
        sa.Column("maintenance", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("reason", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False),
        sa.Column("created_at", moment, server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("start_at < end_at", name=op.f("ck_reservations_times")),
        sa.CheckConstraint(
            "gpus >= 0 AND (gpu_type_id IS NULL) = (gpus = 0) AND (NOT maintenance OR gpus = 0)",
            name=op.f("ck_reservations_gpus"),
        ),
        sa.CheckConstraint(
            "(maintenance AND tenant = '' AND label_key = '')"
            " OR (NOT maintenance AND (tenant = '') <> (label_key = ''))",
            name=op.f("ck_reservations_serves"),
        ),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_reservations_cluster_id")
        ),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"], ["gpu_types.id"], name=op.f("fk_reservations_gpu_type_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reservations")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_reservations_cluster_id_name")),
    )
    op.create_index(op.f("ix_reservations_gpu_type_id"), "reservations", ["gpu_type_id"])
    op.create_table(
        "reservation_nodes",
        sa.Column("reservation_id", sa.BigInteger(), nullable=False),
        sa.Column("node_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["reservation_id"],
            ["reservations.id"],
            name=op.f("fk_reservation_nodes_reservation_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["node_id"], ["nodes.id"], name=op.f("fk_reservation_nodes_node_id")
        ),
        sa.PrimaryKeyConstraint("reservation_id", "node_id", name=op.f("pk_reservation_nodes")),
    )
    op.create_index(op.f("ix_reservation_nodes_node_id"), "reservation_nodes", ["node_id"])


def downgrade() -> None:
    """Undo the migration. Reservations are lost, and nodes under maintenance serve jobs again."""
    op.drop_table("reservation_nodes")
    op.drop_table("reservations")
