"""Execution plans in the database. Each is kept once in a cluster, under its digest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec

_ADD = sa.text("""
INSERT INTO plans AS p (cluster_id, name, document)
SELECT :cluster, r.* FROM json_to_recordset(CAST(:rows AS json)) AS r(name text, document text)
ON CONFLICT (cluster_id, name) DO UPDATE SET document = excluded.document
    WHERE p.document = '' AND excluded.document <> ''
""")

_KEYS = sa.text("""
SELECT name, id FROM plans WHERE cluster_id = :cluster AND name = ANY(:names) ORDER BY name
FOR KEY SHARE
""")
"""A query with a lock, so that retention does not delete a plan that is about to be used."""

_DOCUMENTS = sa.text("""
SELECT p.name, p.document FROM plans p JOIN clusters c ON c.id = p.cluster_id
WHERE c.name = :cluster AND p.name = ANY(:names) AND p.document <> ''
""")


def ensure_plans(
    connection: sa.Connection, cluster: int, estimates: Sequence[EstimateRecord]
) -> dict[str, int]:
    """Return the keys of the estimates' execution plans by name, creating missing ones.

    They exist until the transaction ends.

    Raises:
        InvalidInput: an estimate names a plan that is not stored, and does not say what it is.
    """
    plans = {e.cell.plan: "" for e in estimates}
    plans |= {e.plan.digest: e.plan.to_json() for e in estimates if e.plan is not None}
    return ensure_documents(connection, cluster, plans)


def ensure_plans_of_jobs(
    connection: sa.Connection, cluster: int, jobs: Iterable[JobSpec]
) -> dict[str, int]:
    """Return the keys of the plans that jobs state or are submitted with, by name, creating missing ones.

    They exist until the transaction ends.

    Raises:
        InvalidInput: a job names a plan that is not stored, and does not say what it is.
    """
    documents: dict[str, str] = {}
    for job in jobs:
        for plan in (job.plan, job.submitted_plan):
            if isinstance(plan, ExecutionPlan):
                documents[plan.digest] = plan.to_json()
            elif plan:
                documents.setdefault(plan, "")
    return ensure_documents(connection, cluster, documents) if documents else {}


def ensure_documents(
    connection: sa.Connection, cluster: int, plans: Mapping[str, str]
) -> dict[str, int]:
    """Return the keys of plans, given as canonical JSON by digest, creating missing ones.

    A plan without a document must be stored. They exist until the transaction ends.

    Raises:
        InvalidInput: a plan is not stored.
    """
    rows = [
        {"name": name, "document": document}
        for name, document in sorted(plans.items())
        if document or not name
    ]
    values = {"cluster": cluster, "names": sorted(plans)}
    while True:  # again if retention deletes a plan between the two statements
        connection.execute(_ADD, {"cluster": cluster, "rows": dump_json(rows)})
        keys = {name: key for name, key in connection.execute(_KEYS, values)}
        unknown = plans.keys() - keys.keys()
        if not unknown & {row["name"] for row in rows}:
            break
    if unknown:
        raise InvalidInput(
            "plan",
            f"the execution plan {min(unknown)[:80]!r} is not stored, so nothing could be launched by it;"
            " send the plan itself, or leave the plan empty if the best one is meant",
        )
    return keys


def ensure_unnamed_plan(connection: sa.Connection, cluster: int) -> None:
    """Create the plan "", which stands for the best one, if it is missing. It is never deleted."""
    rows = dump_json([{"name": "", "document": ""}])
    connection.execute(_ADD, {"cluster": cluster, "rows": rows})


def read_plans(connection: sa.Connection, cluster: str, digests: Collection[str]) -> dict[str, str]:
    """Return the canonical JSON of execution plans by digest. Those that are not stored are left out."""
    values = {"cluster": cluster, "names": sorted(digests)}
    return {row.name: row.document for row in connection.execute(_DOCUMENTS, values)}
