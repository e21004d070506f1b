"""Upper bounds on what users can create, so that one client cannot fill the database."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import sqlalchemy as sa

from tessera.db.base.rows import cluster_id
from tessera.formulation.base.errors import LimitReached
from tessera.formulation.base.values import Workload
from tessera.formulation.job.lifecycle import TERMINAL, JobState
from tessera.formulation.records.store import StoreLimits

DEFAULT_LIMITS: Final = StoreLimits()
"""The limits of a store that has no others."""

LIMITS: Final = "tessera_limits"
"""The execution option of a store's connections that has its limits."""

_TURN: Final = sa.text("SELECT pg_advisory_xact_lock(:key)")

_CLUSTER_TURN: Final = 7_365_737_366  # any number, as long as every release uses this one

MAX_TOKENS: Final = 10_000
"""Largest number of tokens, and of join tokens of a cluster, that have not ended."""

MAX_CERTIFICATES: Final = 100
"""Largest number of certificates of an agent that have not expired, if it asks for another one."""

MAX_ESTIMATES_PER_WORKLOAD: Final = 20_000
"""Largest number of estimates of a workload, with all its GPU types, shapes and execution plans. A
round makes columns of them for each job, so they must not grow without bound."""

SAFE_DISTANCE_JOBS: Final = 100_000
"""Distance from the limit of open jobs up to which submissions do not wait for each other.

Fewer jobs are in submissions that are carried out at the same time.
"""

_CLUSTERS = sa.text("SELECT count(*) FROM clusters")

_OF_CLUSTER = {
    kind: sa.text(f"SELECT count(*) FROM {kind} WHERE cluster_id = :cluster")  # noqa: S608 - constants
    for kind in ("nodes", "agents", "models", "tenants")
}

_TOKENS = sa.text("""
SELECT count(*) FROM tokens
WHERE revoked_at IS NULL AND coalesce(expires_at, 'infinity') > clock_timestamp()
""")

_JOIN_TOKENS = sa.text("""
SELECT count(*) FROM join_tokens
WHERE cluster_id = :cluster AND revoked_at IS NULL AND expires_at > clock_timestamp()
""")

_CERTIFICATES = sa.text("""
SELECT count(*) FROM agent_certificates
WHERE cluster_id = :cluster AND agent = :agent AND expires_at > clock_timestamp()
""")

_ESTIMATES = sa.text("""
SELECT workload_id, count(*) AS estimates FROM estimates WHERE workload_id = ANY(:workloads)
GROUP BY workload_id HAVING count(*) > :most ORDER BY workload_id LIMIT 1
""")

# The states are listed, so that the index on them is enough.
_OPEN_JOBS = sa.text("""
SELECT tenant, count(*) AS jobs FROM jobs
WHERE cluster_id = :cluster AND tenant = ANY(:tenants) AND state = ANY(:states)
GROUP BY tenant ORDER BY tenant
""")

_TENANT_TURN = sa.text("""
SELECT pg_advisory_xact_lock(hashtextextended(:cluster || '/' || tenant, :key))
FROM unnest(CAST(:tenants AS text[])) AS tenant
""")

_OPEN_STATES: Final = sorted(set(JobState) - TERMINAL)


def require_few_clusters(connection: sa.Connection) -> None:
    """Check the number of clusters after one was created, while other creations wait.

    Raises LimitReached.
    """
    connection.execute(_TURN, {"key": _CLUSTER_TURN})
    _require(
        "clusters",
        connection.execute(_CLUSTERS).scalar_one(),
        _limits(connection).clusters,
        "this server",
    )


def require_few(connection: sa.Connection, cluster: str, kind: str) -> None:
    """Check the number of a cluster's rows of a kind after a creation. Raises LimitReached."""
    values = {"cluster": cluster_id(connection, cluster)}
    count = connection.execute(_OF_CLUSTER[kind], values).scalar_one()
    _require(kind, count, _limits(connection).of(kind), f"cluster {cluster}")


def require_few_open_jobs(
    connection: sa.Connection, cluster: str, tenants: Collection[str]
) -> None:
    """Check the number of live jobs of each of ``tenants`` after some were added.

    Near the limit, other submissions of these tenants wait until this transaction ends, so that
    together they do not exceed it. Raises LimitReached.
    """
    limits = _limits(connection)
    values = {
        "cluster": cluster_id(connection, cluster),
        "tenants": sorted(tenants),
        "states": _OPEN_STATES,
        "key": _CLUSTER_TURN,
    }
    counts = connection.execute(_OPEN_JOBS, values).all()
    if any(row.jobs > limits.open_jobs - SAFE_DISTANCE_JOBS for row in counts):
        connection.execute(_TENANT_TURN, values)
        counts = connection.execute(_OPEN_JOBS, values).all()
    for tenant, jobs in counts:
        if jobs > limits.open_jobs:
            whose = f"of tenant {tenant}" if tenant else "without a tenant"
            raise LimitReached(
                f"cluster {cluster} can have at most {limits.open_jobs:,} live jobs {whose}, and this"
                f" would make {jobs:,}; cancel some, wait until some have ended, or raise the server's"
                " setting max_open_jobs"
            )


def require_few_tokens(connection: sa.Connection) -> None:
    """Check the number of tokens after one was created. Raises LimitReached."""
    _require_below(connection.execute(_TOKENS).scalar_one(), MAX_TOKENS, "tokens", "this server")


def require_few_join_tokens(connection: sa.Connection, cluster: str) -> None:
    """Check the number of a cluster's join tokens after one was created. Raises LimitReached."""
    count = connection.execute(_JOIN_TOKENS, {"cluster": cluster_id(connection, cluster)})
    _require_below(count.scalar_one(), MAX_TOKENS, "join tokens", f"cluster {cluster}")


def require_few_certificates(connection: sa.Connection, cluster: int, agent: str) -> None:
    """Check the number of an agent's certificates after one was added. Raises LimitReached."""
    count = connection.execute(_CERTIFICATES, {"cluster": cluster, "agent": agent}).scalar_one()
    if count > MAX_CERTIFICATES:
        raise LimitReached(
            f"agent {agent} already has {MAX_CERTIFICATES} certificates that have not expired; find out"
            " why it asks so often"
        )


def require_few_estimates(connection: sa.Connection, workloads: Mapping[Workload, int]) -> None:
    """Check the number of estimates of workloads after some were added. Raises LimitReached."""
    values = {"workloads": sorted(workloads.values()), "most": MAX_ESTIMATES_PER_WORKLOAD}
    row = connection.execute(_ESTIMATES, values).one_or_none()
    if row is not None:
        key = next(workload.key for workload, at in workloads.items() if at == row.workload_id)
        raise LimitReached(
            f"workload {key} can have at most {MAX_ESTIMATES_PER_WORKLOAD:,} estimates, and this would"
            f" make {row.estimates:,}; delete Cells that nobody needs (tessera cells delete), or offer"
            " fewer execution plans"
        )


def _limits(connection: sa.Connection) -> StoreLimits:
    """Return the limits of the store that opened the connection."""
    limits: StoreLimits = connection.get_execution_options().get(LIMITS, DEFAULT_LIMITS)
    return limits


def _require_below(count: int, most: int, kind: str, where: str) -> None:
    if count > most:
        raise LimitReached(
            f"{where} can have at most {most:,} {kind} that have not ended; revoke some that nobody uses"
        )


def _require(kind: str, count: int, most: int, where: str) -> None:
    if count > most:
        raise LimitReached(
            f"{where} can have at most {most:,} {kind}, and this would make {count:,}; delete some, or raise"
            f" the server's setting max_{kind}"
        )
