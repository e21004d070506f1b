"""Dependencies of jobs: stored with a submission, and resolved when the jobs that they name end.

The lock on the cluster (``tessera.db.base.turn``) makes submissions with dependencies and ends exclusive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tessera.db.base.documents import dump_json, reason_plain
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.dependencies import (
    Condition,
    DependencyRecord,
    broken_reason,
    find_circle,
)
from tessera.formulation.job.lifecycle import TERMINAL, JobState
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.jobs import JobSpec

DEPENDENCIES = """(
    SELECT coalesce(json_agg(json_build_array(
        d.name, d.condition, d.tenant, d.met,
        coalesce(o.state, a.ended || ' of ' || a.size || ' ended', '')) ORDER BY d.position), '[]')
    FROM job_dependencies d LEFT JOIN jobs o ON o.id = d.on_job_id
    LEFT JOIN job_arrays a ON a.id = d.on_array_id WHERE d.job_id = j.id
)"""
"""The dependencies of a job (j): arrays of the fields of ``DependencyRecord`` in their order."""

# A job has precedence over an array of the same name.
_NAMED = sa.text("""
SELECT name, id, tenant, state, false AS is_array, 0 AS ended, 0 AS lost, 1 AS size FROM jobs
WHERE cluster_id = :cluster AND name = ANY(:names)
UNION ALL
SELECT name, id, tenant, '', true, ended, lost, size FROM job_arrays a
WHERE cluster_id = :cluster AND name = ANY(:names)
    AND NOT EXISTS (SELECT FROM jobs j WHERE j.cluster_id = a.cluster_id AND j.name = a.name)
""")

_PUT = sa.text("""
WITH put AS (
    INSERT INTO job_dependencies
        (job_id, position, name, tenant, condition, met, on_job_id, on_array_id)
    SELECT j.id, r.position, r.name, r.tenant, r.condition, r.met, r.on_job, r.on_array
    FROM json_to_recordset(CAST(:rows AS json)) AS r(job text, position bigint, name text, tenant text,
        condition text, met boolean, on_job bigint, on_array bigint)
    JOIN jobs j ON j.cluster_id = :cluster AND j.name = r.job
    RETURNING job_id, met
)
UPDATE jobs j SET unmet = p.unmet
FROM (SELECT job_id, count(*) AS unmet FROM put WHERE NOT met GROUP BY job_id) AS p
WHERE j.id = p.job_id
""")

# Members that are deleted later are still counted.
_NOTE_ENDS = sa.text("""
WITH gone AS (
    SELECT j.array_id, count(*) AS ended, count(*) FILTER (WHERE j.state <> 'succeeded') AS lost
    FROM jobs j WHERE j.id = ANY(:ended) AND j.array_id IS NOT NULL GROUP BY j.array_id
), counted AS (
    UPDATE job_arrays a SET ended = a.ended + g.ended, lost = a.lost + g.lost
    FROM gone g WHERE a.id = g.array_id
)
SELECT (
    EXISTS (SELECT FROM job_dependencies d WHERE NOT d.met AND d.on_job_id = ANY(:ended))
    OR EXISTS (SELECT FROM job_dependencies d JOIN gone g ON g.array_id = d.on_array_id
        WHERE NOT d.met)
) AS awaited,
EXISTS (SELECT FROM job_arrays a JOIN gone g ON g.array_id = a.id WHERE a.max_running > 0) AS frees
""")

# The jobs that can never start, with those that can never start because of them. A dependency on an
# array is broken by its first member that ends without success. Only one of the members that are
# lost in a step keeps the array's key, so that a step looks for dependents of an array once.
_BROKEN = sa.text("""
WITH RECURSIVE lost (id, array_id, state, name, tenant, condition) AS (
    SELECT j.id,
        CASE WHEN row_number() OVER (PARTITION BY j.array_id ORDER BY j.id) = 1 THEN j.array_id END,
        CAST(NULL AS text) COLLATE "C", CAST(NULL AS text) COLLATE "C",
        CAST(NULL AS text) COLLATE "C", CAST(NULL AS text) COLLATE "C"
    FROM jobs j WHERE j.id = ANY(:ended) AND j.state <> 'succeeded'
UNION
    SELECT b.id,
        CASE WHEN row_number() OVER (PARTITION BY b.array_id ORDER BY b.id) = 1 THEN b.array_id END,
        b.state, b.name, b.tenant, b.condition
    FROM lost l CROSS JOIN LATERAL (
        SELECT j.id, j.array_id, j.state, d.name, d.tenant, d.condition
        FROM (
            SELECT * FROM job_dependencies WHERE on_job_id = l.id
            UNION ALL
            SELECT * FROM job_dependencies WHERE on_array_id = l.array_id
        ) AS d JOIN jobs j ON j.id = d.job_id AND j.ended_at IS NULL
        WHERE NOT d.met AND d.condition = 'succeeded'
    ) AS b
)
SELECT DISTINCT ON (l.id) l.id, l.state, l.name, l.tenant, l.condition
FROM lost l WHERE l.state IS NOT NULL
""")

# Without statistics of rows that were just written, the planner would read all rows at each step.
_USE_INDEXES = sa.text("SET LOCAL enable_seqscan = off")
_PLAN_AS_USUAL = sa.text("SET LOCAL enable_seqscan = DEFAULT")

_NEVER_FAILED = sa.text("""
WITH succeeded AS (
    SELECT id, array_id FROM jobs WHERE id = ANY(:ended) AND state = 'succeeded'
)
SELECT DISTINCT ON (j.id) j.id, j.state, d.name, d.tenant, d.condition
FROM (
    SELECT * FROM job_dependencies WHERE on_job_id IN (SELECT id FROM succeeded)
    UNION ALL
    SELECT * FROM job_dependencies WHERE on_array_id IN (
        SELECT a.id FROM job_arrays a WHERE a.id IN (SELECT array_id FROM succeeded)
            AND a.ended = a.size AND a.lost = 0)
) AS d JOIN jobs j ON j.id = d.job_id AND j.ended_at IS NULL
WHERE NOT d.met AND d.condition = 'failed'
""")

_MEET = sa.text("""
WITH ended AS (
    SELECT id, array_id, state = 'succeeded' AS succeeded FROM jobs WHERE id = ANY(:ended)
), whole AS (
    SELECT a.id, a.lost = 0 AS succeeded FROM job_arrays a
    WHERE a.ended = a.size AND a.id IN (SELECT array_id FROM ended)
), decided AS (
    SELECT d.job_id, d.position, d.condition, e.succeeded
    FROM job_dependencies d JOIN ended e ON d.on_job_id = e.id WHERE NOT d.met
    UNION ALL
    SELECT d.job_id, d.position, d.condition, w.succeeded
    FROM job_dependencies d JOIN whole w ON d.on_array_id = w.id WHERE NOT d.met
), met AS (
    UPDATE job_dependencies d SET met = true FROM decided c
    WHERE d.job_id = c.job_id AND d.position = c.position
        AND (d.condition = 'ended' OR (d.condition = 'succeeded') = c.succeeded)
    RETURNING d.job_id
)
UPDATE jobs j SET unmet = j.unmet - m.count,
    queued_at = CASE WHEN j.unmet = m.count THEN clock_timestamp() ELSE j.queued_at END
FROM (SELECT job_id, count(*) AS count FROM met GROUP BY job_id) AS m
WHERE j.id = m.job_id RETURNING j.unmet = 0 AND j.state = 'queued' AS may_start
""")

_STORE_REASONS = sa.text("""
UPDATE jobs j SET rejection = c.rejection
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, rejection jsonb) WHERE j.id = c.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenJob:
    """A job that can never start, because one that it waits for did not end as it must."""

    key: int
    state: JobState
    reason: Reason


def stored_dependencies(rows: Sequence[Sequence[Any]]) -> tuple[DependencyRecord, ...]:
    """Return the dependencies in a column ``DEPENDENCIES``."""
    return tuple(
        DependencyRecord(
            job=name, condition=Condition(condition), tenant=tenant, met=met, state=state
        )
        for name, condition, tenant, met, state in rows
    )


def put_dependencies(
    connection: sa.Connection,
    cluster: int,
    jobs: Sequence[JobSpec],
    tenants: Collection[str] | None = None,
) -> None:
    """Store the dependencies of ``jobs``, which were just stored, in the turn of their cluster.

    Jobs and arrays of other ``tenants`` count as unknown, unless it is None.

    Raises:
        InvalidInput: a job or an array that is unknown, a circle, or an end that contradicts the
            condition.
    """
    arrays = {job.name: job.array.array for job in jobs if job.array is not None}
    own = {job.name for job in jobs} | set(arrays.values())
    names = sorted({d.job for job in jobs for d in job.after})
    values = {"cluster": cluster, "names": names}
    targets = {row.name: row for row in connection.execute(_NAMED, values)}
    if circle := find_circle((job for job in jobs if job.after), arrays):
        path = " -> ".join((*circle, circle[0]))
        raise InvalidInput(
            f"jobs/{circle[0]}.after", f"jobs wait for each other ({path}); leave one of them out"
        )
    rows: list[Mapping[str, object]] = []
    for job in jobs:
        for position, dependency in enumerate(job.after):
            field = f"jobs/{job.name}.after[{position}]"
            target = targets.get(dependency.job)
            hidden = target is not None and not (
                tenants is None or target.tenant in tenants or target.name in own
            )
            if target is None or hidden:
                raise InvalidInput(
                    field, f"the cluster has no job or array {dependency.job}; name one that it has"
                )
            rows.append(
                {
                    "job": job.name,
                    "position": position,
                    "name": dependency.job,
                    "tenant": target.tenant,
                    "condition": dependency.condition,
                    "met": _is_met(field, target, dependency.condition),
                    "on_array" if target.is_array else "on_job": target.id,
                }
            )
    connection.execute(_PUT, {"cluster": cluster, "rows": dump_json(rows)})


def _is_met(field: str, target: sa.Row[tuple[object, ...]], condition: Condition) -> bool:
    """Return whether a dependency on a stored job or array is met. Raises InvalidInput if it cannot be."""
    if target.is_array:
        ended, succeeded = target.ended == target.size, target.lost == 0
        broken = ended or (condition is Condition.SUCCEEDED and not succeeded)
    else:
        ended = broken = target.state in TERMINAL
        succeeded = target.state == JobState.SUCCEEDED
    if broken and not condition.is_met(succeeded=succeeded):
        raise InvalidInput(
            field,
            f"{target.name} has already {'succeeded' if succeeded else 'ended without success'}, so the"
            f" condition {condition} can never be met; leave it out, or name another job",
        )
    return bool(ended)


def note_ends(connection: sa.Connection, ended: Sequence[int]) -> tuple[bool, bool]:
    """Count the ends of members of arrays.

    Return whether other jobs wait for one of the ``ended``, and whether one of these leaves its place
    in a limited array to another member.
    """
    row = connection.execute(_NOTE_ENDS, {"ended": list(ended)}).one()
    return row.awaited, row.frees


def find_broken(connection: sa.Connection, ended: Sequence[int]) -> list[BrokenJob]:
    """Return the jobs that can never start now that jobs have ``ended`` (keys)."""
    values = {"ended": list(ended)}
    connection.execute(_USE_INDEXES)
    never = connection.execute(_NEVER_FAILED, values).all()
    # Those that this breaks are broken by jobs that have not ended yet, as are those in _BROKEN.
    beginning = {"ended": [*ended, *(row.id for row in never)]}
    rows = {row.id: row for row in (*connection.execute(_BROKEN, beginning), *never)}
    connection.execute(_PLAN_AS_USUAL)
    return [
        BrokenJob(
            key=key,
            state=JobState(row.state),
            reason=broken_reason(row.name, row.tenant, Condition(row.condition)),
        )
        for key, row in sorted(rows.items())
    ]


def store_reasons(connection: sa.Connection, broken: Sequence[BrokenJob]) -> None:
    """Store why jobs were rejected. No round did it."""
    rows = [
        {"id": job.key, "rejection": {"round": 0, "reason": reason_plain(job.reason)}}
        for job in broken
    ]
    connection.execute(_STORE_REASONS, {"rows": dump_json(rows)})


def meet_dependencies(connection: sa.Connection, ended: Sequence[int]) -> bool:
    """Mark dependencies that are met now; return whether a job may start because of it."""
    return any(connection.execute(_MEET, {"ended": list(ended)}).scalars())
