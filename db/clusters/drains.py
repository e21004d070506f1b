"""Drains of nodes by operators.

Health and failed starts drain nodes, too (``tessera.db.agents.health``,
``tessera.db.clusters.failed_starts``).
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tessera.db.base.rows import nodes_named
from tessera.db.base.turn import Turn, request_round
from tessera.db.clusters.failed_starts import forget_failed_starts
from tessera.formulation.base.errors import NotFound
from tessera.formulation.records.clusters import NodeRecord

_DRAIN = sa.text("""
UPDATE nodes SET draining = true, drain_reason = coalesce(nullif(:reason, ''), drain_reason),
    drained_by = :drained_by, drained_at = now(), version = version + 1,
    health_drain = false, probation_until = NULL, failed_starts = 0
WHERE cluster_id = :cluster AND name = ANY(:names)
    AND (NOT draining OR health_drain OR failed_starts > 0
        OR (:reason <> '' AND drain_reason <> :reason))
""")
"""The drain of an operator. Nothing else undrains the node any more, whatever had drained it."""

_UNDRAIN = sa.text("""
UPDATE nodes SET draining = false, drain_reason = '', drained_by = '', drained_at = NULL,
    version = version + 1, health_drain = false, probation_until = NULL, excused_faults = faults,
    failed_starts = 0
WHERE cluster_id = :cluster AND name = ANY(:names) AND draining
""")


def drain_nodes(
    connection: sa.Connection,
    cluster: str,
    names: Sequence[str],
    *,
    draining: bool,
    reason: str = "",
    drained_by: str = "",
) -> list[NodeRecord]:
    """Mark nodes as draining, or not. Raises NotFound.

    A reason replaces the reason of a node that is already draining. If ``reason`` is "", the old
    one stays. A node that health had drained stays drained until it is undrained. The present
    faults of a node that is undrained are excused until they are gone.
    """
    turn = Turn.take(connection, cluster)
    values = {"cluster": turn.cluster, "names": list(names)}
    drain = {"reason": reason, "drained_by": drained_by} if draining else {}
    changed = connection.execute(_DRAIN if draining else _UNDRAIN, values | drain)
    if not draining:
        forget_failed_starts(connection, turn.cluster, names)
    if changed.rowcount:
        request_round(connection, turn.cluster)
    records = nodes_named(connection, turn.cluster, names)
    if missing := set(names) - {node.spec.name for node in records}:
        raise NotFound(f"clusters/{turn.name}/nodes/{min(missing)}")
    return records
