"""Comparisons of estimated collectives with those that XLA compiled."""

from __future__ import annotations

import json
from dataclasses import asdict

import sqlalchemy as sa

from tessera.db.rows import enter_cluster
from tessera.formulation.records.estimates import CollectiveRecord

_PUT = sa.text("""
INSERT INTO collective_checks
    (cluster_id, model, params, dp, tp, zero, release, note, problem, differs, document)
VALUES (:cluster, :model, :params, :dp, :tp, :zero, :release, :note, :problem, :differs,
    CAST(:document AS jsonb))
ON CONFLICT ON CONSTRAINT uq_collective_checks_degrees DO UPDATE SET
    release = excluded.release, note = excluded.note, problem = excluded.problem,
    differs = excluded.differs, document = excluded.document, checked_at = now()
""")

_CHECKS = sa.text("""
SELECT model, params, dp, tp, zero, release, note, problem, differs, document
FROM collective_checks WHERE cluster_id = :cluster ORDER BY model, params, dp, tp, zero
""")


def put_check(connection: sa.Connection, cluster: str, check: CollectiveRecord) -> None:
    """Store a comparison in place of an earlier one of the same degrees. Raises NotFound."""
    key = enter_cluster(connection, cluster)
    connection.execute(_PUT, asdict(check) | {"cluster": key})


def load_checks(connection: sa.Connection, cluster: int) -> tuple[CollectiveRecord, ...]:
    """Return the comparisons of a cluster."""
    return tuple(
        CollectiveRecord(**row._asdict() | {"document": _text(row.document)})
        for row in connection.execute(_CHECKS, {"cluster": cluster})
    )


def _text(document: object) -> str:
    return json.dumps(document, sort_keys=True)
