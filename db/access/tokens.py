"""Tokens of users."""

from __future__ import annotations

import math

import sqlalchemy as sa

from tessera.db.base.limits import require_few_tokens
from tessera.formulation.base.access import Role
from tessera.formulation.base.errors import AlreadyExists, NotFound
from tessera.formulation.records.access import TokenRecord, TokenSpec

ACCESS_CHANNEL = "tessera_access"
"""Channel that receives the key of what was revoked: ``token/ID`` or ``certificate/SERIAL``."""

_COLUMNS = """
    id, name, secret_hash, role, clusters, tenants, created_by,
    extract(epoch FROM created_at)::float8 AS created_s,
    extract(epoch FROM expires_at)::float8 AS expires_s,
    extract(epoch FROM revoked_at)::float8 AS revoked_s
"""

_CREATE = sa.text(f"""
INSERT INTO tokens (id, name, secret_hash, role, clusters, tenants, expires_at, created_by)
VALUES (:id, :name, :secret_hash, :role, CAST(:clusters AS text[]), CAST(:tenants AS text[]),
    to_timestamp(:expires_s), :created_by)
ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING
RETURNING {_COLUMNS}
""")  # noqa: S608 - a constant of this module

_FIND = sa.text(f"SELECT {_COLUMNS} FROM tokens WHERE id = :id")  # noqa: S608 - see above

_LIST = sa.text(f"""
SELECT {_COLUMNS} FROM tokens
WHERE :with_ended OR (revoked_at IS NULL AND coalesce(expires_at, 'infinity') > clock_timestamp())
ORDER BY name, created_at, id
""")  # noqa: S608 - see above

# An id is exact, so it precedes a name that looks like it.
_REVOKE = sa.text(f"""
UPDATE tokens SET revoked_at = clock_timestamp() WHERE id = (
    SELECT id FROM tokens WHERE (name = :name OR id = :name) AND revoked_at IS NULL
    ORDER BY (id = :name) DESC LIMIT 1 FOR UPDATE
) AND revoked_at IS NULL
RETURNING {_COLUMNS}
""")  # noqa: S608 - see above

_NOTIFY = sa.text("""
SELECT pg_notify(:channel, key) FROM unnest(CAST(:keys AS text[])) AS key
""")


def create_token(connection: sa.Connection, spec: TokenSpec, created_by: str) -> TokenRecord:
    """Store a token.

    Raises:
        AlreadyExists: a token of this name is not revoked. LimitReached.
    """
    values = {
        "id": spec.id,
        "name": spec.name,
        "secret_hash": spec.secret_hash,
        "role": spec.role.value,
        "clusters": None if spec.clusters is None else sorted(spec.clusters),
        "tenants": None if spec.tenants is None else sorted(spec.tenants),
        "expires_s": None if math.isinf(spec.expires_s) else spec.expires_s,
        "created_by": created_by,
    }
    row = connection.execute(_CREATE, values).mappings().one_or_none()
    if row is None:
        raise AlreadyExists(f"tokens/{spec.name}")
    require_few_tokens(connection)
    return _token_record(row)


def find_token(connection: sa.Connection, token_id: str) -> TokenRecord | None:
    """Return a token, revoked and expired ones included, or None."""
    row = connection.execute(_FIND, {"id": token_id}).mappings().one_or_none()
    return None if row is None else _token_record(row)


def list_tokens(connection: sa.Connection, *, with_ended: bool) -> list[TokenRecord]:
    """Return tokens by name, without those that are revoked or expired unless asked."""
    rows = connection.execute(_LIST, {"with_ended": with_ended})
    return [_token_record(row) for row in rows.mappings()]


def revoke_token(connection: sa.Connection, name: str) -> TokenRecord:
    """Revoke the token with this name or id. Raises NotFound: none that is not revoked."""
    row = connection.execute(_REVOKE, {"name": name}).mappings().one_or_none()
    if row is None:
        raise NotFound(f"tokens/{name}")
    notify_revocations(connection, [f"token/{row['id']}"])
    return _token_record(row)


def notify_revocations(connection: sa.Connection, keys: list[str]) -> None:
    """Send each key to ``ACCESS_CHANNEL`` once the transaction is committed."""
    if keys:
        connection.execute(_NOTIFY, {"channel": ACCESS_CHANNEL, "keys": keys})


def _token_record(row: sa.RowMapping) -> TokenRecord:
    return TokenRecord(
        spec=TokenSpec(
            id=row["id"],
            name=row["name"],
            secret_hash=bytes(row["secret_hash"]),
            role=Role(row["role"]),
            clusters=None if row["clusters"] is None else frozenset(row["clusters"]),
            tenants=None if row["tenants"] is None else frozenset(row["tenants"]),
            expires_s=math.inf if row["expires_s"] is None else row["expires_s"],
        ),
        created_s=row["created_s"],
        created_by=row["created_by"],
        revoked_s=row["revoked_s"],
    )
