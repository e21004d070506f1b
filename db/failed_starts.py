"""Starts that failed on a node: the job avoids the node, and a node that is unfit is drained.

A start fails for a job's sake, e.g. because of a wrong command, or for a node's, e.g. because its
disk is full. Only the second kind counts against a node. A program could feign anything else, and
its user would then drain the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.documents import dump_json
from tessera.formulation.exit_reasons import ExitReason

log = logging.getLogger(__name__)

MAX_FAILED_STARTS: Final = 3
"""Number of starts in a row that fail because of their node, after which it is drained."""

DRAINED_BY: Final = "failed starts"
"""The author of such a drain, as it is shown."""

REASONS: Final = frozenset({ExitReason.NOT_STARTED, ExitReason.NODE_UNFIT})
"""Reasons of failures after which the job's next start avoids the node."""

MAX_ERROR_CHARS: Final = 160
"""Largest number of characters of the last error in the reason of a drain."""

_NOTE = sa.text("""
INSERT INTO failed_starts (job_id, node_id, gpus)
SELECT c.id, c.node, c.gpus
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, node bigint, gpus bigint)
ON CONFLICT (job_id, node_id) DO UPDATE SET gpus = excluded.gpus
""")

_COUNT = sa.text("""
UPDATE nodes n SET failed_starts = n.failed_starts + c.starts
FROM (SELECT r.node, count(*) AS starts
    FROM json_to_recordset(CAST(:rows AS json)) AS r(node bigint, unfit boolean)
    WHERE r.unfit GROUP BY r.node) AS c
WHERE n.id = c.node
""")

_DRAIN = sa.text(f"""
UPDATE nodes n SET draining = true, drained_by = :drained_by, drained_at = clock_timestamp(),
    version = n.version + 1,
    drain_reason = n.failed_starts || ' starts in a row failed because of this node, the last one with: '
        || c.error || '; mend it, then restart its agent or undrain it'
FROM (SELECT DISTINCT ON (r.node) r.node, r.error
    FROM json_to_recordset(CAST(:rows AS json)) AS r(node bigint, unfit boolean, error text)
    WHERE r.unfit ORDER BY r.node) AS c
WHERE n.id = c.node AND NOT n.draining AND n.failed_starts >= {MAX_FAILED_STARTS}
RETURNING n.name, n.drain_reason
""")  # noqa: S608 - a constant

_STARTED = tuple(
    sa.text(statement)
    for statement in (
        "DELETE FROM failed_starts WHERE job_id = ANY(:jobs)",
        """
UPDATE nodes n SET failed_starts = 0 WHERE n.failed_starts > 0 AND n.id IN (
    SELECT l.node_id FROM allocations l WHERE l.job_id = ANY(:jobs) AND l.hold = 'held')
""",
    )
)

_FORGET = sa.text("""
UPDATE nodes n SET failed_starts = 0, version = n.version + 1,
    draining = n.drained_by <> :drained_by AND n.draining,
    drain_reason = CASE WHEN n.drained_by = :drained_by THEN '' ELSE n.drain_reason END,
    drained_at = CASE WHEN n.drained_by = :drained_by THEN NULL ELSE n.drained_at END,
    drained_by = CASE WHEN n.drained_by = :drained_by THEN '' ELSE n.drained_by END
WHERE n.cluster_id = :cluster AND n.name = ANY(:names) AND n.failed_starts > 0
""")

AVOIDS: Final = """
    SELECT f.job_id, n.id, n.name FROM failed_starts f
    JOIN jobs j ON j.id = f.job_id JOIN nodes n ON n.id = f.node_id
    WHERE j.cluster_id = c.id AND j.state IN ('queued', 'stopping') AND f.gpus <= (
        SELECT sum(m.gpus) FROM nodes m JOIN agents a ON a.id = m.agent_id
        WHERE m.cluster_id = n.cluster_id AND m.gpu_type_id = n.gpu_type_id AND NOT m.draining
            AND extract(epoch FROM now() - a.heard_at)::float8 <= :silence_s
            AND NOT EXISTS (SELECT FROM failed_starts o
                WHERE o.job_id = f.job_id AND o.node_id = m.id))
"""
"""The nodes of a cluster (c) that jobs avoid after failed starts, as long as others have room.

Its columns are the job's and the node's keys, and the node's name.
"""


def note_failed_starts(connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Store which nodes could not start which jobs; return whether a node was drained for that.

    A row has the keys of job and node, the GPUs of the start, whether the node is unfit, and the
    error.
    """
    if not rows:
        return False
    values = {"rows": dump_json([{**row, "error": row["error"][:MAX_ERROR_CHARS]} for row in rows])}
    connection.execute(_NOTE, values)
    connection.execute(_COUNT, values)
    drained = connection.execute(_DRAIN, values | {"drained_by": DRAINED_BY}).all()
    for node in drained:
        log.warning(
            "drained a node that cannot start programs",
            extra={"event": "node_unfit", "node": node.name, "reason": node.drain_reason},
        )
    return bool(drained)


def note_starts(connection: sa.Connection, jobs: Sequence[int]) -> None:
    """Note that jobs (keys) run: they avoid no node any more, and their nodes can start jobs."""
    if jobs:
        for statement in _STARTED:
            connection.execute(statement, {"jobs": list(jobs)})


def forget_failed_starts(connection: sa.Connection, cluster: int, names: Sequence[str]) -> bool:
    """Begin to count again, because the nodes' agent was restarted; undrain what was drained so.

    Return whether anything has changed.
    """
    values = {"cluster": cluster, "names": list(names), "drained_by": DRAINED_BY}
    return connection.execute(_FORGET, values).rowcount > 0
