"""The demands of a job in addition to GPUs: a type, nodes to avoid, a deadline.

It also says which changes of a job keep its promised deadline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.estimates import workloads
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.jobs import JobSpec

_NOW_S = sa.text("SELECT extract(epoch FROM now())::float8")

_DROP_AVOIDS = sa.text("""
DELETE FROM job_avoids v USING jobs j
WHERE j.id = v.job_id AND j.cluster_id = :cluster AND j.name = ANY(:jobs)
""")

_PUT_AVOIDS = sa.text("""
INSERT INTO job_avoids (job_id, node_id)
SELECT j.id, n.id FROM json_to_recordset(CAST(:rows AS json)) AS r(job text, node text)
JOIN jobs j ON j.cluster_id = :cluster AND j.name = r.job
JOIN nodes n ON n.cluster_id = :cluster AND n.name = r.node
""")

_KNOWN = sa.text("SELECT name FROM nodes WHERE cluster_id = :cluster AND name = ANY(:names)")

_FITS = frozenset(
    {
        "requested_gpu_type",
        "pinned_gpu_type",
        "allowed_gpu_types",
        "requested_gpus",
        "min_gpus",
        "max_gpus",
    }
)
"""Fields that decide whether a job can ever run."""


def require_future(connection: sa.Connection, jobs: Sequence[JobSpec]) -> None:
    """Check that no deadline has passed, by the database's clock. Raises InvalidInput."""
    earliest = min(jobs, key=lambda job: job.deadline_s, default=None)
    if earliest is None or earliest.deadline_s == math.inf:
        return
    past_s = connection.execute(_NOW_S).scalar_one() - earliest.deadline_s
    if past_s >= 0:
        raise InvalidInput(
            f"jobs/{earliest.name}.deadline",
            f"lies {past_s:.0f} s in the past by the database's clock; set a later one, or none",
        )


def require_change(
    connection: sa.Connection, cluster: int, job: JobSpec, fields: Collection[str]
) -> None:
    """Check the fields of a job that are about to change. Raises InvalidInput."""
    if _FITS & set(fields):
        keys = workloads.ensure_workloads(connection, cluster, {job.workload})
        workloads.require_fit(connection, cluster, [job], keys)
    if "deadline_s" in fields:
        require_future(connection, [job])


def put_avoids(connection: sa.Connection, cluster: int, jobs: Sequence[JobSpec]) -> None:
    """Replace the nodes that stored jobs avoid.

    Raises:
        InvalidInput: a node that the cluster does not have.
    """
    if not jobs:
        return
    names = sorted({node for job in jobs for node in job.avoid_nodes})
    known = set(connection.execute(_KNOWN, {"cluster": cluster, "names": names}).scalars())
    for job in jobs:
        if unknown := set(job.avoid_nodes) - known:
            raise InvalidInput(
                f"jobs/{job.name}.avoid_nodes",
                f"the cluster has no node {min(unknown)}; name nodes that it has",
            )
    values = {"cluster": cluster, "jobs": [job.name for job in jobs]}
    connection.execute(_DROP_AVOIDS, values)
    rows = [
        {"job": job.name, "node": node} for job in jobs for node in sorted(set(job.avoid_nodes))
    ]
    if rows:
        connection.execute(_PUT_AVOIDS, values | {"rows": dump_json(rows)})


def keeps_promise(before: JobSpec, after: JobSpec) -> bool:
    """Return whether the deadline schedule from before a change also meets the new deadline.

    It does if the job asks for no more, and for no earlier deadline. If not, the promise is
    withdrawn, and the next round decides again.
    """
    return (
        math.isfinite(after.deadline_s)
        and after.deadline_s >= before.deadline_s
        and _asks_no_more(before, after)
    )


def keeps_start(old: JobSpec, new: JobSpec) -> bool:
    """Return whether the planned and the promised start from before a change fit the job after it.

    They do if the job asks for no more, and is served no later. If not, both are withdrawn.
    """
    return (
        new.priority <= old.priority
        and new.tenant == old.tenant
        and new.preemptible >= old.preemptible
        and _asks_no_more(old, new)
    )


def _asks_no_more(old: JobSpec, new: JobSpec) -> bool:
    """Return whether a job has no more iterations and no new demand after a change."""
    pinned = not new.pinned_gpu_type or (
        old.pinned_gpu_type and old.requested_gpu_type == new.requested_gpu_type
    )
    guarantee = not new.guaranteed or (
        old.guaranteed
        and (old.requested_gpus, old.requested_gpu_type)
        == (new.requested_gpus, new.requested_gpu_type)
    )
    return (
        new.iterations <= old.iterations
        and set(new.avoid_nodes) <= set(old.avoid_nodes)
        and new.node_selector in ("", old.node_selector)
        and new.longest_run_s >= old.longest_run_s
        and _allows_types_of(old, new)
        and pinned
        and guarantee
        and _allows_what(old, new)
    )


def _allows_types_of(before: JobSpec, after: JobSpec) -> bool:
    """Return whether all GPU types that the job could run on ``before`` a change are allowed after."""
    types = set(after.allowed_gpu_types)
    return not types or bool(
        before.allowed_gpu_types and types.issuperset(before.allowed_gpu_types)
    )


def _allows_what(before: JobSpec, after: JobSpec) -> bool:
    """Return whether the bounds ``after`` a change allow all GPU counts of those ``before``."""
    return after.min_gpus <= before.min_gpus and (
        after.max_gpus == 0 or 0 < before.max_gpus <= after.max_gpus
    )
