"""Retention: the deletion of rows that nobody needs any more, a bounded number in each transaction.

Rounds and snapshots are deleted from the newest that may go to the oldest, so that none outlives
the snapshot it is stored against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from tessera.db.agents.log_reads import FRESH
from tessera.db.base.rows import cluster_id
from tessera.db.clusters.usage import DELETE_JOBS, DELETE_STINTS
from tessera.db.estimates.derived_estimates import MAX_MEASUREMENTS
from tessera.db.schema.engine import Database
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.records.store import Retention

KEEP_EVENTS: Final = 50
"""Number of latest entries of a live job's history that are kept as long as the job."""

KEEP_STARTS: Final = 50
"""Number of latest starts of a live job whose places are kept as long as the job."""

KEEP_POLICIES: Final = 50
"""Number of latest versions of a cluster's policy that are kept, whatever their age."""

BATCH_ROWS: Final = 500
"""Number of rows of a kind that a transaction deletes: rounds and users must not wait long."""

CERTIFICATE_MARGIN_S: Final = 86400.0
"""Time for which expired certificates are kept, for servers whose clocks are late: a certificate
without a row is not revoked.
"""

_CENTURY_S: Final = 100 * 365.25 * 86400.0
_NEVER: Final = 2**62  # more rounds than there will ever be

_LOCK_CLUSTER = sa.text("SELECT FROM clusters WHERE id = :cluster FOR NO KEY UPDATE")
"""A lock against commits of rounds, so that none is stored against a deleted snapshot."""

_BEGIN_PRUNING = sa.text("SET LOCAL tessera.pruning = 'on'")
"""A permission to delete from the audit log, until the transaction ends."""

_OLD_REQUESTS = """
    SELECT id FROM request_ids WHERE created_at < now() - make_interval(secs => :requests_s)
"""

_OLD_ROUNDS = """
    WITH limits AS (
        SELECT id, decided_round, last_round - :least_rounds AS below, last_round - :most_rounds AS at_most,
            now() - make_interval(secs => :rounds_s) AS before
        FROM clusters WHERE id = :cluster
    ), first_kept AS (
        SELECT coalesce(r.base, r.number) AS number FROM rounds r JOIN limits l ON l.id = r.cluster_id
        WHERE r.number > l.below OR (r.created_at >= l.before AND r.number > l.at_most)
        ORDER BY r.number LIMIT 1
    )
    SELECT r.cluster_id, r.number FROM rounds r JOIN limits l ON l.id = r.cluster_id
    LEFT JOIN rounds d ON d.cluster_id = l.id AND d.number = l.decided_round
    WHERE r.number < coalesce((SELECT number FROM first_kept), l.below + 1)
        AND r.number <> l.decided_round AND r.number <> coalesce(d.base, 0)
    ORDER BY r.number DESC
"""

_OLD_SNAPSHOTS = """
    WITH first_kept AS (
        SELECT coalesce(r.base, r.number) AS number
        FROM rounds r JOIN clusters c ON c.id = r.cluster_id
        WHERE c.id = :cluster AND r.number > c.last_round - :most_snapshots ORDER BY r.number LIMIT 1
    )
    SELECT r.cluster_id, r.number FROM rounds r JOIN first_kept k ON r.number < k.number
    WHERE r.cluster_id = :cluster AND r.snapshot IS NOT NULL ORDER BY r.number DESC
"""

_OLD_NETWORK_PLANS = """
    SELECT p.cluster_id, p.number FROM network_plans p JOIN networks n ON n.cluster_id = p.cluster_id
    WHERE n.cluster_id = :cluster AND p.number <= n.last_plan - :least_rounds
        AND (p.planned_at < now() - make_interval(secs => :rounds_s)
            OR p.number <= n.last_plan - :most_rounds)
"""

_OLD_JOBS = """
    SELECT j.id FROM jobs j WHERE j.cluster_id = :cluster
        AND j.ended_at < now() - make_interval(secs => :jobs_s)
        AND NOT EXISTS (SELECT FROM allocations l WHERE l.job_id = j.id)
"""

_UNUSED_ARRAYS = """
    SELECT a.id FROM job_arrays a WHERE a.cluster_id = :cluster AND a.ended = a.size
        AND NOT EXISTS (SELECT FROM jobs j WHERE j.array_id = a.id)
"""
"""The arrays of which no job is stored any more. A dependency that they met stays met."""

_OLD_WEBHOOK_EVENTS = """
    SELECT e.id FROM webhook_events e JOIN webhooks w ON w.id = e.webhook_id
    WHERE w.cluster_id = :cluster AND e.at < now() - make_interval(secs => :jobs_s)
"""
"""The events that dead webhooks did not take."""

_OLD_EVENTS = f"""
    SELECT h.id FROM jobs j CROSS JOIN LATERAL (
        SELECT e.id, e.at FROM job_history e WHERE e.job_id = j.id ORDER BY e.id DESC OFFSET {KEEP_EVENTS}
    ) AS h
    WHERE j.cluster_id = :cluster AND j.{LIVE} AND h.at < now() - make_interval(secs => :jobs_s)
"""  # noqa: S608 - constants only

_OLD_STARTS = f"""
    SELECT s.job_id, s.generation FROM jobs j CROSS JOIN LATERAL (
        SELECT e.job_id, e.generation, e.given_at FROM job_starts e WHERE e.job_id = j.id
        ORDER BY e.generation DESC OFFSET {KEEP_STARTS}
    ) AS s
    WHERE j.cluster_id = :cluster AND j.{LIVE}
        AND s.given_at < now() - make_interval(secs => :jobs_s)
"""  # noqa: S608 - constants only

_DROP_STARTS = f"""
DELETE FROM job_starts WHERE (job_id, generation) IN ({_OLD_STARTS} LIMIT {BATCH_ROWS})
"""  # noqa: S608 - constants of this module

_OLD_STINTS = f"""
    SELECT s.id FROM jobs j CROSS JOIN LATERAL (
        SELECT t.id, t.ended_at FROM stints t WHERE t.job_id = j.id ORDER BY t.id DESC OFFSET {KEEP_STARTS}
    ) AS s
    WHERE j.cluster_id = :cluster AND j.{LIVE} AND s.ended_at < now() - make_interval(secs => :jobs_s)
"""  # noqa: S608 - constants only

_OLD_DAYS = """
    SELECT id FROM usage_days
    WHERE cluster_id = :cluster AND day < now() AT TIME ZONE 'UTC' - make_interval(secs => :usage_s)
"""

_OLD_POLICIES = f"""
    SELECT p.version FROM policies p WHERE p.cluster_id = :cluster
        AND p.set_at < now() - make_interval(secs => :audit_s)
        AND p.version <= (SELECT max(x.version) FROM policies x WHERE x.cluster_id = :cluster)
            - {KEEP_POLICIES}
"""  # noqa: S608 - constants only

_EXPIRED_LOG_READS = f"SELECT id FROM log_reads WHERE NOT {FRESH}"  # noqa: S608 - a constant of db

_OLD_MEASUREMENTS = f"""
    SELECT m.id FROM measurements m JOIN workloads w ON w.id = m.workload_id
    WHERE w.cluster_id = :cluster AND m.changed_at < now() - make_interval(secs => :jobs_s)
        AND m.id NOT IN (
            SELECT x.id FROM measurements x JOIN workloads v ON v.id = x.workload_id
            WHERE v.cluster_id = :cluster AND x.source = {int(EstimateSource.MEASURED)}
            ORDER BY x.changed_at DESC LIMIT {MAX_MEASUREMENTS})
"""  # noqa: S608 - constants only

_UNUSED_WORKLOADS = """
    SELECT w.id FROM workloads w WHERE w.cluster_id = :cluster
        AND NOT EXISTS (SELECT FROM jobs j WHERE j.workload_id = w.id)
        AND NOT EXISTS (SELECT FROM measurements m WHERE m.workload_id = w.id)
        AND NOT EXISTS (SELECT FROM profiles p WHERE p.workload_id = w.id)
        AND NOT EXISTS (SELECT FROM estimates e WHERE e.workload_id = w.id AND NOT e.derived)
"""
"""The workloads that only have estimates made by the service. Another job would get these again."""

_UNUSED_PLANS = """
    SELECT p.id FROM plans p WHERE p.cluster_id = :cluster AND p.name <> ''
        AND NOT EXISTS (SELECT FROM estimates e WHERE e.plan_id = p.id)
        AND NOT EXISTS (SELECT FROM measurements m WHERE m.plan_id = p.id)
        AND NOT EXISTS (SELECT FROM jobs j WHERE j.cell_plan_id = p.id)
        AND NOT EXISTS (SELECT FROM jobs j WHERE j.plan_id = p.id)
        AND NOT EXISTS (SELECT FROM jobs j WHERE j.submitted_plan_id = p.id)
        AND NOT EXISTS (SELECT FROM jobs j WHERE j.cluster_id = p.cluster_id AND j.admitted
            AND j.schedule @> jsonb_build_array(jsonb_build_object('plan', p.name)))
        AND NOT EXISTS (SELECT FROM jobs j WHERE j.cluster_id = p.cluster_id
            AND j.planned_start IS NOT NULL AND j.planned_start->>'plan' = p.name)
"""

_UNUSED_TUNINGS = f"""
    SELECT t.id FROM tunings t JOIN workloads w ON w.id = t.workload_id
    WHERE w.cluster_id = :cluster AND NOT EXISTS (
        SELECT FROM jobs j WHERE j.workload_id = t.workload_id AND j.{LIVE} AND j.runtime = t.runtime
            AND j.launch->>'tuning_space' = t.space)
"""  # noqa: S608 - a constant of tessera.db.schema.tables
"""The plans to try that no live job may try. Those of plans and workloads go with them."""

_OLD_ENTRIES = """
    SELECT number FROM audit_log WHERE at < now() - make_interval(secs => :audit_s)
"""

_OLD_TOKENS = """
    SELECT id FROM tokens
    WHERE least(revoked_at, expires_at) < now() - make_interval(secs => :jobs_s)
"""

_OLD_JOIN_TOKENS = """
    SELECT id FROM join_tokens
    WHERE least(revoked_at, expires_at) < now() - make_interval(secs => :jobs_s)
"""

_EXPIRED_CERTIFICATES = f"""
    SELECT serial FROM agent_certificates
    WHERE expires_at < now() - make_interval(secs => {CERTIFICATE_MARGIN_S})
"""  # noqa: S608 - a constant of this module


@dataclass(frozen=True, slots=True)
class _RowKind:
    """A kind of rows to delete: a query of their keys, and statements for a batch of keys."""

    query: str
    statements: tuple[str, ...]
    locks: str = ""
    of_cluster: bool = True
    waits_for_rounds: bool = False
    is_audit: bool = False

    def count(self, connection: sa.Connection, values: Mapping[str, object]) -> int:
        """Return how many rows would be deleted."""
        query = sa.text(f"SELECT count(*) FROM ({self.query}) AS old")  # noqa: S608 - constants
        return int(connection.execute(query, values).scalar_one())

    def delete(self, connection: sa.Connection, values: Mapping[str, object]) -> int:
        """Delete a batch; return the number of deleted rows."""
        if self.waits_for_rounds:
            connection.execute(_LOCK_CLUSTER, values)
        if self.is_audit:
            connection.execute(_BEGIN_PRUNING)
        keys = connection.execute(
            sa.text(f"{self.query} LIMIT {BATCH_ROWS} {self.locks}"), values
        ).all()
        batch = {"keys": [key[-1] for key in keys], **values}
        deleted = 0
        for statement in self.statements if keys else ():
            result = connection.execute(sa.text(statement), batch)
            deleted = result.scalar_one() if result.returns_rows else result.rowcount
        return deleted


_KINDS: Final[Mapping[str, _RowKind]] = {
    "request_ids": _RowKind(
        _OLD_REQUESTS, ("DELETE FROM request_ids WHERE id = ANY(:keys)",), of_cluster=False
    ),
    "rounds": _RowKind(
        _OLD_ROUNDS,
        ("DELETE FROM rounds WHERE cluster_id = :cluster AND number = ANY(:keys)",),
        waits_for_rounds=True,
    ),
    "snapshots": _RowKind(
        _OLD_SNAPSHOTS,
        (
            "UPDATE rounds SET snapshot = NULL, base = NULL"
            " WHERE cluster_id = :cluster AND number = ANY(:keys)",
        ),
        waits_for_rounds=True,
    ),
    "jobs": _RowKind(_OLD_JOBS, (DELETE_JOBS,)),
    "stints": _RowKind(_OLD_STINTS, (DELETE_STINTS,)),
    "usage_days": _RowKind(_OLD_DAYS, ("DELETE FROM usage_days WHERE id = ANY(:keys)",)),
    "policies": _RowKind(
        _OLD_POLICIES,
        ("DELETE FROM policies WHERE cluster_id = :cluster AND version = ANY(:keys)",),
    ),
    "job_arrays": _RowKind(_UNUSED_ARRAYS, ("DELETE FROM job_arrays WHERE id = ANY(:keys)",)),
    "webhook_events": _RowKind(
        _OLD_WEBHOOK_EVENTS, ("DELETE FROM webhook_events WHERE id = ANY(:keys)",)
    ),
    "job_history": _RowKind(_OLD_EVENTS, ("DELETE FROM job_history WHERE id = ANY(:keys)",)),
    "job_starts": _RowKind(_OLD_STARTS, (_DROP_STARTS,)),
    "log_reads": _RowKind(
        _EXPIRED_LOG_READS, ("DELETE FROM log_reads WHERE id = ANY(:keys)",), of_cluster=False
    ),
    "network_plans": _RowKind(
        _OLD_NETWORK_PLANS,
        ("DELETE FROM network_plans WHERE cluster_id = :cluster AND number = ANY(:keys)",),
    ),
    "measurements": _RowKind(
        _OLD_MEASUREMENTS, ("DELETE FROM measurements WHERE id = ANY(:keys)",)
    ),
    "tunings": _RowKind(_UNUSED_TUNINGS, ("DELETE FROM tunings WHERE id = ANY(:keys)",)),
    "workloads": _RowKind(
        _UNUSED_WORKLOADS,
        (
            "DELETE FROM estimates WHERE derived AND workload_id = ANY(:keys)",
            "DELETE FROM workloads WHERE id = ANY(:keys)",
        ),
        locks="FOR UPDATE OF w SKIP LOCKED",  # a job that is being submitted has locked its workload
    ),
    "plans": _RowKind(
        _UNUSED_PLANS,
        ("DELETE FROM plans WHERE id = ANY(:keys)",),
        locks="FOR UPDATE OF p SKIP LOCKED",  # an estimate that is being stored has locked its plan
    ),
    "tokens": _RowKind(
        _OLD_TOKENS, ("DELETE FROM tokens WHERE id = ANY(:keys)",), of_cluster=False
    ),
    "join_tokens": _RowKind(
        _OLD_JOIN_TOKENS, ("DELETE FROM join_tokens WHERE id = ANY(:keys)",), of_cluster=False
    ),
    "agent_certificates": _RowKind(
        _EXPIRED_CERTIFICATES,
        ("DELETE FROM agent_certificates WHERE serial = ANY(:keys)",),
        of_cluster=False,
    ),
    "audit_log": _RowKind(
        _OLD_ENTRIES,
        ("DELETE FROM audit_log WHERE number = ANY(:keys)",),
        of_cluster=False,
        is_audit=True,
    ),
}


def prune_batch(database: Database, cluster: str, retention: Retention) -> dict[str, int]:
    """Delete up to ``BATCH_ROWS`` old rows of each kind; return the deleted numbers by kind.

    Each kind has a separate transaction. Request ids, requests for output, tokens, certificates and
    the audit log belong to no cluster and are deleted with any cluster's. Raises NotFound.
    """
    with database.read() as connection:
        values = _values(retention) | {"cluster": cluster_id(connection, cluster)}
    return {name: _delete(database, kind, values) for name, kind in _KINDS.items()}


def prune_database(database: Database, retention: Retention) -> dict[str, int]:
    """Delete all old rows of every cluster, batch by batch; return the deleted numbers by kind."""
    deleted = dict.fromkeys(_KINDS, 0)
    for name, kind, values in _everywhere(database, retention):
        while rows := _delete(database, kind, values):
            deleted[name] += rows
    return deleted


def count_old(database: Database, retention: Retention) -> dict[str, int]:
    """Return how many rows ``prune_database`` would delete, by kind.

    Workloads that become unused when their last job is deleted are not included.
    """
    counts = dict.fromkeys(_KINDS, 0)
    for name, kind, values in _everywhere(database, retention):
        with database.read() as connection:
            counts[name] += kind.count(connection, values)
    return counts


def _delete(database: Database, kind: _RowKind, values: Mapping[str, object]) -> int:
    return database.write(lambda connection: kind.delete(connection, values))


def _everywhere(
    database: Database, retention: Retention
) -> Iterator[tuple[str, _RowKind, dict[str, object]]]:
    """Yield each kind for each cluster, and once each kind that belongs to no cluster."""
    with database.read() as connection:
        query = sa.text("SELECT id FROM clusters ORDER BY id")
        clusters = list(connection.execute(query).scalars())
    for name, kind in _KINDS.items():
        for cluster in clusters if kind.of_cluster else [None]:
            yield name, kind, _values(retention) | {"cluster": cluster}


def _values(retention: Retention) -> dict[str, object]:
    """Return the parameters of the queries.

    Infinite values become large ones, which PostgreSQL can hold.
    """
    return {
        "requests_s": min(retention.requests_s, _CENTURY_S),
        "rounds_s": min(retention.rounds_s, _CENTURY_S),
        "jobs_s": min(retention.jobs_s, _CENTURY_S),
        "audit_s": min(retention.audit_s, _CENTURY_S),
        "usage_s": min(retention.usage_s, _CENTURY_S),
        "least_rounds": retention.least_rounds,
        "most_rounds": _count(retention.most_rounds),
        "most_snapshots": _count(retention.most_snapshots),
    }


def _count(limit: float) -> int:
    return int(limit) if math.isfinite(limit) else _NEVER
