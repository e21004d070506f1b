"""The rows of clusters, their GPU types and their nodes."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.base.turn import Turn
from tessera.db.clusters.deletion import (
    Users,
    require_remaining,
    require_version,
    start_above_deleted,
)
from tessera.db.estimates.workloads import require_types
from tessera.db.schema.host import list_host
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.errors import InUse, InvalidInput, NotAllowed, NotFound, StaleEtag
from tessera.formulation.base.resources import HOST_NAMES, amounts_of, name_amounts
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import NodeSpec

MAX_GPUS = 64
"""Largest number of GPUs of one node."""

_CREATE = sa.text("""
INSERT INTO clusters (name) VALUES (:name) ON CONFLICT DO NOTHING RETURNING id
""")

_CLUSTER = sa.text("SELECT id, version FROM clusters WHERE name = :name FOR NO KEY UPDATE")

_TYPES = sa.text("""
SELECT name, memory_bytes, dollars_per_hour, watts FROM gpu_types
WHERE cluster_id = :cluster ORDER BY ordinal
""")

_TYPES_NAMED = "t.cluster_id = :cluster AND t.name = ANY(:names)"

TYPE_USERS = (
    Users(
        "nodes",
        "node",
        "nodes",
        f"""
SELECT n.name, n.id AS at FROM nodes n JOIN gpu_types t ON t.id = n.gpu_type_id
WHERE {_TYPES_NAMED}
""",  # noqa: S608 - a constant of this module
    ),
    Users(
        "workloads",
        "workload with Cells on it",
        "workloads with Cells on it",
        f"""
SELECT DISTINCT concat_ws('/', w.model, nullif(w.params, '')) || ' at batch ' || w.global_batch AS name,
    w.id AS at
FROM estimates e JOIN gpu_types t ON t.id = e.gpu_type_id JOIN workloads w ON w.id = e.workload_id
WHERE {_TYPES_NAMED} AND NOT e.derived
""",  # noqa: S608 - a constant of this module
    ),
    Users(
        "tenants",
        "tenant with a quota of it",
        "tenants with a quota of it",
        f"""
SELECT DISTINCT n.name, n.id AS at FROM quotas q JOIN gpu_types t ON t.id = q.gpu_type_id
JOIN tenants n ON n.id = q.tenant_id WHERE {_TYPES_NAMED}
""",  # noqa: S608 - a constant of this module
    ),
    Users(
        "reservations",
        "reservation of it",
        "reservations of it",
        f"""
SELECT r.name, r.id AS at FROM reservations r JOIN gpu_types t ON t.id = r.gpu_type_id
WHERE {_TYPES_NAMED}
""",  # noqa: S608 - a constant of this module
    ),
    Users(
        "jobs",
        "live job that asks for it",
        "live jobs that ask for it",
        f"""
SELECT j.name, j.id AS at FROM jobs j WHERE j.cluster_id = :cluster
    AND (j.requested_gpu_type = ANY(:names) OR j.allowed_gpu_types ?| CAST(:names AS text[])) AND j.{LIVE}
""",  # noqa: S608 - a constant of this module
    ),
)
"""The users of GPU types. The service's own estimates and measurements go with the type."""

_ADVICE = {
    "nodes": "`tessera nodes delete`",
    "workloads": "`tessera cells delete --gpu-type {name}`",
    "tenants": "`tessera tenants apply` without the quota",
    "reservations": "`tessera reserve delete`",
    "jobs": "`tessera cancel`",
}
"""The command that removes each kind of users of a type."""

_DROP_OWN = tuple(
    sa.text(f"""
DELETE FROM {table} x USING gpu_types t
WHERE t.id = x.gpu_type_id AND t.cluster_id = :cluster AND t.name = ANY(:names)
""")  # noqa: S608 - constants only
    for table in ("estimates", "measurements", "profiles")
)

_RESET_DIGESTS = sa.text("""
UPDATE workloads SET derived_from = 'before a type was dropped'
WHERE cluster_id = :cluster AND derived_from <> ''
""")
"""A reset of the digests, which forces new estimates: the type may come back, and the inputs of its
estimates would then be the same as before.
"""

_DROP_TYPES = sa.text("DELETE FROM gpu_types WHERE cluster_id = :cluster AND name = ANY(:names)")

_PUT_TYPES = sa.text("""
INSERT INTO gpu_types (cluster_id, name, memory_bytes, dollars_per_hour, watts, ordinal)
SELECT :cluster, r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r(name text, memory_bytes bigint, dollars_per_hour float8, watts float8, ordinal bigint)
ON CONFLICT (cluster_id, name) DO UPDATE SET memory_bytes = excluded.memory_bytes,
    dollars_per_hour = excluded.dollars_per_hour, watts = excluded.watts,
    ordinal = excluded.ordinal
""")

_BUMP = sa.text("UPDATE clusters SET version = version + 1 WHERE id = :cluster")

_NODES = sa.text(f"""
SELECT n.id, n.name, t.name AS gpu_type, n.gpus, n.rack, {list_host("n.@")}, n.labels, n.version,
    coalesce((SELECT max(l.gpu) FROM allocations l WHERE l.node_id = n.id), -1) AS last_held
FROM nodes n JOIN gpu_types t ON t.id = n.gpu_type_id
WHERE n.cluster_id = :cluster AND n.name = ANY(:names)
""")  # noqa: S608 - a constant of tessera.db.schema.host

_PUT_NODES = sa.text(f"""
INSERT INTO nodes (cluster_id, name, gpu_type_id, gpus, rack, {list_host("@")}, labels, version)
SELECT :cluster, r.*, (SELECT c.node_version + 1 FROM clusters c WHERE c.id = :cluster)
FROM json_to_recordset(CAST(:rows AS json)) AS
    r(name text, gpu_type_id bigint, gpus bigint, rack text, {list_host("@ bigint")},
        labels jsonb)
ON CONFLICT (cluster_id, name) DO UPDATE SET gpu_type_id = excluded.gpu_type_id,
    gpus = excluded.gpus, rack = excluded.rack, {list_host("@ = excluded.@")},
    labels = excluded.labels, version = nodes.version + 1
""")  # noqa: S608 - a constant of tessera.db.schema.host

_PROPERTIES = ("gpu_type", "gpus", "rack", *HOST_NAMES, "labels")
"""The properties of a stored node that its specification states."""

_DROP_GPUS = sa.text("""
DELETE FROM gpus g USING nodes n
WHERE g.node_id = n.id AND n.cluster_id = :cluster AND n.name = ANY(:names) AND g.gpu >= n.gpus
""")

_PUT_GPUS = sa.text("""
INSERT INTO gpus (node_id, gpu)
SELECT n.id, generate_series(0, n.gpus - 1) FROM nodes n
WHERE n.cluster_id = :cluster AND n.name = ANY(:names)
ON CONFLICT DO NOTHING
""")


def put_types(
    connection: sa.Connection, name: str, gpu_types: Sequence[GpuType], version: int | None
) -> bool:
    """Create a cluster or replace its types. The version rises only if something changed.

    Return whether it was created.
    """
    names = [t.name for t in gpu_types]
    if len(set(names)) < len(names):
        raise InvalidInput("gpu_types", "must name each GPU type only once")
    created = connection.execute(_CREATE, {"name": name}).scalar()
    if created is not None:
        start_above_deleted(connection, created)
    cluster, stored = connection.execute(_CLUSTER, {"name": name}).one()
    if version is not None and (created is not None or version != stored):
        now = "does not exist" if created is not None else f"is at etag {stored}"
        raise StaleEtag(f"cluster {name} {now}, not at etag {version}; read it again and retry")
    before = [
        GpuType(name=name, memory_bytes=memory, dollars_per_hour=dollars, watts=watts)
        for name, memory, dollars, watts in connection.execute(_TYPES, {"cluster": cluster})
    ]
    if before == list(gpu_types):
        return created is not None
    try:
        _drop_types(connection, name, cluster, sorted({t.name for t in before} - set(names)))
    except InUse as used:
        raise InvalidInput("gpu_types", f"{used}; or keep the GPU type in the list") from used
    rows = [
        {
            "name": t.name,
            "memory_bytes": t.memory_bytes,
            "ordinal": i,
            "dollars_per_hour": str(t.dollars_per_hour),
            "watts": str(t.watts),
        }
        for i, t in enumerate(gpu_types)
    ]
    connection.execute(_PUT_TYPES, {"cluster": cluster, "rows": dump_json(rows)})
    if created is None:
        connection.execute(_BUMP, {"cluster": cluster})
    return created is not None


def delete_types(
    connection: sa.Connection,
    cluster: str,
    names: Sequence[str],
    version: int | None,
    *,
    allow_missing: bool,
) -> None:
    """Delete GPU types; see ``tessera.db.store.cluster_changes.delete_gpu_types``."""
    row = connection.execute(_CLUSTER, {"name": cluster}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}")
    require_version(f"cluster {cluster}", version, row.version)
    stored = [t.name for t in connection.execute(_TYPES, {"cluster": row.id})]
    missing = set(names) - set(stored)
    if missing and not allow_missing:
        raise NotFound(f"clusters/{cluster}/gpuTypes/{min(missing)}")
    gone = sorted(set(names) & set(stored))
    require_remaining(stored, gone)
    if gone:
        _drop_types(connection, cluster, row.id, gone)
        connection.execute(_BUMP, {"cluster": row.id})


def _drop_types(connection: sa.Connection, cluster: str, key: int, names: Sequence[str]) -> None:
    """Delete GPU types and the data that the service itself keeps for them. Raises InUse."""
    for name in names:
        values = {"cluster": key, "names": [name]}
        if uses := [use for users in TYPE_USERS for use in users.find(connection, values)]:
            commands = ", ".join(_ADVICE[use.kind].format(name=name) for use in uses)
            advice = f"remove what uses it first: {commands}"
            raise InUse(f"clusters/{cluster}/gpuTypes/{name}", uses, advice)
    if names:
        for statement in (_RESET_DIGESTS, *_DROP_OWN, _DROP_TYPES):
            connection.execute(statement, {"cluster": key, "names": list(names)})


def put_nodes(turn: Turn, nodes: Sequence[NodeSpec]) -> bool:
    """Create or change nodes; return whether any changed.

    Raises the errors of ``tessera.db.store.cluster_changes.upsert_nodes``.
    """
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise InvalidInput("nodes", "must name each node only once")
    types = require_types(turn.connection, turn.cluster, {node.gpu_type for node in nodes})
    values = {"cluster": turn.cluster, "names": names}
    stored = {row.name: row for row in turn.connection.execute(_NODES, values)}
    changed = []
    for node in nodes:
        old = stored.get(node.name)
        _require_node(turn.name, node, old)
        if old is None or any(getattr(old, name) != getattr(node, name) for name in _PROPERTIES):
            changed.append(node)
    if not changed:
        return False
    rows = [
        {
            "name": n.name,
            "gpu_type_id": types[n.gpu_type].id,
            "gpus": n.gpus,
            "rack": n.rack,
            **name_amounts(amounts_of(n)),
            "labels": n.labels,
        }
        for n in changed
    ]
    values = {"cluster": turn.cluster, "names": [n.name for n in changed], "rows": dump_json(rows)}
    for statement in (_PUT_NODES, _DROP_GPUS, _PUT_GPUS):
        turn.connection.execute(statement, values)
    return True


def _require_node(cluster: str, node: NodeSpec, old: sa.Row[tuple[object, ...]] | None) -> None:
    if not 1 <= node.gpus <= MAX_GPUS:
        raise InvalidInput(
            f"nodes/{node.name}.gpus", f"must lie in 1 to {MAX_GPUS}; it is {node.gpus}"
        )
    if old is None:
        if node.version is not None:
            raise NotFound(f"clusters/{cluster}/nodes/{node.name}")
        return
    require_version(f"node {node.name}", node.version, old.version)
    if old.last_held >= 0 and (old.gpu_type != node.gpu_type or node.gpus < old.gpus):
        raise NotAllowed(
            f"node {node.name} has GPUs in use; drain it and wait before it changes type or loses GPUs"
        )
