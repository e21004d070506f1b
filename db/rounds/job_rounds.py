"""The decisions of earlier rounds on one job, as far as the rounds are still kept."""

from __future__ import annotations

import sqlalchemy as sa

from tessera.db.base.decisions import unpack_page
from tessera.db.base.documents import allocation_from, reason_from
from tessera.db.base.rows import cluster_id
from tessera.formulation.base.errors import NotFound
from tessera.formulation.records.rounds import JobRound

_JOB = sa.text("SELECT id, created_at FROM jobs WHERE cluster_id = :cluster AND name = :name")

# A page holds the decisions on jobs from its first one on. A job that had the same name before has
# ended before this one was submitted.
_PAGES = sa.text("""
SELECT r.number, extract(epoch FROM r.created_at)::float8 AS created_s, p.document
FROM rounds r CROSS JOIN LATERAL (
    SELECT d.document FROM decision_pages d
    WHERE d.cluster_id = r.cluster_id AND d.round = r.number AND d.first_job_id <= :job
    ORDER BY d.page DESC LIMIT 1
) p
WHERE r.cluster_id = :cluster AND r.created_at >= :since AND (:last = 0 OR r.number <= :last)
ORDER BY r.number DESC LIMIT :most
""")


def rounds_of_job(
    connection: sa.Connection, cluster: str, name: str, last: int, most: int
) -> list[JobRound]:
    """Return the decisions of up to ``most`` rounds on a job, newest first.

    They are of round ``last`` and the ones before it, or of all rounds if it is 0. Refused rounds,
    which decided nothing, are left out. Raises NotFound (the job).
    """
    key = cluster_id(connection, cluster)
    job = connection.execute(_JOB, {"cluster": key, "name": name}).one_or_none()
    if job is None:
        raise NotFound(f"clusters/{cluster}/jobs/{name}")
    values = {"cluster": key, "job": job.id, "since": job.created_at, "last": last, "most": most}
    rounds = []
    for row in connection.execute(_PAGES, values):
        for decision in unpack_page(row.document, {name}):
            allocation = allocation_from(decision["allocation"])
            cell = None if allocation is None else allocation.cell
            reason = reason_from(decision["reason"])
            rounds.append(
                JobRound(
                    number=row.number,
                    created_s=row.created_s,
                    kind=decision["kind"],
                    code="" if reason is None else reason.code,
                    cell=f"{cell.gpus} x {cell.gpu_type}" if cell else "",
                    reason=reason,
                )
            )
    return rounds
