"""Upper bounds on what users can create, so that one client cannot fill the database."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from tessera.db.rows import cluster_id
from tessera.formulation.errors import LimitReached
from tessera.formulation.records.store import StoreLimits

_TURN: Final = sa.text("SELECT pg_advisory_xact_lock(:key)")

_CLUSTER_TURN: Final = 7_365_737_366  # any number, as long as every release uses this one

_CLUSTERS = sa.text("SELECT count(*) FROM clusters")

_OF_CLUSTER = {
    kind: sa.text(f"SELECT count(*) FROM {kind} WHERE cluster_id = :cluster")  # noqa: S608 - constants
    for kind in ("nodes", "agents", "models", "tenants")
}


def require_few_clusters(connection: sa.Connection, limits: StoreLimits) -> None:
    """Check the number of clusters after one was created, while other creations wait.

    Raises LimitReached.
    """
    connection.execute(_TURN, {"key": _CLUSTER_TURN})
    _require("clusters", connection.execute(_CLUSTERS).scalar_one(), limits.clusters, "this server")


def require_few(connection: sa.Connection, cluster: str, kind: str, limits: StoreLimits) -> None:
    """Check the number of a cluster's rows of a kind after a creation. Raises LimitReached."""
    values = {"cluster": cluster_id(connection, cluster)}
    count = connection.execute(_OF_CLUSTER[kind], values).scalar_one()
    _require(kind, count, limits.of(kind), f"cluster {cluster}")


def _require(kind: str, count: int, most: int, where: str) -> None:
    if count > most:
        raise LimitReached(
            f"{where} can have at most {most:,} {kind}, and this would make {count:,}; delete some, or raise"
            f" the server's setting max_{kind}"
        )
