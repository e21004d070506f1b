"""Arrays of jobs: their rows, the members that may change, and their numbers by state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.base.rows import cluster_id
from tessera.formulation.base.errors import AlreadyExists, NotFound
from tessera.formulation.job.arrays import ArrayRecord
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.jobs import JobSpec

_ADD = sa.text("""
INSERT INTO job_arrays (cluster_id, name, tenant, size, max_running)
SELECT :cluster, r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r(name text, tenant text, size bigint, max_running bigint)
ON CONFLICT DO NOTHING RETURNING name, id
""")

# A job and an array of one name could not be told apart in `tessera cancel` and in dependencies.
_TAKEN = sa.text("""
SELECT name FROM jobs WHERE cluster_id = :cluster AND name = ANY(:arrays)
UNION ALL
SELECT name FROM job_arrays WHERE cluster_id = :cluster AND name = ANY(:jobs)
LIMIT 1
""")

_ARRAY = sa.text("""
SELECT a.id, a.name, a.tenant, a.size, a.max_running, (
    SELECT coalesce(json_object_agg(s.state, s.count), '{}') FROM (
        SELECT j.state, count(*) AS count FROM jobs j WHERE j.array_id = a.id GROUP BY j.state) AS s
    ) AS states
FROM job_arrays a WHERE a.cluster_id = :cluster AND a.name = :name
""")

_MEMBERS = sa.text("""
SELECT j.id, j.state FROM jobs j JOIN job_arrays a ON a.id = j.array_id
WHERE a.cluster_id = :cluster AND a.name = :name AND j.state = ANY(:states) ORDER BY j.id
""")


def add_arrays(
    connection: sa.Connection, cluster: int, cluster_name: str, jobs: Sequence[JobSpec]
) -> dict[str, int]:
    """Store the arrays of which ``jobs`` are members; return their keys by id.

    Raises:
        AlreadyExists: an array, or a job and an array of one name.
    """
    found = {job.array.array: job for job in jobs if job.array is not None}
    singles = [job.name for job in jobs if job.array is None]
    values = {"cluster": cluster, "arrays": list(found), "jobs": singles}
    if taken := connection.execute(_TAKEN, values).scalar():
        raise AlreadyExists(f"clusters/{cluster_name}/jobs/{taken}")
    rows = [
        {
            "name": name,
            "tenant": job.tenant,
            "size": job.array.size,
            "max_running": job.array.max_running,
        }
        for name, job in found.items()
        if job.array is not None
    ]
    if not rows:
        return {}
    added = connection.execute(_ADD, {"cluster": cluster, "rows": dump_json(rows)}).all()
    keys = {row.name: row.id for row in added}
    if missing := found.keys() - keys.keys():
        raise AlreadyExists(f"clusters/{cluster_name}/arrays/{min(missing)}")
    return keys


def get_array(connection: sa.Connection, cluster: str, name: str) -> ArrayRecord:
    """Return an array with the numbers of its jobs. Raises NotFound."""
    values = {"cluster": cluster_id(connection, cluster), "name": name}
    row = connection.execute(_ARRAY, values).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}/arrays/{name}")
    return ArrayRecord(
        cluster=cluster,
        name=row.name,
        tenant=row.tenant,
        size=row.size,
        max_running=row.max_running,
        states={JobState(state): count for state, count in row.states.items()},
    )


def members_in(
    connection: sa.Connection, cluster: int, name: str, states: Collection[JobState]
) -> list[tuple[int, JobState]]:
    """Return the key and the state of the members in one of ``states``, in order of their indices."""
    values = {"cluster": cluster, "name": name, "states": sorted(states)}
    return [(key, JobState(state)) for key, state in connection.execute(_MEMBERS, values)]
