"""The standing policies of rounds: each change is a new version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.base.rows import cluster_id
from tessera.db.base.turn import Turn, request_round
from tessera.formulation.base.errors import NotFound, StaleEtag
from tessera.formulation.records.policies import PolicyRecord

_COLUMNS = (
    "p.version, p.options, p.set_by, extract(epoch FROM p.set_at)::float8 AS set_s, p.message"
)

_NEWEST = sa.text(f"""
SELECT {_COLUMNS} FROM policies p JOIN clusters c ON c.id = p.cluster_id
WHERE c.name = :cluster ORDER BY p.version DESC LIMIT 1
""")  # noqa: S608 - a constant of this module

_POLICY = sa.text(f"""
SELECT {_COLUMNS} FROM policies p WHERE p.cluster_id = :cluster AND p.version = :version
""")  # noqa: S608 - a constant of this module

_POLICIES = sa.text(f"""
SELECT {_COLUMNS} FROM policies p
WHERE p.cluster_id = :cluster AND (:before = 0 OR p.version < :before)
ORDER BY p.version DESC LIMIT :limit
""")  # noqa: S608 - a constant of this module

_ADD = sa.text("""
INSERT INTO policies (cluster_id, version, options, set_by, message)
VALUES (:cluster, :version, CAST(:options AS jsonb), :set_by, :message)
""")

_LAST_VERSION = sa.text(
    "SELECT coalesce(max(version), 0) FROM policies WHERE cluster_id = :cluster"
)


def newest_policy(connection: sa.Connection, cluster: str) -> PolicyRecord | None:
    """Return the newest version, or None if no policy was set. A missing cluster has none."""
    row = connection.execute(_NEWEST, {"cluster": cluster}).one_or_none()
    return None if row is None else _record(row)


def get_policy(connection: sa.Connection, cluster: str, version: int) -> PolicyRecord:
    """Return a version of the policy. Raises NotFound (the cluster, or the version)."""
    key = cluster_id(connection, cluster)
    return _version(connection, key, cluster, version)


def list_policies(
    connection: sa.Connection, cluster: str, before: int, limit: int
) -> list[PolicyRecord]:
    """Return versions below ``before`` (0: all), newest first. Raises NotFound (the cluster)."""
    values = {"cluster": cluster_id(connection, cluster), "before": before, "limit": limit}
    return [_record(row) for row in connection.execute(_POLICIES, values)]


def set_policy(
    connection: sa.Connection,
    cluster: str,
    options: Mapping[str, Any] | None,
    *,
    set_by: str,
    message: str,
    version: int | None,
) -> PolicyRecord:
    """Add a version with ``options`` (see ``PolicyRecord``), and ask for a round.

    If ``options`` is None, it is the policy of the server's settings.

    Raises:
        NotFound: the cluster.
        StaleEtag: ``version`` is given, and the newest version is another one.
    """
    turn = Turn.take(connection, cluster)
    last = int(connection.execute(_LAST_VERSION, {"cluster": turn.cluster}).scalar_one())
    if version is not None and version != last:
        raise StaleEtag(
            f"the policy of {turn.name} has changed since you read it (etag {version}, now {last}); read"
            " it again and retry"
        )
    values = {
        "cluster": turn.cluster,
        "version": last + 1,
        "options": None if options is None else dump_json(dict(options)),
        "set_by": set_by,
        "message": message,
    }
    connection.execute(_ADD, values)
    request_round(connection, turn.cluster)
    return _version(connection, turn.cluster, turn.name, last + 1)


def _version(connection: sa.Connection, key: int, cluster: str, version: int) -> PolicyRecord:
    row = connection.execute(_POLICY, {"cluster": key, "version": version}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}/policies/{version}")
    return _record(row)


def _record(row: sa.Row[Any]) -> PolicyRecord:
    return PolicyRecord(
        version=row.version,
        options=row.options,
        set_by=row.set_by,
        set_s=row.set_s,
        message=row.message,
    )
