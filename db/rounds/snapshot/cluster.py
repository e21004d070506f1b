"""The small tables of a cluster: GPU types, workloads, plans, nodes, tenants, prices."""

from __future__ import annotations

from typing import Any, Final, TypedDict

import numpy as np
import sqlalchemy as sa

from tessera.db.base.rows import json_rows
from tessera.db.rounds.snapshot.keys import KeyIndex, Keys, split_ints, split_rows
from tessera.db.schema.host import list_host
from tessera.formulation.base.resources import HOST_NAMES, NOT_STATED, name_amounts
from tessera.formulation.base.values import GpuType, Workload
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.state.last_round import Prices
from tessera.formulation.state.snapshot import Nodes
from tessera.formulation.state.tenants import Quotas, Tenants

TABLES: Final = {
    "gpu_types": json_rows(
        "t.id, t.name, t.memory_bytes, t.dollars_per_hour, t.watts",
        "gpu_types t WHERE t.cluster_id = c.id",
        "t.ordinal",
    ),
    "workloads": json_rows(
        "w.id, w.model, w.params, w.global_batch,"
        f" coalesce(w.waits_for->>'code' = '{ReasonCode.NO_ESTIMATE}', false)",
        "workloads w WHERE w.cluster_id = c.id",
        "w.model, w.params, w.global_batch",
    ),
    "plans": json_rows("p.id, p.name", "plans p WHERE p.cluster_id = c.id", "p.name"),
    "nodes": json_rows(
        "n.id, n.name, n.gpu_type_id, n.gpus, n.rack, n.version, NOT n.draining AND coalesce("
        "extract(epoch FROM now() - a.heard_at)::float8 <= :silence_s, false),"
        f" {list_host(f'coalesce(n.@, n.reported_@, {NOT_STATED})')}, n.agent_labels || n.labels",
        "nodes n LEFT JOIN agents a ON a.id = n.agent_id WHERE n.cluster_id = c.id",
        "n.name",
    ),
    "tenants": json_rows(
        "n.id, n.name, n.weight, n.borrow_gpus, n.keeps_idle_quota, coalesce(n.parent_id, 0)",
        "tenants n WHERE n.cluster_id = c.id",
        "n.name",
    ),
    "quotas": json_rows(
        "q.tenant_id, coalesce(q.gpu_type_id, 0), q.gpus",
        "quotas q JOIN tenants n ON n.id = q.tenant_id"
        " LEFT JOIN gpu_types t ON t.id = q.gpu_type_id WHERE n.cluster_id = c.id",
        "n.name, t.ordinal NULLS FIRST",
    ),
    "prices": json_rows(
        "p.key, greatest(p.value::float8, 0)",
        "rounds r CROSS JOIN LATERAL jsonb_each(r.summary->'prices') AS p"
        " WHERE r.cluster_id = c.id AND r.number = c.decided_round"
        " AND jsonb_typeof(p.value) = 'number'",
        'p.key COLLATE "C"',
    ),
}
"""Subqueries for the tables of a cluster (c).

Nodes that were not heard for ``silence_s`` seconds are not schedulable.
"""


class ClusterFacts(TypedDict):
    """The facts of a snapshot in the tables of this module."""

    gpu_types: tuple[GpuType, ...]
    workloads: tuple[Workload, ...]
    plans: tuple[str, ...]
    nodes: Nodes
    tenants: Tenants
    quotas: Quotas
    prices: Prices


def read_cluster(row: sa.Row[Any], keys: Keys) -> ClusterFacts:
    """Return the facts in a row that has the subqueries of ``TABLES``."""
    tenants, quotas = _tenants(row, keys)
    prices, amounts = split_rows(row.prices, 2)
    return {
        "gpu_types": tuple(
            GpuType(
                name=name, memory_bytes=memory, dollars_per_hour=float(dollars), watts=float(watts)
            )
            for _, name, memory, dollars, watts in row.gpu_types
        ),
        "workloads": tuple(
            Workload(model=model, params=params, global_batch=batch)
            for _, model, params, batch, _ in row.workloads
        ),
        "plans": tuple(name for _, name in row.plans),
        "nodes": _nodes(row, keys),
        "tenants": tenants,
        "quotas": quotas,
        "prices": Prices(name=prices, price=np.array(amounts, np.float64)),
    }


def _nodes(row: sa.Row[Any], keys: Keys) -> Nodes:
    _, names, types, gpus, racks, versions, schedulable, *host, _ = split_rows(
        row.nodes, 8 + len(HOST_NAMES)
    )
    return Nodes(
        name=names,
        gpu_type=keys.types.of(np.array(types, np.int64)),
        gpus=np.array(gpus, np.int64),
        rack=racks,
        schedulable=np.array(schedulable, np.bool_),
        version=np.array(versions, np.int64),
        **name_amounts(np.array(amounts, np.int64) for amounts in host),
    )


def _tenants(row: sa.Row[Any], keys: Keys) -> tuple[Tenants, Quotas]:
    own, names, weights, borrow_gpus, keeps_idle_quota, parents = split_rows(row.tenants, 6)
    of_tenants, of_types, gpus = split_ints(row.quotas, 3)
    tenants = KeyIndex(own)
    return Tenants(
        name=names,
        weight=np.array(weights, np.float64),
        borrow_gpus=np.array(borrow_gpus, np.int64),
        keeps_idle_quota=np.array(keeps_idle_quota, np.bool_),
        parent=tenants.of(np.array(parents, np.int64)),
    ), Quotas(tenant=tenants.of(of_tenants), gpu_type=keys.types.of(of_types), gpus=gpus)
