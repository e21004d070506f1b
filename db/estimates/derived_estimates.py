"""Models, the inputs of estimates, and the estimates that the service makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from tessera.db.base.cells import cell_on, estimate_rows, stored_plan
from tessera.db.base.documents import dump_json, reason_plain
from tessera.db.base.limits import require_few, require_few_estimates
from tessera.db.base.rows import cluster_id, enter_cluster
from tessera.db.base.turn import request_round
from tessera.db.estimates import profiling
from tessera.db.estimates.plans import ensure_plans, ensure_unnamed_plan
from tessera.db.estimates.tunings import put_tunings
from tessera.db.estimates.workloads import ensure_workloads, lock_workloads, require_types
from tessera.db.schema.host import list_host
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.resources import HostCapacity, amounts_of, name_amounts
from tessera.formulation.base.values import PROFILING, Cell, EstimateSource, GpuType, Workload
from tessera.formulation.job.launch import TuningSpace
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.formulation.job.techniques import PlanLimits, Technique
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    EstimationInputs,
    MeasurementRecord,
    ModelSpec,
    TuningRecord,
    UnestimatedWorkload,
)

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

_KINDS = sa.text(f"""
SELECT t.name, t.memory_bytes, t.dollars_per_hour, t.watts, coalesce(max(n.gpus), 0) AS node_gpus,
    coalesce(sum(n.gpus), 0)::bigint AS gpus, {list_host("max(coalesce(n.@, n.reported_@)) AS node_@")}
FROM gpu_types t LEFT JOIN nodes n ON n.gpu_type_id = t.id
WHERE t.cluster_id = :cluster GROUP BY t.id ORDER BY t.ordinal
""")  # noqa: S608 - a constant of tessera.db.schema.host

_MEASUREMENTS = sa.text(f"""
SELECT w.model, w.params, w.global_batch, t.name AS gpu_type, m.gpus, m.nodes, m.pipeline_degree,
    p.name AS plan, p.document, m.iter_time_s
FROM measurements m JOIN workloads w ON w.id = m.workload_id
JOIN gpu_types t ON t.id = m.gpu_type_id JOIN plans p ON p.id = m.plan_id
WHERE w.cluster_id = :cluster AND m.iter_time_s IS NOT NULL
    AND m.source = {int(EstimateSource.MEASURED)}
ORDER BY m.changed_at DESC, m.id DESC LIMIT :latest
""")  # noqa: S608 - a constant of formulation

_HAS_NO_PLAN = """NOT e.derived AND p.name = '' AND e.iter_time_s < 'Infinity' AND NOT EXISTS (
    SELECT FROM jobs r WHERE r.workload_id = e.workload_id AND r.cell_type_id = e.gpu_type_id
        AND r.cell_gpus = e.gpus AND r.cell_degree = e.pipeline_degree AND r.cell_plan_id = e.plan_id)"""
"""Whether a user's estimate (e) has a time but no plan (p), and no job (r) runs by it."""

_WANTED = sa.text(f"""
SELECT w.model, w.params, w.global_batch, w.derived_from,
    array_agg(DISTINCT j.requested_gpus ORDER BY j.requested_gpus) AS requests,
    array_remove(array_agg(DISTINCT j.min_gpus) || array_agg(DISTINCT j.max_gpus), 0) AS bounds,
    (SELECT coalesce(array_agg(DISTINCT e.gpus ORDER BY e.gpus), '{{}}') FROM estimates e
        WHERE e.workload_id = w.id AND e.derived AND e.source > {int(EstimateSource.MEASURED)}) AS counts,
    coalesce(jsonb_agg(DISTINCT jsonb_build_array(j.runtime, j.techniques))
        FILTER (WHERE j.plan_id IS NULL OR j.plan_first), '[]') AS limits,
    bool_or(j.profile) AS profile,
    coalesce((array_agg(j.name ORDER BY j.id) FILTER (WHERE j.profile))[1], '') AS asking_job,
    w.waits_for IS NOT NULL AS has_reason,
    w.derived_from = '' AND EXISTS (
        SELECT FROM estimates e WHERE e.workload_id = w.id AND NOT e.derived) AS plans_only,
    (SELECT coalesce(json_agg(p.document ORDER BY p.name), '[]') FROM plans p WHERE p.id IN (
        SELECT unnest(ARRAY[k.plan_id, k.submitted_plan_id])
        FROM jobs k WHERE k.workload_id = w.id AND k.{LIVE})) AS plans,
    (SELECT coalesce(json_agg(json_build_array(t.name, e.gpus, e.pipeline_degree, p.name, e.nodes)
            ORDER BY t.ordinal, e.gpus, e.nodes, e.pipeline_degree), '[]')
        FROM estimates e JOIN gpu_types t ON t.id = e.gpu_type_id JOIN plans p ON p.id = e.plan_id
        WHERE e.workload_id = w.id AND {_HAS_NO_PLAN}) AS without_plan,
    (SELECT coalesce(json_agg(json_build_array(t.name, e.gpus, e.pipeline_degree, p.name, e.nodes)
            ORDER BY t.ordinal, e.gpus, e.nodes, e.pipeline_degree, p.name), '[]')
        FROM estimates e JOIN gpu_types t ON t.id = e.gpu_type_id JOIN plans p ON p.id = e.plan_id
        WHERE e.workload_id = w.id AND e.iter_time_s = 'Infinity' AND p.document <> ''
            AND e.source = {int(EstimateSource.MEASURED)}) AS exhausted,
    (SELECT coalesce(jsonb_agg(DISTINCT jsonb_build_array(k.runtime, k.launch->>'tuning_space')), '[]')
        FROM jobs k WHERE k.workload_id = w.id AND k.{LIVE}
            AND k.launch->>'tuning_space' IS NOT NULL) AS tunings
FROM workloads w JOIN jobs j ON j.workload_id = w.id
WHERE w.cluster_id = :cluster AND w.model <> '{PROFILING}' AND j.{LIVE}
    AND (w.derived_from <> '' OR NOT EXISTS (
        SELECT FROM estimates e WHERE e.workload_id = w.id AND NOT e.derived)
        OR EXISTS (SELECT FROM estimates e JOIN plans p ON p.id = e.plan_id
            WHERE e.workload_id = w.id AND {_HAS_NO_PLAN})
        OR EXISTS (SELECT FROM unnest(ARRAY[j.plan_id, j.submitted_plan_id]) AS own(plan_id)
            WHERE own.plan_id IS NOT NULL AND NOT EXISTS (SELECT FROM estimates e
                WHERE e.workload_id = w.id AND e.plan_id = own.plan_id)))
GROUP BY w.id ORDER BY min(j.id)
""")  # noqa: S608 - a constant of tessera.db.schema.tables

# Source 0 is measured, the others are computed. Users' rows for the same GPUs do not replace those of
# the plans that jobs state or were submitted with. A plan that ran out of memory here stays
# infeasible, even if it was measured before. A measured time says nothing of cores and host memory.
_DERIVE = sa.text(f"""
INSERT INTO estimates AS e
    (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, iter_time_s, source, provenance,
     sd, complete, {list_host("@")}, traffic, derived)
SELECT r.*, true FROM json_to_recordset(CAST(:rows AS json)) AS r(
    w bigint, t bigint, g bigint, n bigint, d bigint, p bigint, s float8, k bigint, v text, u float8,
    c boolean, {list_host("@ bigint")}, x text)
WHERE r.k = 0 OR NOT EXISTS (
    SELECT FROM estimates o WHERE NOT o.derived AND o.workload_id = r.w AND o.gpu_type_id = r.t
        AND o.gpus = r.g)
    OR EXISTS (SELECT FROM jobs j WHERE j.workload_id = r.w
        AND r.p IN (j.plan_id, j.submitted_plan_id))
ON CONFLICT ON CONSTRAINT uq_estimates_shape DO UPDATE SET
    iter_time_s = excluded.iter_time_s, source = excluded.source, provenance = excluded.provenance,
    sd = excluded.sd, complete = excluded.complete,
    {list_host("@ = CASE WHEN excluded.source > 0 OR excluded.@ > 0 THEN excluded.@ ELSE e.@ END")},
    traffic = coalesce(nullif(excluded.traffic, ''), e.traffic)
WHERE e.derived AND (e.source > 0 OR (excluded.source = 0 AND e.iter_time_s < 'Infinity'))
""")  # noqa: S608 - constants of formulation

# Other plans are now the best ones of the shape and degree: one of all, and one of each runtime that
# cannot run every plan. One that is known to run out of memory replaces nothing. Plans that jobs run
# by, state or were submitted with are kept.
_REPLACE = sa.text("""
WITH news AS (
    SELECT * FROM json_to_recordset(CAST(:rows AS json)) AS r(
        w bigint, t bigint, g bigint, n bigint, d bigint, p bigint, k bigint))
DELETE FROM estimates e USING news r
WHERE r.k > 0 AND e.derived AND e.source > 0
    AND e.workload_id = r.w AND e.gpu_type_id = r.t AND e.gpus = r.g AND e.nodes = r.n
    AND e.pipeline_degree = r.d AND e.plan_id <> r.p
    AND NOT EXISTS (SELECT FROM news o WHERE o.w = e.workload_id AND o.t = e.gpu_type_id
        AND o.g = e.gpus AND o.n = e.nodes AND o.d = e.pipeline_degree AND o.p = e.plan_id)
    AND NOT EXISTS (SELECT FROM estimates x
        WHERE x.workload_id = r.w AND x.gpu_type_id = r.t AND x.gpus = r.g AND x.nodes = r.n
        AND x.pipeline_degree = r.d AND x.plan_id = r.p AND x.source = 0 AND x.iter_time_s = 'Infinity')
    AND NOT EXISTS (SELECT FROM jobs j
        WHERE j.workload_id = e.workload_id
            AND e.plan_id IN (j.plan_id, j.submitted_plan_id))
    AND NOT EXISTS (SELECT FROM jobs j WHERE j.workload_id = e.workload_id
        AND j.cell_type_id = e.gpu_type_id AND j.cell_gpus = e.gpus
        AND j.cell_degree = e.pipeline_degree AND j.cell_plan_id = e.plan_id)
""")

# Where a Cell with a pipeline degree and one without get the same plan, it is the former's.
_ADD_PLANS = sa.text(f"""
UPDATE estimates e SET plan_id = r.p, pipeline_degree = r.d, stated_degree = r.was,
    provenance = left(concat_ws('; ', nullif(e.provenance, ''), r.v), 1000),
    traffic = coalesce(nullif(e.traffic, ''), r.x)
FROM (SELECT DISTINCT ON (w, t, g, n, d, p) * FROM json_to_recordset(CAST(:rows AS json)) AS rows(
    w bigint, t bigint, g bigint, n bigint, d bigint, p bigint, v text, x text, was bigint)
    ORDER BY w, t, g, n, d, p, was DESC) AS r, plans p
WHERE e.workload_id = r.w AND e.gpu_type_id = r.t AND e.gpus = r.g AND e.nodes = r.n
    AND e.pipeline_degree = r.was AND p.id = e.plan_id AND {_HAS_NO_PLAN}
    AND NOT EXISTS (SELECT FROM estimates o WHERE o.workload_id = r.w AND o.gpu_type_id = r.t
        AND o.gpus = r.g AND o.nodes = r.n AND o.pipeline_degree = r.d AND o.plan_id = r.p)
""")  # noqa: S608 - a constant of this module

_DERIVED_FROM = sa.text("""
UPDATE workloads w SET derived_from = r.derived_from, waits_for = NULL
FROM json_to_recordset(CAST(:rows AS json)) AS r(id bigint, derived_from text) WHERE w.id = r.id
""")

_SAY = sa.text("""
UPDATE workloads w SET waits_for = r.reason
FROM json_to_recordset(CAST(:rows AS json)) AS
    r(model text, params text, global_batch bigint, reason jsonb)
WHERE w.cluster_id = :cluster AND w.model = r.model AND w.params = r.params
    AND w.global_batch = r.global_batch AND w.waits_for IS DISTINCT FROM r.reason
RETURNING w.id, w.waits_for->>'code' AS code
""")

_NOTIFY = sa.text("SELECT pg_notify(:channel, :name)")


def upsert_models(connection: sa.Connection, cluster: str, models: Sequence[ModelSpec]) -> int:
    """Create or replace users' models, all or none; return how many.

    Raises:
        NotFound: the cluster. LimitReached: there would be too many.
    """
    rows = []
    for spec in sorted(models, key=lambda m: (m.model, m.params)):
        plain = asdict(spec)
        reading = {name: plain.pop(name) for name in _READING}
        rows.append(plain | {"reading": reading})
    values = {"cluster": enter_cluster(connection, cluster), "rows": dump_json(rows)}
    connection.execute(_PUT_MODELS, values)
    notify_estimators(connection, cluster)
    require_few(connection, cluster, "models")
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
                node_host=HostCapacity(**name_amounts(amounts_of(r, "node_"))),
            )
            for r in connection.execute(_KINDS, of)
        ),
        models=tuple(_models(connection, of["cluster"])),
        measurements=tuple(
            MeasurementRecord(
                workload=_workload(r),
                cell=cell_on(r),
                iter_time_s=r.iter_time_s,
                plan=stored_plan(r.document),
            )
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
                asking_job=r.asking_job,
                plans_only=r.plans_only,
                plans=tuple(plan for text in r.plans if (plan := stored_plan(text)) is not None),
                has_reason=r.has_reason,
                limits=tuple(own for own in _limits(r.limits) if not own.allow_every_plan),
                is_open=not r.limits or not all(own.techniques for own in _limits(r.limits)),
                without_plan=_make_cells(r.without_plan),
                exhausted=_make_cells(r.exhausted),
                tunings=tuple((runtime, TuningSpace(space)) for runtime, space in r.tunings),
            )
            for r in connection.execute(_WANTED, of)
        ),
        profiles=profiling.load_profiles(connection, of["cluster"]),
        profiling=profiling.list_tasks(connection, of["cluster"]),
        runs=profiling.list_runs(connection, of["cluster"]),
        gaps=profiling.load_gaps(connection, of["cluster"]),
        hosts=profiling.load_hosts(connection, of["cluster"]),
    )


def put_derived_estimates(
    connection: sa.Connection,
    cluster: str,
    estimates: Sequence[EstimateRecord],
    derived_from: Mapping[Workload, str],
    tunings: Sequence[TuningRecord] = (),
) -> int:
    """Store estimates that the service made; return how many were new or replaced another.

    Rows that users wrote are not changed. If they have a row for a GPU type and a number of GPUs,
    only measured estimates are added next to it. A measured row of the service is replaced only by
    a measured one, and that of a plan that ran out of memory by none. Computed rows, analytic or
    profiled, are always the latest ones: a row of another plan on the same shape is deleted, unless
    a job runs by that plan.
    If live jobs have one of the workloads, a round is requested. ``derived_from`` maps each workload
    to the digest of the inputs of its estimates, and the reason why it has none is deleted.
    ``tunings`` are plans to try around those of the estimates.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type, or a plan that is not stored.
        LimitReached: a workload would have too many estimates.
    """
    key = enter_cluster(connection, cluster)
    types = require_types(connection, key, {e.cell.gpu_type for e in estimates})
    ids = ensure_workloads(connection, key, {e.workload for e in estimates} | derived_from.keys())
    lock_workloads(connection, ids.values())
    plans = ensure_plans(connection, key, estimates)
    type_ids = {name: t.id for name, t in types.items()}
    rows = estimate_rows(estimates, ids, type_ids, plans)
    kept = 0
    if rows:
        values = {"rows": dump_json(rows)}
        kept = connection.execute(_DERIVE, values).rowcount
        connection.execute(_REPLACE, values)
        require_few_estimates(connection, ids)
    put_tunings(connection, key, tunings, ids, type_ids)
    if kept:
        request_round(connection, key, {ids[e.workload] for e in estimates})
    if derived_from:
        news = [{"id": ids[w], "derived_from": text} for w, text in derived_from.items()]
        connection.execute(_DERIVED_FROM, {"rows": dump_json(sorted(news, key=lambda r: r["id"]))})
    return kept


def add_plans(
    connection: sa.Connection, cluster: str, planned_cells: Sequence[tuple[Cell, EstimateRecord]]
) -> int:
    """Give users' estimates that have none an execution plan; return how many got one.

    Each Cell is as the user stated it. Its estimate keeps its time and source. The record has its
    plan, provenance and traffic. An estimate that a job runs by, or whose plan has one of its own,
    stays as it is.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type.
    """
    key = enter_cluster(connection, cluster)
    records = [record for _, record in planned_cells]
    types = require_types(connection, key, {r.cell.gpu_type for r in records})
    ids = ensure_workloads(connection, key, {r.workload for r in records})
    lock_workloads(connection, ids.values())
    plans = ensure_plans(connection, key, records)
    rows = [
        {
            "w": ids[r.workload],
            "t": types[r.cell.gpu_type].id,
            "g": r.cell.gpus,
            "n": r.cell.nodes,
            "d": r.cell.pipeline_degree,
            "p": plans[r.cell.plan],
            "v": r.provenance,
            "x": "" if r.traffic is None else r.traffic.to_json(),
            "was": user_cell.pipeline_degree,
        }
        for user_cell, r in planned_cells
    ]
    plan_count = connection.execute(_ADD_PLANS, {"rows": dump_json(rows)}).rowcount
    if plan_count:
        request_round(connection, key, set(ids.values()))
    return plan_count


def record_wait_reasons(
    connection: sa.Connection, cluster: str, reasons: Mapping[Workload, Reason | None]
) -> None:
    """Record why workloads have no estimates, for rounds and readers of their jobs.

    None clears the reason. With NO_ESTIMATE, none can be derived: jobs that state a GPU type then
    run without one, by the plan "". A round is requested for them.
    """
    key = enter_cluster(connection, cluster)
    if any(reason is not None for reason in reasons.values()):
        ensure_unnamed_plan(connection, key)
    rows = [
        {
            "model": w.model,
            "params": w.params,
            "global_batch": w.global_batch,
            "reason": reason_plain(reason),
        }
        for w, reason in sorted(reasons.items(), key=lambda item: item[0].key)
    ]
    changed = connection.execute(_SAY, {"cluster": key, "rows": dump_json(rows)}).all()
    if hopeless := [row.id for row in changed if row.code == ReasonCode.NO_ESTIMATE]:
        request_round(connection, key, hopeless)


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


def _make_cells(rows: Iterable[tuple[str, int, int, str, int]]) -> tuple[Cell, ...]:
    return tuple(
        Cell(gpu_type=t, gpus=g, pipeline_degree=d, plan=p, nodes=n) for t, g, d, p, n in rows
    )


def _limits(stored: Iterable[tuple[str, list[str]]]) -> list[PlanLimits]:
    """Return the limits of plans of runtimes that this release knows."""
    return [
        PlanLimits(runtime=runtime, techniques=tuple(map(Technique, techniques)))
        for runtime, techniques in stored
        if runtime in RUNTIMES
    ]


def _reading(stored: dict[str, Any]) -> dict[str, Any]:
    return stored | {"step_arguments": tuple(stored["step_arguments"])}


def _workload(row: sa.Row[tuple[object, ...]]) -> Workload:
    return Workload(model=row.model, params=row.params, global_batch=row.global_batch)
