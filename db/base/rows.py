"""Domain values from rows: the queries that read records, and the mapping of their columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tessera.db.base.cells import cell_of_job, stored_plan
from tessera.db.base.dependencies import DEPENDENCIES, stored_dependencies
from tessera.db.base.documents import planned_start_from, schedule_from_plain
from tessera.db.base.forecasts import FORECAST_COLUMNS, forecast_record
from tessera.db.base.runtime_offers import stored_offers
from tessera.db.base.training import TRAINING_COLUMNS, training_record
from tessera.db.base.wait_reasons import reasons_of
from tessera.db.schema.job_columns import stated_in
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.errors import NotFound
from tessera.formulation.base.resources import HOST_NAMES, REPORTED_PREFIX
from tessera.formulation.base.values import EstimateSource, GpuType, Workload
from tessera.formulation.job.arrays import ArrayMember
from tessera.formulation.job.dependencies import Dependency
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.agents import HealthFault
from tessera.formulation.records.clusters import ClusterRecord, NodeRecord, NodeSpec
from tessera.formulation.records.jobs import AllocationRecord, JobRecord, JobSpec

Row = sa.RowMapping


def named_subqueries(queries: Mapping[str, str]) -> str:
    """Return the given subqueries as columns of a SELECT, by name."""
    return ",\n    ".join(f"{query} AS {name}" for name, query in queries.items())


def json_rows(columns: str, source: str, order: str = "") -> str:
    """Return a subquery for all rows of ``source`` as one JSON array of arrays, in ``order``.

    Several of them form one statement, because each statement is a wait for the database.
    """
    ordered = f" ORDER BY {order}" if order else ""
    return f"""(
    SELECT coalesce(json_agg(json_build_array({columns}){ordered}), '[]') FROM {source}
)"""  # noqa: S608 - constants of the modules of ``db``


SILENT_S = """
    extract(epoch FROM clock_timestamp() - coalesce(a.heard_at, n.heard_at))::float8
"""
"""Seconds since a node (n) was heard through its agent (a). NULL means never."""

SERVICE_GPU_S = """
    j.service_gpu_s + coalesce(
        j.cell_gpus * greatest(extract(epoch FROM now() - j.since_at)::float8, 0), 0)
"""
"""GPU-seconds that a job (j) has held, in earlier allocations and the present one."""

RUN_S = """
    j.run_s + coalesce(greatest(extract(epoch FROM now() - j.since_at)::float8, 0), 0)
"""
"""Seconds for which a job (j) has held GPUs, in earlier allocations and the present one."""

_CLUSTERS = f"""
SELECT c.*, extract(epoch FROM c.created_at)::float8 AS created_s,
    (SELECT count(*) FROM nodes n WHERE n.cluster_id = c.id) AS node_count,
    (SELECT coalesce(sum(n.gpus), 0)::bigint FROM nodes n WHERE n.cluster_id = c.id) AS gpu_count,
    (SELECT coalesce(json_agg(json_build_array(
            t.name, t.memory_bytes, t.dollars_per_hour, t.watts,
            (SELECT coalesce(max(n.gpus), 0) FROM nodes n WHERE n.gpu_type_id = t.id)
        ) ORDER BY t.ordinal), '[]')
        FROM gpu_types t WHERE t.cluster_id = c.id) AS types,
    (SELECT extract(epoch FROM r.created_at)::float8 FROM rounds r
        WHERE r.cluster_id = c.id AND r.number = c.last_round) AS last_round_s,
    NOT EXISTS (SELECT FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE}) AS idle
FROM clusters c
"""  # noqa: S608 - a constant of tessera.db.schema.tables

CLUSTER = sa.text(_CLUSTERS + "WHERE c.name = :name")

CLUSTERS_AFTER = sa.text(
    _CLUSTERS + "WHERE c.name > :after AND c.deleted_at IS NULL ORDER BY c.name LIMIT :limit"
)


def cluster_record(row: Row) -> ClusterRecord:
    """Return the record of a row of ``CLUSTER``."""
    return ClusterRecord(
        name=row["name"],
        gpu_types=tuple(
            GpuType(name=n, memory_bytes=m, dollars_per_hour=dollars, watts=watts)
            for n, m, dollars, watts, _ in row["types"]
        ),
        version=row["version"],
        created_s=row["created_s"],
        nodes=row["node_count"],
        gpus=row["gpu_count"],
        last_round=row["last_round"],
        epoch=row["epoch"],
        last_round_s=row["last_round_s"],
        node_gpus=tuple(kind[-1] for kind in row["types"]),
        idle=row["idle"],
    )


def cluster_id(connection: sa.Connection, name: str) -> int:
    """Return a cluster's key. Raises NotFound."""
    query = sa.text("SELECT id FROM clusters WHERE name = :name")
    key = connection.execute(query, {"name": name}).scalar()
    if key is None:
        raise NotFound(f"clusters/{name}")
    return int(key)


def enter_cluster(connection: sa.Connection, name: str) -> int:
    """Return a cluster's key, and keep the cluster from being deleted until this transaction ends.

    This is for changes that do not take the cluster's turn. Otherwise their additions could be
    acknowledged after the cluster was deleted.

    Raises:
        NotFound: the cluster.
    """
    query = sa.text("SELECT id FROM clusters WHERE name = :name FOR KEY SHARE")
    key = connection.execute(query, {"name": name}).scalar()
    if key is None:
        raise NotFound(f"clusters/{name}")
    return int(key)


_NODES = f"""
SELECT n.*, extract(epoch FROM n.drained_at)::float8 AS drained_s, t.name AS gpu_type,
    extract(epoch FROM n.probation_until)::float8 AS probation_end_s,
    {SILENT_S} AS silent_s, a.network_remarks, a.runtimes, w.name AS maintenance,
    extract(epoch FROM w.start_at)::float8 AS maintenance_s,
    n.gpus - (SELECT count(DISTINCT l.gpu) FROM allocations l WHERE l.node_id = n.id) AS free_gpus,
    (SELECT coalesce(json_agg(DISTINCT j.name COLLATE "C" ORDER BY j.name COLLATE "C"), '[]')
        FROM allocations l JOIN jobs j ON j.id = l.job_id WHERE l.node_id = n.id) AS job_names
FROM nodes n JOIN gpu_types t ON t.id = n.gpu_type_id LEFT JOIN agents a ON a.id = n.agent_id
LEFT JOIN LATERAL (
    SELECT r.name, r.start_at FROM reservation_nodes x JOIN reservations r ON r.id = x.reservation_id
    WHERE x.node_id = n.id AND r.maintenance AND r.start_at <= now() AND now() < r.end_at LIMIT 1
) w ON true
"""  # noqa: S608 - a constant of this module

NODES_NAMED = sa.text(_NODES + "WHERE n.cluster_id = :cluster AND n.name = ANY(:names)")

NODES_AFTER = sa.text(
    _NODES + "WHERE n.cluster_id = :cluster AND n.name > :after ORDER BY n.name LIMIT :limit"
)


def node_record(row: Row) -> NodeRecord:
    """Return the record of a row of ``NODES_NAMED``."""
    spec = NodeSpec(
        name=row["name"],
        gpu_type=row["gpu_type"],
        gpus=row["gpus"],
        rack=row["rack"],
        version=row["version"],
        **{name: row[name] for name in HOST_NAMES},
        labels=row["labels"],
    )
    silent_s, maintained = row["silent_s"], row["maintenance"] is not None and not row["draining"]
    return NodeRecord(
        spec=spec,
        draining=row["draining"] or maintained,
        version=row["version"],
        free_gpus=row["free_gpus"],
        jobs=tuple(row["job_names"]),
        silent_s=float("inf") if silent_s is None else max(0.0, silent_s),
        network_remarks=tuple(row["network_remarks"] or ()),
        drain_reason=f"maintenance {row['maintenance']}" if maintained else row["drain_reason"],
        drained_by=row["drained_by"],
        drained_s=row["maintenance_s"] if maintained else row["drained_s"],
        faults=tuple(fault.sentence for fault in stored_faults(row["faults"])),
        probation_end_s=row["probation_end_s"],
        **{REPORTED_PREFIX + name: row[REPORTED_PREFIX + name] for name in HOST_NAMES},
        agent_labels=row["agent_labels"],
        offers=stored_offers(row["runtimes"]),
    )


def stored_faults(rows: Sequence[tuple[int, str, str]]) -> tuple[HealthFault, ...]:
    """Return the faults in a column of a node."""
    return tuple(HealthFault(gpu=gpu, kind=kind, detail=detail) for gpu, kind, detail in rows)


_JOBS = f"""
SELECT j.*, {SERVICE_GPU_S} AS held_gpu_s, {RUN_S} AS ran_s,
    extract(epoch FROM j.queued_at)::float8 AS queued_s,
    extract(epoch FROM j.retry_at)::float8 AS retry_s, extract(epoch FROM now())::float8 AS now_s,
    CASE WHEN j.state IN ('held', 'holding') THEN (SELECT extract(epoch FROM max(h.at))::float8
        FROM job_history h WHERE h.job_id = j.id AND h.event = 'hold') END AS held_s,
    (SELECT coalesce(json_agg(n.name ORDER BY n.name), '[]') FROM job_avoids v
        JOIN nodes n ON n.id = v.node_id WHERE v.job_id = j.id) AS avoid_nodes,
    c.name AS cluster, w.model, w.params, w.global_batch, w.waits_for, w.derived_from, t.name AS cell_type,
    p.name AS cell_plan, p.document AS plan_document, s.document AS stated_document,
    u.name AS submitted_name, u.document AS submitted_document,
    m.iter_time_s AS reported_iter_time_s, m.source AS reported_source, {TRAINING_COLUMNS},
    {FORECAST_COLUMNS},
    {DEPENDENCIES} AS dependencies, g.name AS array_name, g.size AS array_size,
    g.max_running AS array_limit,
    extract(epoch FROM j.created_at)::float8 AS created_s,
    extract(epoch FROM j.started_at)::float8 AS started_s,
    extract(epoch FROM j.ended_at)::float8 AS ended_s
FROM jobs j
JOIN clusters c ON c.id = j.cluster_id
JOIN workloads w ON w.id = j.workload_id
LEFT JOIN gpu_types t ON t.id = j.cell_type_id
LEFT JOIN plans p ON p.id = j.cell_plan_id
LEFT JOIN plans s ON s.id = j.plan_id
LEFT JOIN plans u ON u.id = j.submitted_plan_id
LEFT JOIN measurements m ON m.job_id = j.id AND m.generation = j.generation
LEFT JOIN trainings tr ON tr.job_id = j.id
LEFT JOIN forecasts f ON f.job_id = j.id
LEFT JOIN job_arrays g ON g.id = j.array_id
"""  # noqa: S608 - a constant of this module

JOBS_NAMED = sa.text(_JOBS + "WHERE j.cluster_id = :cluster AND j.name = ANY(:names) ORDER BY j.id")

JOBS_KEYED = sa.text(_JOBS + "WHERE j.id = ANY(:ids) ORDER BY j.id")

JOBS_AFTER = sa.text(
    _JOBS + "WHERE j.cluster_id = :cluster AND j.id > :after AND j.state = ANY(:states)"
    " AND (CAST(:tenants AS text[]) IS NULL OR j.tenant = ANY(CAST(:tenants AS text[])))"
    " ORDER BY j.id LIMIT :limit"
)

_SHARES = sa.text("""
SELECT l.job_id, n.name AS node, array_agg(l.gpu ORDER BY l.gpu) AS gpus
FROM allocations l JOIN nodes n ON n.id = l.node_id
WHERE l.job_id = ANY(:ids) AND l.hold <> 'releasing'
GROUP BY l.job_id, n.name ORDER BY l.job_id, n.name
""")

Shares = tuple[tuple[str, tuple[int, ...]], ...]


def shares_of(connection: sa.Connection, jobs: Sequence[int]) -> dict[int, Shares]:
    """Return the GPUs that each job owns, held or reserved, by node in order of name."""
    found: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    if jobs:
        for job, node, gpus in connection.execute(_SHARES, {"ids": list(jobs)}):
            found[job].append((node, tuple(gpus)))
    return {job: tuple(shares) for job, shares in found.items()}


def job_spec(row: Row) -> JobSpec:
    """Return the specification in a row of ``JOBS_NAMED``."""
    return JobSpec(
        name=row["name"],
        workload=Workload(
            model=row["model"], params=row["params"], global_batch=row["global_batch"]
        ),
        avoid_nodes=tuple(row["avoid_nodes"]),
        plan=stored_plan(row["stated_document"]),
        submitted_plan=stored_plan(row["submitted_document"]) or row["submitted_name"] or "",
        after=tuple(
            Dependency(job=d.job, condition=d.condition)
            for d in stored_dependencies(row["dependencies"])
        ),
        array=_array_member(row),
        **stated_in(row),
    )


def _array_member(row: Row) -> ArrayMember | None:
    if row["array_name"] is None:
        return None
    return ArrayMember(
        array=row["array_name"],
        index=row["array_index"],
        size=row["array_size"],
        max_running=row["array_limit"],
    )


def allocation_record(row: Row, shares: Shares) -> AllocationRecord | None:
    """Return the allocation in a row of ``JOBS_NAMED``, or None if the job has no Cell."""
    cell = cell_of_job(row)
    if cell is None:
        return None
    return AllocationRecord(
        cell=cell,
        rate=row["cell_rate"],
        generation=row["generation"],
        shares=shares,
        plan=stored_plan(row["plan_document"]),
        iter_time_s=row["reported_iter_time_s"] or 0.0,
        iter_time_source=None
        if row["reported_iter_time_s"] is None
        else EstimateSource(row["reported_source"]),
    )


def job_record(row: Row, shares: Shares, reason: Reason | None, reason_round: int) -> JobRecord:
    """Return the record of a row of ``JOBS_NAMED``."""
    return JobRecord(
        cluster=row["cluster"],
        spec=job_spec(row),
        version=row["version"],
        state=JobState(row["state"]),
        created_s=row["created_s"],
        started_s=row["started_s"],
        ended_s=row["ended_s"],
        iterations_done=row["iterations_done"],
        generation=row["generation"],
        retries=row["retries"],
        last_error=row["last_error"],
        allocation=allocation_record(row, shares),
        reason=reason,
        reason_round=reason_round,
        admitted=row["admitted"],
        schedule=schedule_from_plain(row["schedule"]),
        start_by_s=math.inf if row["start_by_s"] is None else row["start_by_s"],
        planned_start=planned_start_from(row["planned_start"]),
        opportunistic=row["opportunistic"],
        service_gpu_s=row["held_gpu_s"],
        run_s=row["ran_s"],
        queued_s=row["queued_s"],
        retry_s=row["retry_s"] or 0.0,
        training=training_record(row),
        forecast=forecast_record(row),
        dependencies=stored_dependencies(row["dependencies"]),
    )


def job_records(
    connection: sa.Connection, query: sa.TextClause, values: dict[str, Any]
) -> list[tuple[int, JobRecord]]:
    """Run one of the queries of jobs; return (key, record) in order of submission."""
    rows = connection.execute(query, values).mappings().all()
    shares = shares_of(connection, [row["id"] for row in rows if row["cell_gpus"] is not None])
    reasons = reasons_of(connection, rows)
    return [
        (row["id"], job_record(row, shares.get(row["id"], ()), *reasons[row["id"]])) for row in rows
    ]


def jobs_named(connection: sa.Connection, cluster: int, names: Sequence[str]) -> list[JobRecord]:
    """Return the existing jobs with these names, in order of submission."""
    records = job_records(connection, JOBS_NAMED, {"cluster": cluster, "names": list(names)})
    return [record for _, record in records]


def nodes_named(connection: sa.Connection, cluster: int, names: Sequence[str]) -> list[NodeRecord]:
    """Return the existing nodes with these names, in the order of ``names``."""
    rows = connection.execute(NODES_NAMED, {"cluster": cluster, "names": list(names)})
    records = {row["name"]: node_record(row) for row in rows.mappings()}
    return [records[name] for name in dict.fromkeys(names) if name in records]
