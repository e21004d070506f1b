"""The removal of deleted clusters' rows, a bounded number in each transaction."""

from __future__ import annotations

import sqlalchemy as sa

ROWS_PER_BATCH = 20_000
"""Largest number of rows of one table that a transaction removes."""

JOBS_PER_BATCH = 1000
"""Largest number of jobs that a transaction removes. Their histories, at most some hundred rows
each, are removed with them.
"""

ROUNDS_PER_BATCH = 100
"""Largest number of stored rounds that a transaction removes. Each holds a whole snapshot."""

# Replicas that purge at the same time take different clusters.
_CLUSTER = sa.text("""
SELECT id FROM clusters WHERE deleted_at IS NOT NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
""")

_OF_WORKLOADS = "SELECT w.id FROM workloads w WHERE w.cluster_id = :cluster"


def _delete(table: str, where: str, limit: int) -> tuple[sa.TextClause, int]:
    """Return the statement that deletes at most ``limit`` rows, and the limit."""
    rows = f"SELECT x.ctid FROM {table} x WHERE {where} LIMIT {limit}"  # noqa: S608 - constants
    return sa.text(f"DELETE FROM {table} WHERE ctid = ANY(ARRAY({rows}))"), limit  # noqa: S608


_STATEMENTS = (
    _delete("rounds", "x.cluster_id = :cluster", ROUNDS_PER_BATCH),
    _delete("network_plans", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("networks", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("jobs", "x.cluster_id = :cluster", JOBS_PER_BATCH),
    _delete("job_arrays", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete(
        "webhook_events",
        "x.webhook_id IN (SELECT w.id FROM webhooks w WHERE w.cluster_id = :cluster)",
        ROWS_PER_BATCH,
    ),
    _delete("webhooks", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("tunings", f"x.workload_id IN ({_OF_WORKLOADS})", ROWS_PER_BATCH),
    _delete("estimates", f"x.workload_id IN ({_OF_WORKLOADS})", ROWS_PER_BATCH),
    _delete("measurements", f"x.workload_id IN ({_OF_WORKLOADS})", ROWS_PER_BATCH),
    _delete("profiles", f"x.workload_id IN ({_OF_WORKLOADS})", ROWS_PER_BATCH),
    _delete("profile_gaps", f"x.workload_id IN ({_OF_WORKLOADS})", ROWS_PER_BATCH),
    _delete("workloads", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("plans", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("models", "x.cluster_id = :cluster", ROUNDS_PER_BATCH),
    _delete("policies", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("usage_days", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("reservations", "x.cluster_id = :cluster", JOBS_PER_BATCH),
    _delete("tenants", "x.cluster_id = :cluster", JOBS_PER_BATCH),
    _delete(
        "gpus",
        "x.node_id IN (SELECT n.id FROM nodes n WHERE n.cluster_id = :cluster)",
        ROWS_PER_BATCH,
    ),
    _delete("nodes", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("agents", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("gpu_types", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("join_tokens", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("log_reads", "x.cluster_id = :cluster", ROWS_PER_BATCH),
    _delete("leases", "x.cluster_id = :cluster", ROWS_PER_BATCH),
)
"""The deletions in the order of foreign keys: rows that refer to others come first."""

_DROP_CLUSTER = sa.text("DELETE FROM clusters WHERE id = :cluster")


def purge_batch(connection: sa.Connection) -> bool:
    """Remove a batch of rows of one deleted cluster; return whether there may be more to remove."""
    cluster = connection.execute(_CLUSTER).scalar()
    if cluster is None:
        return False
    values = {"cluster": cluster}
    for statement, limit in _STATEMENTS:
        if connection.execute(statement, values).rowcount >= limit:
            return True
    connection.execute(_DROP_CLUSTER, values)
    return True
