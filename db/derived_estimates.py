"""Models, the inputs of estimates, and the estimates that the service makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from tessera.db import profiling
from tessera.db.cells import cell_on, estimate_rows
from tessera.db.documents import dump_json, reason_plain
from tessera.db.rows import cluster_id, enter_cluster
from tessera.db.tables import LIVE
from tessera.db.workloads import ensure_plans, ensure_workloads, lock_workloads, require_types
from tessera.formulation.reasons import Reason
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    EstimationInputs,
    MeasurementRecord,
    ModelSpec,
    UnestimatedWorkload,
)
from tessera.formulation.values import PROFILING, EstimateSource, GpuType, Workload

ESTIMATING_CHANNEL = "tessera_estimating"
"""Channel that receives a cluster's name when a workload may need new estimates."""

MAX_MEASUREMENTS = 200
"""Number of latest measurements that correct the estimates."""

_READING = (
    "sequence",
    "dtype",
    "flash",
    "micro_batches",
    "state_bytes",
    "checkpointing",
    "zero",
    "step",
    "step_arguments",
)

_PUT_MODELS = sa.text("""
INSERT INTO models (cluster_id, model, params, architecture, reading)
SELECT :cluster, r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r(model text, params text, architecture text, reading jsonb)
ON CONFLICT (cluster_id, model, params) DO UPDATE SET
    architecture = excluded.architecture, reading = excluded.reading
""")

_MODELS = sa.text("""
SELECT model, params, architecture, reading FROM models WHERE cluster_id = :cluster
ORDER BY model, params
""")

_KINDS = sa.text("""
SELECT t.name, t.memory_bytes, t.dollars_per_hour, t.watts, coalesce(max(n.gpus), 0) AS node_gpus,
    coalesce(sum(n.gpus), 0)::bigint AS gpus
FROM gpu_types t LEFT JOIN nodes n ON n.gpu_type_id = t.id
WHERE t.cluster_id = :cluster GROUP BY t.id ORDER BY t.ordinal
""")

_MEASUREMENTS = sa.text("""
SELECT w.model, w.params, w.global_batch, t.name AS gpu_type, m.gpus, m.nodes, m.pipeline_degree,
    p.name AS plan, m.iter_time_s
FROM measurements m JOIN workloads w ON w.id = m.workload_id
JOIN gpu_types t ON t.id = m.gpu_type_id JOIN plans p ON p.id = m.plan_id
WHERE w.cluster_id = :cluster AND m.iter_time_s IS NOT NULL
ORDER BY m.changed_at DESC, m.id DESC LIMIT :latest
""")

_WANTED = sa.text(f"""
SELECT w.model, w.params, w.global_batch, w.derived_from,
    array_agg(DISTINCT j.requested_gpus ORDER BY j.requested_gpus) AS requests,
    array_remove(array_agg(DISTINCT j.min_gpus) || array_agg(DISTINCT j.max_gpus), 0) AS bounds,
    (SELECT coalesce(array_agg(DISTINCT e.gpus ORDER BY e.gpus), '{{}}') FROM estimates e
        WHERE e.workload_id = w.id AND e.derived AND e.source > {int(EstimateSource.MEASURED)}) AS counts,
    bool_or(j.profile) AS profile
FROM workloads w JOIN jobs j ON j.workload_id = w.id
WHERE w.cluster_id = :cluster AND w.model <> '{PROFILING}' AND j.{LIVE}
    AND (w.derived_from <> '' OR NOT EXISTS (
        SELECT FROM estimates e WHERE e.workload_id = w.id AND NOT e.derived))
GROUP BY w.id ORDER BY min(j.id)
""")  # noqa: S608 - a constant of tessera.db.tables

# Source 0 is measured, the others are computed.
_DERIVE = sa.text("""
INSERT INTO estimates AS e
    (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, iter_time_s, source, provenance,
     sd, traffic, derived)
SELECT r.*, true FROM json_to_recordset(CAST(:rows AS json)) AS r(
    w bigint, t bigint, g bigint, n bigint, d bigint, p bigint, s float8, k bigint, v text, u float8,
    x text)
WHERE r.k = 0 OR NOT EXISTS (
    SELECT FROM estimates o WHERE NOT o.derived AND o.workload_id = r.w AND o.gpu_type_id = r.t
        AND o.gpus = r.g)
ON CONFLICT ON CONSTRAINT uq_estimates_shape DO UPDATE SET
    iter_time_s = excluded.iter_time_s, source = excluded.source, provenance = excluded.provenance,
    sd = excluded.sd, traffic = coalesce(nullif(excluded.traffic, ''), e.traffic)
WHERE e.derived AND (e.source > 0 OR excluded.source = 0)
""")

_DERIVED_FROM = sa.text("""
UPDATE workloads w SET derived_from = r.derived_from, waits_for = NULL
FROM json_to_recordset(CAST(:rows AS json)) AS r(id bigint, derived_from text) WHERE w.id = r.id
""")

_SAY = sa.text("""
UPDATE workloads w SET waits_for = r.reason
FROM json_to_recordset(CAST(:rows AS json)) AS
    r(model text, params text, global_batch bigint, reason jsonb)
WHERE w.cluster_id = :cluster AND w.model = r.model AND w.params = r.params
    AND w.global_batch = r.global_batch
""")

_NOTIFY = sa.text("SELECT pg_notify(:channel, :name)")


def upsert_models(connection: sa.Connection, cluster: str, models: Sequence[ModelSpec]) -> int:
    """Create or replace models; return how many. Raises NotFound (the cluster)."""
    rows = []
    for spec in sorted(models, key=lambda m: (m.model, m.params)):
        plain = asdict(spec)
        reading = {name: plain.pop(name) for name in _READING}
        rows.append(plain | {"reading": reading})
    values = {"cluster": enter_cluster(connection, cluster), "rows": dump_json(rows)}
    connection.execute(_PUT_MODELS, values)
    notify_estimators(connection, cluster)
    return len(rows)


def list_models(connection: sa.Connection, cluster: str) -> list[ModelSpec]:
    """Return the users' models, by name. Raises NotFound (the cluster)."""
    return _models(connection, cluster_id(connection, cluster))


def load_estimation(connection: sa.Connection, cluster: str) -> EstimationInputs:
    """Return everything that the cluster's estimates are computed from. Raises NotFound."""
    of = {"cluster": cluster_id(connection, cluster)}
    return EstimationInputs(
        kinds=tuple(
            ClusterGpuType(
                gpu_type=GpuType(
                    name=r.name,
                    memory_bytes=r.memory_bytes,
                    dollars_per_hour=r.dollars_per_hour,
                    watts=r.watts,
                ),
                node_gpus=r.node_gpus,
                gpus=r.gpus,
            )
            for r in connection.execute(_KINDS, of)
        ),
        models=tuple(_models(connection, of["cluster"])),
        measurements=tuple(
            MeasurementRecord(workload=_workload(r), cell=cell_on(r), iter_time_s=r.iter_time_s)
            for r in reversed(
                connection.execute(_MEASUREMENTS, of | {"latest": MAX_MEASUREMENTS}).all()
            )
        ),
        wanted=tuple(
            UnestimatedWorkload(
                workload=_workload(r),
                requests=tuple(r.requests),
                counts=tuple(sorted({*r.counts, *r.bounds})),
                derived_from=r.derived_from,
                profile=r.profile,
            )
            for r in connection.execute(_WANTED, of)
        ),
        profiles=profiling.load_profiles(connection, of["cluster"]),
        profiling=profiling.list_tasks(connection, of["cluster"]),
    )


def put_derived_estimates(
    connection: sa.Connection,
    cluster: str,
    estimates: Sequence[EstimateRecord],
    derived_from: Mapping[Workload, str],
) -> int:
    """Store estimates that the service made; return how many were new or replaced another.

    Rows that users wrote are not changed. If they have a row for a GPU type and a number of GPUs,
    only measured estimates are added next to it. A measured row of the service is replaced only by
    a measured one. Computed rows, analytic or profiled, are always the latest ones.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type.
    """
    key = enter_cluster(connection, cluster)
    types = require_types(connection, key, {e.cell.gpu_type for e in estimates})
    ids = ensure_workloads(connection, key, {e.workload for e in estimates} | derived_from.keys())
    lock_workloads(connection, ids.values())
    plans = ensure_plans(connection, key, {e.cell.plan for e in estimates})
    rows = estimate_rows(estimates, ids, {name: t.id for name, t in types.items()}, plans)
    kept = connection.execute(_DERIVE, {"rows": dump_json(rows)}).rowcount if rows else 0
    if derived_from:
        news = [{"id": ids[w], "derived_from": text} for w, text in derived_from.items()]
        connection.execute(_DERIVED_FROM, {"rows": dump_json(sorted(news, key=lambda r: r["id"]))})
    return kept


def record_wait_reasons(
    connection: sa.Connection, cluster: str, reasons: Mapping[Workload, Reason | None]
) -> None:
    """Record why workloads have no estimates, for readers of their jobs. None clears the reason."""
    rows = [
        {
            "model": w.model,
            "params": w.params,
            "global_batch": w.global_batch,
            "reason": reason_plain(reason),
        }
        for w, reason in sorted(reasons.items(), key=lambda item: item[0].key)
    ]
    connection.execute(
        _SAY, {"cluster": enter_cluster(connection, cluster), "rows": dump_json(rows)}
    )


def notify_estimators(connection: sa.Connection, cluster: str) -> None:
    """Wake the tasks that make estimates, once this transaction is committed."""
    connection.execute(_NOTIFY, {"channel": ESTIMATING_CHANNEL, "name": cluster})


def _models(connection: sa.Connection, cluster: int) -> list[ModelSpec]:
    return [
        ModelSpec(
            model=r.model, params=r.params, architecture=r.architecture, **_reading(r.reading)
        )
        for r in connection.execute(_MODELS, {"cluster": cluster})
    ]


def _reading(stored: dict[str, Any]) -> dict[str, Any]:
    return stored | {"step_arguments": tuple(stored.get("step_arguments", ()))}


def _workload(row: sa.Row[tuple[object, ...]]) -> Workload:
    return Workload(model=row.model, params=row.params, global_batch=row.global_batch)
