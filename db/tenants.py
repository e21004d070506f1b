"""Tenants: their weights, their quotas, and whether they lend and borrow GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from tessera.db.documents import dump_json
from tessera.db.rows import cluster_id
from tessera.db.turn import Turn
from tessera.db.workloads import require_types
from tessera.formulation.errors import InvalidInput, NotFound
from tessera.formulation.records.clusters import TenantSpec

_TENANTS = sa.text("""
SELECT n.name, n.weight, n.borrow_gpus, n.lends,
    coalesce(json_object_agg(coalesce(t.name, ''), q.gpus ORDER BY t.ordinal NULLS FIRST)
        FILTER (WHERE q.id IS NOT NULL), '{}') AS quotas
FROM tenants n LEFT JOIN quotas q ON q.tenant_id = n.id
LEFT JOIN gpu_types t ON t.id = q.gpu_type_id
WHERE n.cluster_id = :cluster GROUP BY n.id ORDER BY n.name
""")

_PUT = sa.text("""
INSERT INTO tenants (cluster_id, name, weight, borrow_gpus, lends)
SELECT :cluster, r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r(name text, weight float8, borrow_gpus bigint, lends boolean)
ON CONFLICT (cluster_id, name) DO UPDATE SET weight = excluded.weight,
    borrow_gpus = excluded.borrow_gpus, lends = excluded.lends
""")

_DROP_QUOTAS = sa.text("""
DELETE FROM quotas q USING tenants n
WHERE q.tenant_id = n.id AND n.cluster_id = :cluster AND n.name = ANY(:names)
""")

_PUT_QUOTAS = sa.text("""
INSERT INTO quotas (tenant_id, gpu_type_id, gpus)
SELECT n.id, r.gpu_type_id, r.gpus
FROM json_to_recordset(CAST(:rows AS json)) AS r(tenant text, gpu_type_id bigint, gpus bigint)
JOIN tenants n ON n.cluster_id = :cluster AND n.name = r.tenant
""")

_DELETE = sa.text("""
DELETE FROM tenants WHERE cluster_id = :cluster AND name = ANY(:names) RETURNING name
""")

_OF_JOBS = sa.text("""
SELECT j.name, j.tenant FROM jobs j JOIN clusters c ON c.id = j.cluster_id
WHERE c.name = :cluster AND j.name = ANY(:names)
""")


def list_tenants(connection: sa.Connection, cluster: str) -> list[TenantSpec]:
    """Return the tenants that have settings, by name. Raises NotFound (the cluster)."""
    return _stored(connection, cluster_id(connection, cluster))


def _stored(connection: sa.Connection, cluster: int) -> list[TenantSpec]:
    return [
        TenantSpec(
            name=row.name,
            weight=row.weight,
            borrow_gpus=row.borrow_gpus,
            lends=row.lends,
            quotas=row.quotas,
        )
        for row in connection.execute(_TENANTS, {"cluster": cluster})
    ]


def tenants_of_jobs(
    connection: sa.Connection, cluster: str, names: Collection[str]
) -> dict[str, str]:
    """Return the tenant of each of these jobs that exists. A missing cluster has no jobs.

    The names may be any texts, because callers are checked before what they send.
    """
    values = {"cluster": cluster, "names": [name for name in names if "\0" not in name]}
    if "\0" in cluster or not values["names"]:
        return {}
    return {row.name: row.tenant for row in connection.execute(_OF_JOBS, values)}


def upsert_tenants(turn: Turn, tenants: Sequence[TenantSpec]) -> list[TenantSpec]:
    """Create tenants or replace their settings, all or none; return them as given.

    Raises:
        InvalidInput: a tenant named twice, an unknown GPU type, a number without meaning, or quotas
            that together exceed the cluster.
    """
    names = [tenant.name for tenant in tenants]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidInput("tenants", f"{min(repeated)} is named twice; name each tenant once")
    types = require_types(
        turn.connection, turn.cluster, {name for t in tenants for name in t.quotas if name}
    )
    merged = {t.name: t for t in _stored(turn.connection, turn.cluster)} | {
        t.name: t for t in tenants
    }
    _require_room(list(merged.values()), {row.name: row.gpus for row in types.values()})
    rows = [
        {"name": t.name, "weight": str(t.weight), "borrow_gpus": t.borrow_gpus, "lends": t.lends}
        for t in tenants
    ]
    quotas = [
        {"tenant": t.name, "gpu_type_id": types[name].id if name else None, "gpus": gpus}
        for t in tenants
        for name, gpus in t.quotas.items()
    ]
    values = {"cluster": turn.cluster, "names": names}
    turn.connection.execute(_PUT, values | {"rows": dump_json(rows)})
    turn.connection.execute(_DROP_QUOTAS, values)
    turn.connection.execute(_PUT_QUOTAS, values | {"rows": dump_json(quotas)})
    stored = {t.name: t for t in _stored(turn.connection, turn.cluster)}
    return [stored[name] for name in names]


def _require_room(tenants: Sequence[TenantSpec], gpus: dict[str, int]) -> None:
    """Check that all quotas can be used at the same time, on all nodes, including drained and
    silent ones.

    In the sum over all GPU types, a tenant counts with the larger of two numbers: its quota for any
    type, or the sum of its quotas for single types.
    """
    for name, there_are in gpus.items():
        promised = sum(tenant.quotas.get(name, 0) for tenant in tenants)
        if promised > there_are:
            raise InvalidInput(
                "quotas",
                f"tenants' quotas of {name} sum to {promised} GPUs, but the cluster has {there_are};"
                " lower some, or add nodes first",
            )
    promised = sum(
        max(t.quotas.get("", 0), sum(n for name, n in t.quotas.items() if name)) for t in tenants
    )
    total = sum(gpus.values())
    if promised > total:
        raise InvalidInput(
            "quotas",
            f"tenants' quotas sum to {promised} GPUs, but the cluster has {total}; lower some, or add"
            " nodes first",
        )


def delete_tenants(turn: Turn, names: Sequence[str], *, allow_missing: bool = False) -> None:
    """Delete the settings of tenants. Raises NotFound, unless ``allow_missing``."""
    values = {"cluster": turn.cluster, "names": list(names)}
    gone = turn.connection.execute(_DELETE, values).scalars().all()
    missing = set(names) - set(gone)
    if missing and not allow_missing:
        raise NotFound(f"clusters/{turn.name}/tenants/{min(missing)}")
