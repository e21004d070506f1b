"""Identities: tokens of users, join tokens and certificates of agents, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

NAME = sa.Text(collation="C")
NAMES = postgresql.ARRAY(NAME)
MOMENT = postgresql.TIMESTAMP(timezone=True)

FUNCTION = """
CREATE FUNCTION check_audit_log_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('tessera.pruning', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'entries of the audit log can only be added, but this is %', TG_OP
        USING ERRCODE = 'check_violation', CONSTRAINT = 'audit_log_append_only';
END $$
"""

TRIGGER = """
CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
FOR EACH STATEMENT EXECUTE FUNCTION check_audit_log_change()
"""


def _moment(name: str) -> sa.Column[object]:
    return sa.Column(name, MOMENT, server_default=sa.text("now()"), nullable=False)


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "tokens",
        sa.Column("id", NAME, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("secret_hash", postgresql.BYTEA(), nullable=False),
        sa.Column("role", NAME, nullable=False),
        sa.Column("clusters", NAMES, nullable=True),
        sa.Column("tenants", NAMES, nullable=True),
        _moment("created_at"),
        sa.Column("created_by", NAME, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.CheckConstraint("name <> ''", name=op.f("ck_tokens_name")),
        sa.CheckConstraint("octet_length(secret_hash) = 32", name=op.f("ck_tokens_secret_hash")),
        sa.CheckConstraint(
            "role IN ('viewer', 'user', 'operator', 'admin')", name=op.f("ck_tokens_role")
        ),
        sa.CheckConstraint(
            "tenants IS NULL OR role IN ('user', 'viewer')", name=op.f("ck_tokens_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    op.create_index(
        "uq_tokens_name",
        "tokens",
        ["name"],
        unique=True,
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    op.create_table(
        "join_tokens",
        sa.Column("id", NAME, nullable=False),
        sa.Column("secret_hash", postgresql.BYTEA(), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("nodes", NAMES, nullable=False),
        sa.Column("uses", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        _moment("created_at"),
        sa.Column("created_by", NAME, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.CheckConstraint(
            "octet_length(secret_hash) = 32", name=op.f("ck_join_tokens_secret_hash")
        ),
        sa.CheckConstraint("cardinality(nodes) > 0", name=op.f("ck_join_tokens_nodes")),
        sa.CheckConstraint(
            "uses > 0 AND used BETWEEN 0 AND uses", name=op.f("ck_join_tokens_uses")
        ),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_join_tokens_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_join_tokens")),
    )
    op.create_index(op.f("ix_join_tokens_cluster_id"), "join_tokens", ["cluster_id"])
    op.create_table(
        "agent_certificates",
        sa.Column("serial", NAME, nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=True),
        sa.Column("cluster", NAME, nullable=False),
        sa.Column("agent", NAME, nullable=False),
        sa.Column("nodes", NAMES, nullable=False),
        sa.Column("issued_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("join_token", NAME, nullable=False),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.CheckConstraint(
            "serial ~ '^[1-9a-f][0-9a-f]*$'", name=op.f("ck_agent_certificates_serial")
        ),
        sa.CheckConstraint("cardinality(nodes) > 0", name=op.f("ck_agent_certificates_nodes")),
        sa.CheckConstraint(
            "cluster_id IS NOT NULL OR revoked_at IS NOT NULL",
            name=op.f("ck_agent_certificates_cluster"),
        ),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_agent_certificates_cluster_id")
        ),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_agent_certificates")),
    )
    op.create_index(
        op.f("ix_agent_certificates_cluster_id_agent"),
        "agent_certificates",
        ["cluster_id", "agent"],
    )
    op.create_index(op.f("ix_agent_certificates_expires_at"), "agent_certificates", ["expires_at"])
    op.create_table(
        "audit_log",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        _moment("at"),
        *(
            sa.Column(name, NAME, nullable=False)
            for name in (
                "subject",
                "role",
                "key",
                "method",
                "target",
                "peer",
                "request_id",
                "outcome",
                "detail",
            )
        ),
        sa.Column("count", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.CheckConstraint("outcome <> ''", name=op.f("ck_audit_log_outcome")),
        sa.CheckConstraint("count > 0", name=op.f("ck_audit_log_count")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_at"), "audit_log", ["at"])
    op.create_index(op.f("ix_audit_log_subject_number"), "audit_log", ["subject", "number"])
    op.create_index(op.f("ix_audit_log_target_number"), "audit_log", ["target", "number"])
    op.create_index(op.f("ix_jobs_tenant"), "jobs", ["cluster_id", "tenant", "state"])
    op.execute(FUNCTION)
    op.execute(TRIGGER)


def downgrade() -> None:
    """Undo the migration. Tokens, certificates and the audit log are lost."""
    op.drop_index(op.f("ix_jobs_tenant"), "jobs")
    op.drop_table("audit_log")
    op.execute("DROP FUNCTION check_audit_log_change()")
    op.drop_table("agent_certificates")
    op.drop_table("join_tokens")
    op.drop_table("tokens")
