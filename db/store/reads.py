"""Records that are read by name and in pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import sqlalchemy as sa

from tessera.db.base.cells import cell_on, stored_plan
from tessera.db.base.rows import (
    CLUSTER,
    CLUSTERS_AFTER,
    JOBS_AFTER,
    NODES_AFTER,
    cluster_id,
    cluster_record,
    job_records,
    jobs_named,
    node_record,
    nodes_named,
)
from tessera.db.schema.host import list_host
from tessera.formulation.base.errors import NotFound
from tessera.formulation.base.resources import amounts_of, name_amounts
from tessera.formulation.base.texts import text_from
from tessera.formulation.base.values import EstimateSource, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.clusters import ClusterRecord, NodeRecord
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobEventRecord, JobRecord
from tessera.formulation.state.traffic import parse_cell_traffic

_HISTORY = sa.text("""
SELECT extract(epoch FROM h.at)::float8 AS at_s, h.event, h.state, h.detail
FROM job_history h JOIN jobs j ON j.id = h.job_id
WHERE j.cluster_id = :cluster AND j.name = :name ORDER BY h.id
""")

_JOB = sa.text("SELECT id FROM jobs WHERE cluster_id = :cluster AND name = :name")

_ESTIMATES = sa.text(f"""
SELECT e.id, w.model, w.params, w.global_batch, t.name AS gpu_type, e.gpus, e.nodes,
    e.pipeline_degree, p.name AS plan, p.document AS plan_document, e.iter_time_s,
    e.source, e.provenance, e.sd, e.traffic, e.complete, {list_host("e.@")}
FROM estimates e JOIN workloads w ON w.id = e.workload_id
JOIN gpu_types t ON t.id = e.gpu_type_id JOIN plans p ON p.id = e.plan_id
WHERE w.cluster_id = :cluster AND e.id > :after
    AND (:model = '' OR (w.model = :model AND w.params = :params AND w.global_batch = :batch))
ORDER BY e.id LIMIT :limit
""")  # noqa: S608 - a constant of tessera.db.schema.host


def get_cluster(connection: sa.Connection, cluster: str) -> ClusterRecord:
    """Return a cluster. Raises NotFound."""
    row = connection.execute(CLUSTER, {"name": cluster}).mappings().one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}")
    return cluster_record(row)


def list_clusters(connection: sa.Connection, after: str, limit: int) -> list[ClusterRecord]:
    """Return the clusters after a name, by name."""
    rows = connection.execute(CLUSTERS_AFTER, {"after": after, "limit": limit})
    return [cluster_record(row) for row in rows.mappings()]


def get_node(connection: sa.Connection, cluster: str, name: str) -> NodeRecord:
    """Return a node. Raises NotFound."""
    records = nodes_named(connection, cluster_id(connection, cluster), [name])
    if not records:
        raise NotFound(f"clusters/{cluster}/nodes/{name}")
    return records[0]


def list_nodes(connection: sa.Connection, cluster: str, after: str, limit: int) -> list[NodeRecord]:
    """Return the nodes after a name, by name. Raises NotFound (the cluster)."""
    values = {"cluster": cluster_id(connection, cluster), "after": after, "limit": limit}
    return [node_record(row) for row in connection.execute(NODES_AFTER, values).mappings()]


def get_job(connection: sa.Connection, cluster: str, name: str) -> JobRecord:
    """Return a job. Raises NotFound."""
    records = jobs_named(connection, cluster_id(connection, cluster), [name])
    if not records:
        raise NotFound(f"clusters/{cluster}/jobs/{name}")
    return records[0]


def list_jobs(
    connection: sa.Connection,
    cluster: str,
    states: Sequence[JobState],
    after: int,
    limit: int,
    tenants: Collection[str] | None = None,
) -> tuple[list[JobRecord], int]:
    """Return the jobs after a cursor in order of submission, and the next cursor (0: no more).

    If ``states`` is empty, jobs in all states are returned. They are those of ``tenants``, or of
    every tenant if it is None. Raises NotFound (the cluster).
    """
    values = {
        "cluster": cluster_id(connection, cluster),
        "states": list(states or JobState),
        "tenants": None if tenants is None else sorted(tenants),
        "after": after,
        "limit": limit + 1,
    }
    records = job_records(connection, JOBS_AFTER, values)
    following = records[limit - 1][0] if len(records) > limit else 0
    return [record for _, record in records[:limit]], following


def job_history(connection: sa.Connection, cluster: str, name: str) -> list[JobEventRecord]:
    """Return the events of a job, oldest first. Raises NotFound."""
    values = {"cluster": cluster_id(connection, cluster), "name": name}
    if connection.execute(_JOB, values).scalar() is None:
        raise NotFound(f"clusters/{cluster}/jobs/{name}")
    return [
        JobEventRecord(
            at_s=row.at_s,
            event=row.event,
            state=JobState(row.state),
            detail=text_from(row.detail),
        )
        for row in connection.execute(_HISTORY, values)
    ]


_MODEL_NAMES: Final = sa.text(
    """
    SELECT m.model, m.params FROM models m WHERE m.cluster_id = :cluster
    UNION SELECT w.model, w.params FROM workloads w
    WHERE w.cluster_id = :cluster AND EXISTS (SELECT FROM estimates e WHERE e.workload_id = w.id)
    ORDER BY model, params
    """
)


def list_model_names(connection: sa.Connection, cluster: str) -> list[tuple[str, str]]:
    """Return the names and sizes of users' models and of those that have estimates.

    Raises NotFound (the cluster).
    """
    rows = connection.execute(_MODEL_NAMES, {"cluster": cluster_id(connection, cluster)})
    return [(row.model, row.params) for row in rows]


EVERY_WORKLOAD: Final = Workload(model="", params="", global_batch=0)
"""The workload with which ``list_estimates`` returns the estimates of all workloads."""


def list_estimates(
    connection: sa.Connection, cluster: str, workload: Workload, after: int, limit: int
) -> tuple[list[EstimateRecord], int]:
    """Return estimates after a cursor, and the next cursor (0: no more).

    All have this workload, unless it is ``EVERY_WORKLOAD``.
    """
    values = {
        "cluster": cluster_id(connection, cluster),
        "model": workload.model,
        "params": workload.params,
        "batch": workload.global_batch,
        "after": after,
        "limit": limit + 1,
    }
    rows = connection.execute(_ESTIMATES, values).all()
    records = [
        EstimateRecord(
            workload=Workload(model=r.model, params=r.params, global_batch=r.global_batch),
            cell=cell_on(r),
            iter_time_s=r.iter_time_s,
            source=EstimateSource(r.source),
            provenance=r.provenance,
            sd=r.sd,
            complete=r.complete,
            traffic=parse_cell_traffic(r.traffic) if r.traffic else None,
            plan=stored_plan(r.plan_document),
            **name_amounts(amounts_of(r)),
        )
        for r in rows[:limit]
    ]
    return records, rows[limit - 1].id if len(rows) > limit else 0
