"""Tables of identities: tokens of users, join tokens and certificates of agents, the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import BYTEA

from tessera.db.schema.tables.columns import (
    count_column,
    metadata,
    moment_column,
    names_column,
    one_of,
    reference_column,
    text_column,
)
from tessera.formulation.base.access import PEOPLE, TENANT_ROLES


def _hash_column() -> sa.Column[bytes]:
    """Return the column of a secret's SHA-256. The secret itself is never stored."""
    return sa.Column("secret_hash", BYTEA, nullable=False)


_IS_HASH = "octet_length(secret_hash) = 32"

tokens = sa.Table(
    "tokens",
    metadata,
    text_column("id", primary_key=True),  # the public part of the token's text
    text_column("name"),
    _hash_column(),
    text_column("role"),
    names_column("clusters", nullable=True),  # NULL for all of them, as are tenants
    names_column("tenants", nullable=True),
    moment_column("created_at"),
    text_column("created_by"),
    moment_column("expires_at", nullable=True),  # NULL for never
    moment_column("revoked_at", nullable=True),
    sa.CheckConstraint("name <> ''", name="name"),
    sa.CheckConstraint(_IS_HASH, name="secret_hash"),
    sa.CheckConstraint("role IN " + one_of([r.value for r in PEOPLE]), name="role"),
    sa.CheckConstraint(
        "tenants IS NULL OR role IN " + one_of(sorted(TENANT_ROLES)), name="tenants"
    ),
    sa.Index("uq_tokens_name", "name", unique=True, postgresql_where=sa.text("revoked_at IS NULL")),
)

join_tokens = sa.Table(
    "join_tokens",
    metadata,
    text_column("id", primary_key=True),
    _hash_column(),
    reference_column("cluster_id", "clusters.id"),
    names_column("nodes"),  # names and patterns
    count_column("uses", None),
    count_column("used"),
    moment_column("created_at"),
    text_column("created_by"),
    moment_column("expires_at", required=True),
    moment_column("revoked_at", nullable=True),
    sa.CheckConstraint(_IS_HASH, name="secret_hash"),
    sa.CheckConstraint("cardinality(nodes) > 0", name="nodes"),
    sa.CheckConstraint("uses > 0 AND used BETWEEN 0 AND uses", name="uses"),
    sa.Index(None, "cluster_id"),
)

agent_certificates = sa.Table(
    "agent_certificates",
    metadata,
    text_column("serial", primary_key=True),
    # NULL once the cluster is deleted. A new cluster of that name has none of its certificates.
    reference_column("cluster_id", "clusters.id", nullable=True),
    text_column("cluster"),  # the name that the certificate states
    text_column("agent"),
    names_column("nodes"),
    moment_column("issued_at", required=True),
    moment_column("expires_at", required=True),
    text_column("join_token"),  # by id, because the join token may be deleted
    moment_column("revoked_at", nullable=True),
    sa.CheckConstraint("serial ~ '^[1-9a-f][0-9a-f]*$'", name="serial"),
    sa.CheckConstraint("cardinality(nodes) > 0", name="nodes"),
    sa.CheckConstraint("cluster_id IS NOT NULL OR revoked_at IS NOT NULL", name="cluster"),
    sa.Index(None, "cluster_id", "agent"),
    sa.Index(None, "expires_at"),
)

audit_log = sa.Table(  # rows are added and never changed; see the trigger audit_log_append_only
    "audit_log",
    metadata,
    sa.Column("number", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    moment_column("at"),
    text_column("subject"),
    text_column("role"),
    text_column("proof"),
    text_column("method"),
    text_column("target"),  # resources by name, because they may be deleted
    text_column("peer"),
    text_column("request_id"),
    text_column("outcome"),
    text_column("detail"),
    count_column("count", 1),
    sa.CheckConstraint("outcome <> ''", name="outcome"),
    sa.CheckConstraint("count > 0", name="count"),
    sa.Index(None, "at"),
    sa.Index(None, "subject", "number"),
    sa.Index(None, "target", "number"),
)
