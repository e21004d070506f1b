"""The submission of jobs: their rows, with the workloads, plans, arrays and dependencies they name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.base import dependencies
from tessera.db.base.documents import dump_json
from tessera.db.base.limits import require_few_open_jobs
from tessera.db.base.rows import enter_cluster, jobs_named
from tessera.db.base.turn import Turn, request_round
from tessera.db.estimates import derived_estimates, workloads
from tessera.db.estimates.plans import ensure_plans_of_jobs
from tessera.db.jobs import arrays, pins
from tessera.db.schema.job_columns import SUBMITTED_COLUMNS, launch_values, typed_columns
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import AlreadyExists
from tessera.formulation.base.values import Workload
from tessera.formulation.job.runtimes import RESTRICTED_RUNTIMES
from tessera.formulation.records.jobs import JobRecord, JobSpec

MAX_SUBMITTER: Final = 200
"""Characters that are kept of the name of who submits a job."""

_NOT_COLUMNS: Final[dict[str, Any]] = {
    "plan": None,
    "submitted_plan": "",
    "after": (),
    "array": None,
}
"""Fields of a job that are not columns of the same name, with their empty values."""

_SUBMIT = sa.text(f"""
INSERT INTO jobs (cluster_id, submitted_by, {", ".join(SUBMITTED_COLUMNS)})
SELECT :cluster, :submitted_by, r.*
FROM json_to_recordset(CAST(:rows AS json)) AS r({typed_columns(SUBMITTED_COLUMNS)})
ON CONFLICT (cluster_id, name) DO NOTHING
RETURNING name
""")  # noqa: S608 - a constant of this module


def submit_jobs(
    connection: sa.Connection,
    cluster: str,
    jobs: Sequence[JobSpec],
    tenants: Collection[str] | None = None,
) -> list[JobRecord]:
    """Queue jobs, all or none; return them in their order.

    Jobs of other ``tenants`` that they wait for count as unknown, unless it is None.

    Raises:
        NotFound: the cluster. AlreadyExists: a job.
        InvalidInput: unknown GPU type, node or dependency; jobs that wait for each other; a
            deadline that has passed; a pinned GPU type on which the workload has no Cells
            although it has some on others; or its Cells do not fit the cluster.
        LimitReached: a tenant would have too many live jobs.
    """
    dependent = [job for job in jobs if job.after]
    if dependent:  # no job that they name may end in the meantime
        Turn.take(connection, cluster)
    key, names = enter_cluster(connection, cluster), [job.name for job in jobs]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise AlreadyExists(f"clusters/{cluster}/jobs/{min(repeated)}")
    _insert_jobs(connection, cluster, key, jobs)
    pins.put_avoids(connection, key, [job for job in jobs if job.avoid_nodes])
    if dependent:
        dependencies.put_dependencies(connection, key, jobs, tenants)
    request_round(connection, key)
    require_few_open_jobs(connection, cluster, {job.tenant for job in jobs})
    order = {name: i for i, name in enumerate(names)}
    records = jobs_named(connection, key, names)
    return sorted(records, key=lambda record: order[record.spec.name])


def _insert_jobs(
    connection: sa.Connection, cluster: str, key: int, jobs: Sequence[JobSpec]
) -> None:
    """Store the rows of jobs, and before them what they refer to. ``key`` is the cluster's."""
    named = {job.workload for job in jobs}
    workload_ids = workloads.ensure_workloads(connection, key, named)
    unestimated = workloads.require_fit(connection, key, jobs, workload_ids)
    plan_ids = ensure_plans_of_jobs(connection, key, jobs)
    restricted = any(job.techniques or job.runtime in RESTRICTED_RUNTIMES for job in jobs)
    tunes = any(job.launch.tuning_space for job in jobs)
    if unestimated or plan_ids or restricted or tunes:
        derived_estimates.notify_estimators(connection, cluster)
    pins.require_future(connection, jobs)
    array_ids = arrays.add_arrays(connection, key, cluster, jobs)
    rows = [_row(job, workload_ids, plan_ids, array_ids) for job in jobs]
    submitter = IDENTITY.get().known_subject(MAX_SUBMITTER)
    values = {"cluster": key, "submitted_by": submitter, "rows": dump_json(rows)}
    stored = set(connection.execute(_SUBMIT, values).scalars())
    if taken := {job.name for job in jobs} - stored:
        raise AlreadyExists(f"clusters/{cluster}/jobs/{min(taken)}")


def _row(
    job: JobSpec,
    workload_ids: Mapping[Workload, int],
    plan_ids: Mapping[str, int],
    array_ids: Mapping[str, int],
) -> dict[str, Any]:
    """Return the row of a job, with the keys of its workload, plans and array."""
    row = asdict(replace(job, **_NOT_COLUMNS))
    for name in ("workload", "avoid_nodes", *_NOT_COLUMNS):
        del row[name]
    row |= launch_values(job) | {"workload_id": workload_ids[job.workload]}
    if job.array is not None:
        row |= {"array_id": array_ids[job.array.array], "array_index": job.array.index}
    if job.plan is not None:
        row["plan_id"] = plan_ids[job.plan.digest]
    row["submitted_plan_id"] = plan_ids.get(job.submitted_plan_id)
    # JSON cannot represent infinity.
    return {k: str(v) if isinstance(v, float) else v for k, v in row.items()}
