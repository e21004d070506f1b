"""Tenants: their weights, their quotas, and whether they lend and borrow GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.base.limits import require_few
from tessera.db.base.rows import cluster_id
from tessera.db.base.turn import Turn, request_round
from tessera.db.estimates.workloads import require_types
from tessera.formulation.base.errors import InUse, InvalidInput, NotFound, Use
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.state.hierarchy import lines_of_tenants

_TENANTS = sa.text("""
SELECT n.name, n.weight, n.borrow_gpus, n.keeps_idle_quota, coalesce(p.name, '') AS parent,
    coalesce(json_object_agg(coalesce(t.name, ''), q.gpus ORDER BY t.ordinal NULLS FIRST)
        FILTER (WHERE q.id IS NOT NULL), '{}') AS quotas
FROM tenants n LEFT JOIN quotas q ON q.tenant_id = n.id
LEFT JOIN gpu_types t ON t.id = q.gpu_type_id LEFT JOIN tenants p ON p.id = n.parent_id
WHERE n.cluster_id = :cluster GROUP BY n.id, p.name ORDER BY n.name
""")

_PUT = sa.text("""
INSERT INTO tenants (cluster_id, name, weight, borrow_gpus, keeps_idle_quota)
SELECT :cluster, r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r(name text, weight float8, borrow_gpus bigint, keeps_idle_quota boolean)
ON CONFLICT (cluster_id, name) DO UPDATE SET weight = excluded.weight,
    borrow_gpus = excluded.borrow_gpus, keeps_idle_quota = excluded.keeps_idle_quota
""")

_PUT_PARENTS = sa.text("""
UPDATE tenants n SET parent_id = p.id
FROM json_to_recordset(CAST(:rows AS json)) AS r(name text, parent text)
LEFT JOIN tenants p ON p.cluster_id = :cluster AND p.name = r.parent
WHERE n.cluster_id = :cluster AND n.name = r.name
""")

_CHILDREN = sa.text("""
SELECT n.name AS child, p.name AS parent FROM tenants n JOIN tenants p ON p.id = n.parent_id
WHERE n.cluster_id = :cluster AND p.name = ANY(:names) AND n.name <> ALL(:names)
ORDER BY p.name, n.name LIMIT 3
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
            keeps_idle_quota=row.keeps_idle_quota,
            quotas=row.quotas,
            parent=row.parent,
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


def upsert_tenants(
    connection: sa.Connection, cluster: str, tenants: Sequence[TenantSpec]
) -> list[TenantSpec]:
    """Create tenants or replace their settings, all or none; return them as given.

    Raises:
        NotFound: the cluster. LimitReached: there would be too many.
        InvalidInput: a tenant named twice, an unknown GPU type, a number without meaning, a parent
            that is missing or below the tenant itself, too many levels, or quotas that together
            exceed the cluster or a parent's quota.
    """
    turn = Turn.take(connection, cluster)
    names = [tenant.name for tenant in tenants]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidInput("tenants", f"{min(repeated)} is named twice; name each tenant once")
    types = require_types(
        connection, turn.cluster, {name for t in tenants for name in t.quotas if name}
    )
    merged = {t.name: t for t in _stored(connection, turn.cluster)} | {t.name: t for t in tenants}
    lines_of_tenants({t.name: t.parent for t in merged.values()})  # refuses circles
    _require_room(list(merged.values()), {row.name: row.gpus for row in types.values()})
    rows = [
        {
            "name": t.name,
            "weight": str(t.weight),
            "borrow_gpus": t.borrow_gpus,
            "keeps_idle_quota": t.keeps_idle_quota,
            "parent": t.parent,
        }
        for t in tenants
    ]
    quotas = [
        {"tenant": t.name, "gpu_type_id": types[name].id if name else None, "gpus": gpus}
        for t in tenants
        for name, gpus in t.quotas.items()
    ]
    values = {"cluster": turn.cluster, "names": names}
    connection.execute(_PUT, values | {"rows": dump_json(rows)})
    connection.execute(_PUT_PARENTS, values | {"rows": dump_json(rows)})
    connection.execute(_DROP_QUOTAS, values)
    connection.execute(_PUT_QUOTAS, values | {"rows": dump_json(quotas)})
    stored = {t.name: t for t in _stored(connection, turn.cluster)}
    request_round(connection, turn.cluster)
    require_few(connection, cluster, "tenants")
    return [stored[name] for name in names]


def _require_room(tenants: Sequence[TenantSpec], gpus: dict[str, int]) -> None:
    """Check that all quotas can be used at the same time, on all nodes, including drained and
    silent ones.

    A tenant counts with its own quota, or with those of its children if it has none. Its quota must
    be enough for its children. In the sum over all GPU types, it counts with the largest of three
    numbers: its quota for any type, the sum of its quotas for single types, and its children's.
    """
    children: defaultdict[str, list[TenantSpec]] = defaultdict(list)
    for tenant in tenants:
        children[tenant.parent].append(tenant)

    def need(tenant: TenantSpec, kind: str) -> int:
        below = sum(need(child, kind) for child in children[tenant.name])
        quota = tenant.quotas.get(kind)
        if quota is not None and below > max(0, quota):
            what = kind or "any type"
            raise InvalidInput(
                "quotas",
                f"the quotas of {what} of the tenants below {tenant.name} sum to {below} GPUs, but"
                f" its own is {quota}; lower some, or raise its own",
            )
        if kind:
            return below if quota is None else quota
        single = sum(n for name, n in tenant.quotas.items() if name)
        return max(quota or 0, single, below)

    for name, there_are in gpus.items():
        promised = sum(need(tenant, name) for tenant in children[""])
        if promised > there_are:
            raise InvalidInput(
                "quotas",
                f"tenants' quotas of {name} sum to {promised} GPUs, but the cluster has {there_are};"
                " lower some, or add nodes first",
            )
    promised, total = sum(need(tenant, "") for tenant in children[""]), sum(gpus.values())
    if promised > total:
        raise InvalidInput(
            "quotas",
            f"tenants' quotas sum to {promised} GPUs, but the cluster has {total}; lower some, or add"
            " nodes first",
        )


def delete_tenants(
    connection: sa.Connection, cluster: str, names: Sequence[str], *, allow_missing: bool = False
) -> None:
    """Delete the settings of tenants, but not their jobs.

    Raises:
        NotFound: the cluster, or a tenant unless ``allow_missing``.
        InUse: one is the parent of a tenant that is not deleted with it.
    """
    turn = Turn.take(connection, cluster)
    values = {"cluster": turn.cluster, "names": list(names)}
    if rows := connection.execute(_CHILDREN, values).all():
        children = tuple(row.child for row in rows)
        raise InUse(
            f"clusters/{turn.name}/tenants/{rows[0].parent}",
            [
                Use(
                    kind="tenants",
                    one="child",
                    many="children",
                    count=len(children),
                    names=children,
                )
            ],
            "delete these, too, or give them another parent with `tessera tenants apply`",
        )
    gone = connection.execute(_DELETE, values).scalars().all()
    missing = set(names) - set(gone)
    if missing and not allow_missing:
        raise NotFound(f"clusters/{turn.name}/tenants/{min(missing)}")
    request_round(connection, turn.cluster)
