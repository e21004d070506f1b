"""Enrolment of agents: join tokens, and the certificates that were signed for agents."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tessera.db.access.tokens import notify_revocations
from tessera.db.base.limits import require_few_certificates, require_few_join_tokens
from tessera.db.base.rows import cluster_id, enter_cluster
from tessera.formulation.base.access import matches_pattern
from tessera.formulation.base.errors import NotAuthenticated, NotFound, PermissionDenied
from tessera.formulation.base.secrets import SecretToken
from tessera.formulation.records.access import CertificateRecord, JoinTokenRecord, JoinTokenSpec

_JOIN_TOKENS = """
    SELECT j.id, j.secret_hash, j.nodes, j.uses, j.used, j.created_by, c.name AS cluster,
        extract(epoch FROM j.created_at)::float8 AS created_s,
        extract(epoch FROM j.expires_at)::float8 AS expires_s,
        extract(epoch FROM j.revoked_at)::float8 AS revoked_s,
        j.expires_at <= clock_timestamp() AS expired
    FROM join_tokens j JOIN clusters c ON c.id = j.cluster_id
"""

_CREATE = sa.text("""
INSERT INTO join_tokens (id, secret_hash, cluster_id, nodes, uses, expires_at, created_by)
VALUES (:id, :secret_hash, :cluster, CAST(:nodes AS text[]), :uses, to_timestamp(:expires_s),
    :created_by)
""")

_JOIN_TOKEN = sa.text(f"{_JOIN_TOKENS} WHERE j.id = :id")

_LOCK_JOIN_TOKEN = sa.text(f"{_JOIN_TOKENS} WHERE j.id = :id FOR UPDATE OF j")

_LIST_JOIN_TOKENS = sa.text(f"""
{_JOIN_TOKENS} WHERE j.cluster_id = :cluster AND (:with_ended OR (
    j.revoked_at IS NULL AND j.used < j.uses AND j.expires_at > clock_timestamp()))
ORDER BY j.created_at DESC, j.id
""")

_REVOKE_JOIN_TOKEN = sa.text("""
UPDATE join_tokens SET revoked_at = coalesce(revoked_at, clock_timestamp())
WHERE cluster_id = :cluster AND id = :id
""")

_NODES_OF_AGENT = sa.text("""
SELECT n.name FROM nodes n JOIN agents a ON a.id = n.agent_id
WHERE a.cluster_id = :cluster AND a.name = :agent ORDER BY n.name
""")

_USE = sa.text("UPDATE join_tokens SET used = used + 1 WHERE id = :id")

_ADD_CERTIFICATE = sa.text("""
INSERT INTO agent_certificates
    (serial, cluster_id, cluster, agent, nodes, issued_at, expires_at, join_token)
VALUES (:serial, :cluster_id, :cluster, :agent, CAST(:nodes AS text[]), to_timestamp(:issued_s),
    to_timestamp(:expires_s), :join_token)
""")

# The lock makes a revocation of the agent wait, so that it finds the new certificate, too.
_REPLACED = sa.text("""
SELECT nodes, join_token, revoked_at FROM agent_certificates
WHERE serial = :serial AND cluster = :cluster AND agent = :agent FOR NO KEY UPDATE
""")

_LIST_CERTIFICATES = sa.text("""
SELECT serial, cluster, agent, nodes, join_token,
    extract(epoch FROM issued_at)::float8 AS issued_s,
    extract(epoch FROM expires_at)::float8 AS expires_s,
    extract(epoch FROM revoked_at)::float8 AS revoked_s
FROM agent_certificates WHERE cluster_id = :cluster AND expires_at > clock_timestamp()
ORDER BY agent, issued_at, serial
""")

# An agent's clock may differ, so certificates that have expired by ours are revoked, too.
_REVOKE_AGENT = sa.text("""
UPDATE agent_certificates SET revoked_at = clock_timestamp()
WHERE cluster_id = :cluster AND agent = :agent AND revoked_at IS NULL
RETURNING serial, expires_at > clock_timestamp() AS valid
""")

_REVOKE_CLUSTER = sa.text("""
UPDATE agent_certificates
SET revoked_at = coalesce(revoked_at, clock_timestamp()), cluster_id = NULL
WHERE cluster_id = :cluster RETURNING serial
""")

_REVOKED = sa.text("""
SELECT serial FROM agent_certificates WHERE serial = ANY(:serials) AND revoked_at IS NOT NULL
""")


def create_join_token(
    connection: sa.Connection, spec: JoinTokenSpec, created_by: str
) -> JoinTokenRecord:
    """Store a join token. Raises NotFound: the cluster. LimitReached."""
    values = {
        "id": spec.id,
        "secret_hash": spec.secret_hash,
        "cluster": enter_cluster(connection, spec.cluster),
        "nodes": list(spec.nodes),
        "uses": spec.uses,
        "expires_s": spec.expires_s,
        "created_by": created_by,
    }
    connection.execute(_CREATE, values)
    require_few_join_tokens(connection, spec.cluster)
    return _join_token_record(connection.execute(_JOIN_TOKEN, values).mappings().one())


def list_join_tokens(
    connection: sa.Connection, cluster: str, *, with_ended: bool
) -> list[JoinTokenRecord]:
    """Return join tokens, the newest first. Raises NotFound: the cluster."""
    values = {"cluster": cluster_id(connection, cluster), "with_ended": with_ended}
    rows = connection.execute(_LIST_JOIN_TOKENS, values)
    return [_join_token_record(row) for row in rows.mappings()]


def revoke_join_token(connection: sa.Connection, cluster: str, token_id: str) -> JoinTokenRecord:
    """Revoke a join token. One that is revoked stays as it is.

    Raises NotFound: the cluster, or the token.
    """
    values = {"cluster": enter_cluster(connection, cluster), "id": token_id}
    if not connection.execute(_REVOKE_JOIN_TOKEN, values).rowcount:
        raise NotFound(f"clusters/{cluster}/joinTokens/{token_id}")
    return _join_token_record(connection.execute(_JOIN_TOKEN, values).mappings().one())


def enrol(connection: sa.Connection, token: SecretToken, certificate: CertificateRecord) -> None:
    """Use a join token once, and store the certificate that was signed for it.

    Raises:
        NotAuthenticated: no such token, another secret, or it is used up, revoked, expired, or of
            another cluster. The message says which only if the secret is right.
        PermissionDenied: the token does not allow a node, or one that the agent has already.
    """
    row = connection.execute(_JOIN_TOKEN, {"id": token.id}).mappings().one_or_none()
    # The secret is compared before the lock, so that nobody without it can hold up enrolments.
    if row is None or not token.matches(bytes(row["secret_hash"])):
        raise NotAuthenticated(
            "the join token does not exist or its secret is wrong; ask an operator for another one"
        )
    elsewhere = _refusal(token, f"is not for cluster {certificate.cluster}")
    try:
        key = enter_cluster(connection, certificate.cluster)
    except NotFound:
        raise elsewhere from None
    # From here on, the cluster is not deleted and nobody else uses the token.
    row = connection.execute(_LOCK_JOIN_TOKEN, {"id": token.id}).mappings().one_or_none()
    if row is None:
        raise _refusal(token, "was deleted")
    record = _join_token_record(row)
    if record.spec.cluster != certificate.cluster:
        raise elsewhere
    if record.revoked_s is not None:
        raise _refusal(token, "was revoked")
    if row["expired"]:
        raise _refusal(token, "has expired")
    if record.used >= record.spec.uses:
        raise _refusal(token, f"was good for {record.spec.uses:,} enrolments, which are used up")
    allowed = ", ".join(record.spec.nodes)
    for node in certificate.nodes:
        if not _allows(record.spec, node):
            raise PermissionDenied(
                f"join token {token.id} does not allow node {node}, only {allowed}; ask an operator for"
                " one that does"
            )
    # Whoever speaks as an agent takes its nodes from it.
    values = {"cluster": key, "agent": certificate.agent}
    for node in connection.execute(_NODES_OF_AGENT, values).scalars():
        if not _allows(record.spec, node):
            raise PermissionDenied(
                f"agent {certificate.agent} has node {node}, which join token {token.id} does not allow, only"
                f" {allowed}; choose another --agent-id, or ask an operator for a token that allows it"
            )
    connection.execute(_USE, {"id": token.id})
    _add(connection, key, certificate, token.id)


def add_certificate(
    connection: sa.Connection, certificate: CertificateRecord, replaces: str
) -> None:
    """Store the certificate that was signed for the agent whose serial number is ``replaces``.

    Raises:
        NotAuthenticated: that one is revoked, unknown, or another agent's.
        PermissionDenied: that one does not allow a node.
        LimitReached: the agent has many certificates that have not expired.
    """
    try:
        key = enter_cluster(connection, certificate.cluster)
    except NotFound as error:
        raise NotAuthenticated(f"{error}, so its certificates are revoked") from None
    values = {
        "serial": replaces,
        "cluster": certificate.cluster,
        "agent": certificate.agent,
    }
    row = connection.execute(_REPLACED, values).one_or_none()
    if row is None or row.revoked_at is not None:
        why = "is not known" if row is None else "was revoked"
        raise NotAuthenticated(
            f"the certificate of agent {certificate.agent} {why}; enrol again with a join token"
        )
    if more := set(certificate.nodes) - set(row.nodes):
        raise PermissionDenied(
            f"the certificate of agent {certificate.agent} does not allow node {min(more)}; enrol again"
            " with a join token that does"
        )
    _add(connection, key, certificate, row.join_token)
    require_few_certificates(connection, key, certificate.agent)


def list_certificates(connection: sa.Connection, cluster: str) -> list[CertificateRecord]:
    """Return the certificates that have not expired, by agent. Raises NotFound: the cluster."""
    values = {"cluster": cluster_id(connection, cluster)}
    return [
        CertificateRecord(**{**row, "nodes": tuple(row["nodes"])})
        for row in connection.execute(_LIST_CERTIFICATES, values).mappings()
    ]


def revoke_agent(connection: sa.Connection, cluster: str, agent: str) -> list[str]:
    """Revoke all certificates of an agent; return their serial numbers.

    Raises:
        NotFound: the cluster, or no certificate of the agent that is valid.
    """
    values = {"cluster": enter_cluster(connection, cluster), "agent": agent}
    serials, any_valid = [], False
    # A renewal holds a lock on the certificate that it replaces. The statement that waits for it
    # does not see the new certificate, but the next one does.
    while rows := connection.execute(_REVOKE_AGENT, values).all():
        serials += [row.serial for row in rows]
        any_valid = any_valid or any(row.valid for row in rows)
    if not any_valid:
        raise NotFound(f"clusters/{cluster}/agents/{agent}/certificates")
    notify_revocations(connection, [f"certificate/{serial}" for serial in serials])
    return sorted(serials)


def revoke_certificates(connection: sa.Connection, cluster: int) -> None:
    """Revoke all certificates of a cluster that is being deleted, whose row is locked.

    They are kept until they expire, so that a new cluster of the same name refuses them.
    """
    serials = connection.execute(_REVOKE_CLUSTER, {"cluster": cluster}).scalars().all()
    notify_revocations(connection, [f"certificate/{serial}" for serial in serials])


def _add(
    connection: sa.Connection, cluster: int, certificate: CertificateRecord, join_token: str
) -> None:
    values = {
        "serial": certificate.serial,
        "cluster_id": cluster,
        "cluster": certificate.cluster,
        "agent": certificate.agent,
        "nodes": list(certificate.nodes),
        "issued_s": certificate.issued_s,
        "expires_s": certificate.expires_s,
        "join_token": join_token,
    }
    connection.execute(_ADD_CERTIFICATE, values)


def find_revoked(connection: sa.Connection, serials: Collection[str]) -> set[str]:
    """Return those of ``serials`` that are revoked. Unknown ones are not."""
    return set(connection.execute(_REVOKED, {"serials": list(serials)}).scalars())


def _allows(spec: JoinTokenSpec, node: str) -> bool:
    return any(matches_pattern(pattern, node) for pattern in spec.nodes)


def _refusal(token: SecretToken, why: str) -> NotAuthenticated:
    return NotAuthenticated(f"join token {token.id} {why}; ask an operator for another one")


def _join_token_record(row: sa.RowMapping) -> JoinTokenRecord:
    return JoinTokenRecord(
        spec=JoinTokenSpec(
            id=row["id"],
            secret_hash=bytes(row["secret_hash"]),
            cluster=row["cluster"],
            nodes=tuple(row["nodes"]),
            uses=row["uses"],
            expires_s=row["expires_s"],
        ),
        used=row["used"],
        created_s=row["created_s"],
        created_by=row["created_by"],
        revoked_s=row["revoked_s"],
    )
