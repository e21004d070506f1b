"""The use of GPUs by jobs: exact sums over their stints, which survive the deletion of the jobs.

A stint ends in the statement that changes the job (``tessera.db.base.turn``). The stint that lasts is read
from ``jobs``. When retention deletes jobs and stints, the same statement adds them to the sums of their
days (``usage_days``). Each stint is therefore counted exactly once at any time.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from tessera.db.base.rows import cluster_id
from tessera.db.clusters import tenants
from tessera.db.schema.host import list_host
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import HOST_NAMES
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.records.usage import LABEL, ClusterUsage, UsageQuery, UsageRecord

MAX_ROWS: Final = 10_000
"""The largest number of groups in an answer."""

_SUMS: Final = (
    "gpu_us",
    "effective_gpu_s",
    "cpu_us",
    "host_byte_s",
    "lost_gpu_us",
    "preemptions",
    "jobs_ended",
    "jobs_finished",
    "waited_us",
)

_GROUP: Final = "cluster_id, day, tenant, gpu_type, submitted_by, labels"


def _microseconds(start: str, end: str) -> str:
    """Return SQL for the whole microseconds between two moments, 0 if they are not in order."""
    return f"CAST(greatest(extract(epoch FROM ({end}) - ({start})), 0) * 1000000 AS bigint)"


_HOST_USES: Final = ("s.{} * {} AS cpu_us", "s.{} * ({} / 1000000.0::float8) AS host_byte_s")
"""The use of each resource of hosts, of its column and of the microseconds that it lasts."""


def _parts_of(spans: str) -> str:
    """Return SQL for the use of ``spans`` by day of UTC, within [from_at, to_at).

    ``spans`` has a job's columns and those of its stints.
    """
    lasts = _microseconds("d.starts_at", "d.ends_at")
    untrained = _microseconds("d.starts_at", "least(d.ends_at, coalesce(s.trained_at, d.ends_at))")
    host = (use.format(name, lasts) for use, name in zip(_HOST_USES, HOST_NAMES, strict=True))
    preempted = f"s.ending = '{JobEvent.SUSPEND.value}' AND s.ended_at >= d.starts_at"
    return f"""
    SELECT s.cluster_id, d.day, s.tenant, s.gpu_type, s.submitted_by, s.labels,
        s.gpus * {lasts} AS gpu_us, s.effective_gpus * {lasts} / 1000000.0::float8 AS effective_gpu_s,
        {", ".join(host)},
        s.gpus * {untrained} AS lost_gpu_us,
        CASE WHEN {preempted} AND s.ended_at < d.next_at AND s.ended_at < s.to_at THEN 1 ELSE 0 END
            AS preemptions,
        0 AS jobs_ended, 0 AS jobs_finished, 0::bigint AS waited_us
    FROM {spans} s CROSS JOIN LATERAL (
        SELECT CAST(n.night AS date) AS day, n.night AT TIME ZONE 'UTC' + interval '1 day' AS next_at,
            greatest(s.began_at, s.from_at, n.night AT TIME ZONE 'UTC') AS starts_at,
            least(s.ended_at, s.to_at, n.night AT TIME ZONE 'UTC' + interval '1 day') AS ends_at
        FROM generate_series(
            date_trunc('day', greatest(s.began_at, s.from_at) AT TIME ZONE 'UTC'),
            least(s.ended_at, s.to_at) AT TIME ZONE 'UTC', interval '1 day') AS n(night)
    ) AS d
    """  # noqa: S608 - constants of this module


def _ends_of(jobs: str, last_types: str) -> str:
    """Return SQL for the ends of ``jobs``. They belong to the type of their last stint, if any."""
    waited = _microseconds("j.created_at", "coalesce(j.started_at, j.ended_at)")
    return f"""
    SELECT j.cluster_id, CAST(j.ended_at AT TIME ZONE 'UTC' AS date) AS day, j.tenant,
        coalesce({last_types}, '') AS gpu_type, j.submitted_by, j.labels, 0::bigint AS gpu_us,
        0::float8 AS effective_gpu_s, 0::bigint AS cpu_us, 0::float8 AS host_byte_s,
        0::bigint AS lost_gpu_us, 0 AS preemptions, 1 AS jobs_ended,
        CASE WHEN j.state = '{JobState.SUCCEEDED.value}' THEN 1 ELSE 0 END AS jobs_finished,
        {waited} AS waited_us
    FROM {jobs} j
    """  # noqa: S608 - constants of this module


_LAST_TYPE: Final = (
    "(SELECT t.gpu_type FROM stints t WHERE t.job_id = j.id ORDER BY t.id DESC LIMIT 1)"
)

_JOB: Final = "j.cluster_id, j.tenant, j.submitted_by, j.labels"

_FOREVER: Final = "'-infinity'::timestamptz AS from_at, 'infinity'::timestamptz AS to_at"


def _add_to_days(parts: str) -> str:
    """Return SQL that adds ``parts`` to the sums of their days."""
    sums = ", ".join(f"sum({name})" for name in _SUMS)
    added = ", ".join(f"{name} = u.{name} + excluded.{name}" for name in _SUMS)
    return f"""
    INSERT INTO usage_days AS u ({_GROUP}, {", ".join(_SUMS)})
    SELECT {_GROUP}, {sums} FROM ({parts}) AS p GROUP BY {_GROUP}
    ORDER BY {_GROUP}
    ON CONFLICT (cluster_id, day, tenant, gpu_type, submitted_by, md5(CAST(labels AS text)))
    DO UPDATE SET {added}
    """  # noqa: S608 - constants of this module


DELETE_JOBS: Final = f"""
WITH gone AS (
    DELETE FROM jobs WHERE id = ANY(:keys) RETURNING *
), spans AS (
    SELECT {_JOB}, t.gpu_type, t.gpus, {list_host("t.@")}, t.effective_gpus, t.began_at,
        t.trained_at, t.ended_at, t.ending, {_FOREVER}
    FROM gone j JOIN stints t ON t.job_id = j.id
), kept AS ({_add_to_days(f"{_parts_of('spans')} UNION ALL {_ends_of('gone', _LAST_TYPE)}")})
SELECT count(*) FROM gone
"""  # noqa: S608 - constants of this module
"""The deletion of jobs, whose use stays in the sums of its days. It returns their number."""

DELETE_STINTS: Final = f"""
WITH gone AS (
    DELETE FROM stints WHERE id = ANY(:keys) RETURNING *
), spans AS (
    SELECT {_JOB}, t.gpu_type, t.gpus, {list_host("t.@")}, t.effective_gpus, t.began_at,
        t.trained_at, t.ended_at, t.ending, {_FOREVER}
    FROM gone t JOIN jobs j ON j.id = t.job_id
), kept AS ({_add_to_days(_parts_of("spans"))})
SELECT count(*) FROM gone
"""  # noqa: S608 - constants of this module
"""The deletion of stints of live jobs, whose use stays in the sums of its days."""

_WINDOW = """
SELECT CAST(to_timestamp(:from_s) AS timestamptz) AS from_at,
    least(to_timestamp(:to_s), clock_timestamp()) AS to_at
"""

_SEEN = "(CAST(:tenants AS text[]) IS NULL OR j.tenant = ANY(CAST(:tenants AS text[])))"

# The clock may have been set back since a stint began, so it may seem to end before.
_SPANS = f"""
SELECT {_JOB}, t.gpu_type, t.gpus, {list_host("t.@")}, t.effective_gpus, t.began_at,
    t.trained_at, t.ended_at, t.ending, w.from_at, w.to_at
FROM jobs j JOIN stints t ON t.job_id = j.id CROSS JOIN timing w
WHERE j.cluster_id = :cluster AND {_SEEN} AND t.ended_at >= w.from_at AND t.began_at < w.to_at
UNION ALL
SELECT {_JOB}, g.name, j.cell_gpus, {list_host("j.cell_@")},
    j.cell_effective_gpus, j.since_at, j.ran_at, w.to_at, '', w.from_at, w.to_at
FROM jobs j JOIN gpu_types g ON g.id = j.cell_type_id CROSS JOIN timing w
WHERE j.cluster_id = :cluster AND {_SEEN} AND j.since_at < w.to_at
"""  # noqa: S608 - constants of this module

_ENDED = f"""
SELECT j.* FROM jobs j CROSS JOIN timing w
WHERE j.cluster_id = :cluster AND {_SEEN} AND j.ended_at >= w.from_at AND j.ended_at < w.to_at
"""  # noqa: S608 - constants of this module

# A day that retention has summed up belongs to the window in which it begins, so windows that
# adjoin still add up.
_DAYS = f"""
SELECT {", ".join(f"j.{name}" for name in _GROUP.split(", "))}, {", ".join(f"j.{name}" for name in _SUMS)}
FROM usage_days j CROSS JOIN timing w
WHERE j.cluster_id = :cluster AND {_SEEN} AND CAST(j.day AS timestamp) AT TIME ZONE 'UTC' >= w.from_at
    AND CAST(j.day AS timestamp) AT TIME ZONE 'UTC' < w.to_at
"""  # noqa: S608 - constants of this module

_KEYS: Final = {
    "tenant": "tenant",
    "type": "gpu_type",
    "user": "submitted_by",
    "day": "CAST(day AS text)",
}

_TOTALS = f"""
WITH timing AS MATERIALIZED ({_WINDOW}), spans AS ({_SPANS}), ended AS ({_ENDED}),
parts AS ({_parts_of("spans")} UNION ALL {_ends_of("ended", _LAST_TYPE)} UNION ALL {_DAYS})
SELECT %s AS keys, {", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in _SUMS)}
FROM parts %s
"""  # noqa: S608 - constants of this module

_CAPACITY = sa.text("""
SELECT t.name, sum(n.gpus)::bigint AS gpus FROM nodes n JOIN gpu_types t ON t.id = n.gpu_type_id
WHERE n.cluster_id = :cluster GROUP BY t.name ORDER BY t.name
""")

_NOW = sa.text("SELECT extract(epoch FROM clock_timestamp())::float8")


def sum_usage(connection: sa.Connection, cluster: str, query: UsageQuery) -> ClusterUsage:
    """Return what the jobs of a cluster have used, by the query's groups in order of their values.

    Raises:
        NotFound: the cluster.
        InvalidInput: there are too many groups.
    """
    key = cluster_id(connection, cluster)
    values: dict[str, Any] = {
        "cluster": key,
        "from_s": query.from_s,
        "to_s": query.to_s,
        "tenants": None if query.tenants is None else sorted(query.tenants),
    }
    keys = []
    for i, group in enumerate(query.groups):
        if group.startswith(LABEL):
            values[f"label{i}"] = group.removeprefix(LABEL)
            keys.append(f"coalesce(labels->>CAST(:label{i} AS text), '')")
        else:
            keys.append(_KEYS[group])
    listed = f"CAST(ARRAY[{', '.join(keys)}] AS text[])"
    grouping = f"GROUP BY 1 ORDER BY 1 LIMIT {MAX_ROWS + 1}" if keys else ""
    rows = connection.execute(sa.text(_TOTALS % (listed, grouping)), values).mappings().all()
    if len(rows) > MAX_ROWS:
        raise InvalidInput(
            "group_by", f"makes more than {MAX_ROWS:,} groups; ask for fewer, or for a shorter time"
        )
    now_s = float(connection.execute(_NOW).scalar_one())
    return ClusterUsage(
        to_s=min(query.to_s, now_s),
        rows=tuple(_record(query, row) for row in rows),
        capacity={row.name: row.gpus for row in connection.execute(_CAPACITY, values)},
        quotas={
            spec.name: spec.quotas
            for spec in tenants.list_tenants(connection, cluster)
            if query.tenants is None or spec.name in query.tenants
        },
    )


def _record(query: UsageQuery, row: sa.RowMapping) -> UsageRecord:
    return UsageRecord(
        group=dict(zip(query.groups, row["keys"], strict=True)),
        gpu_s=float(row["gpu_us"]) / 1e6,
        effective_gpu_s=float(row["effective_gpu_s"]),
        cpu_s=float(row["cpu_us"]) / 1e6,
        lost_gpu_s=float(row["lost_gpu_us"]) / 1e6,
        preemptions=int(row["preemptions"]),
        jobs_ended=int(row["jobs_ended"]),
        jobs_finished=int(row["jobs_finished"]),
        waited_s=float(row["waited_us"]) / 1e6,
    )
