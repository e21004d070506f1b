"""Starts that failed on a node: the job avoids the node, and a node that is unfit is drained.

A start fails for a job's sake, e.g. because of a wrong command, or for a node's, e.g. because its
disk is full. Only the second kind counts against a node: what the node's agent found wrong with it,
and failures of jobs that have trained on other nodes since. See
docs/decisions/2026-11-29-count-failed-starts-with-proof.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.formulation.job.exit_reasons import ExitReason

log = logging.getLogger(__name__)

MAX_FAILED_STARTS: Final = 3
"""Number of starts in a row that fail because of their node, after which it is drained."""

DRAINED_BY: Final = "failed starts"
"""The author of such a drain, as it is shown."""

REASONS: Final = frozenset({ExitReason.NOT_STARTED, ExitReason.NODE_UNFIT})
"""Reasons of failures after which the job's next start avoids the node."""

EARLY_REASONS: Final = frozenset(
    {None, ExitReason.ERROR, ExitReason.GPU_FAILED, ExitReason.KILLED, ExitReason.STALLED}
)
"""Reasons after which it also does, if the program had not trained in this start."""

MAX_ERROR_CHARS: Final = 160
"""Largest number of characters of the last error in the reason of a drain."""

_PROVEN_ERROR: Final = "a program that failed before it trained, and trains on another node"

# Failures of one job on a node count once, until the job has trained.
_NOTE = sa.text("""
WITH given AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(:rows AS json))
        AS c(id bigint, node bigint, gpus bigint, unfit boolean)
), known AS MATERIALIZED (
    SELECT f.job_id, f.node_id FROM failed_starts f JOIN given g ON g.id = f.job_id AND g.node = f.node_id
    WHERE f.counted
), noted AS (
    INSERT INTO failed_starts AS f (job_id, node_id, gpus, counted)
    SELECT g.id, g.node, g.gpus, g.unfit FROM given g
    ON CONFLICT (job_id, node_id) DO UPDATE
        SET gpus = excluded.gpus, counted = f.counted OR excluded.counted
)
UPDATE nodes n SET failed_starts = n.failed_starts + c.starts
FROM (SELECT g.node, count(*) AS starts FROM given g
    WHERE g.unfit AND (g.id, g.node) NOT IN (SELECT k.job_id, k.node_id FROM known k)
    GROUP BY g.node) AS c
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

# The job trains, so its failures on other nodes were theirs.
_PROVE = sa.text("""
WITH own AS (
    DELETE FROM failed_starts f WHERE f.job_id = ANY(:jobs)
    RETURNING f.job_id, f.node_id, f.counted
)
UPDATE nodes n SET failed_starts = n.failed_starts + c.starts
FROM (SELECT o.node_id, count(*) AS starts FROM own o
    WHERE NOT o.counted AND NOT EXISTS (SELECT FROM allocations l
        WHERE l.job_id = o.job_id AND l.node_id = o.node_id AND l.hold <> 'reserved')
    GROUP BY o.node_id) AS c
WHERE n.id = c.node_id RETURNING n.id
""")

_CLEAR = """
UPDATE nodes n SET failed_starts = 0,
    version = n.version + CASE WHEN n.drained_by = :drained_by THEN 1 ELSE 0 END,
    draining = n.drained_by <> :drained_by AND n.draining,
    drain_reason = CASE WHEN n.drained_by = :drained_by THEN '' ELSE n.drain_reason END,
    drained_at = CASE WHEN n.drained_by = :drained_by THEN NULL ELSE n.drained_at END,
    drained_by = CASE WHEN n.drained_by = :drained_by THEN '' ELSE n.drained_by END
WHERE (n.failed_starts > 0 OR n.drained_by = :drained_by)
"""

_CLEAR_OF_JOBS = sa.text(f"""{_CLEAR} AND n.id IN (
    SELECT l.node_id FROM allocations l WHERE l.job_id = ANY(:jobs) AND l.hold <> 'reserved')
""")  # noqa: S608 - a constant

_CLEAR_NAMED = sa.text(f"{_CLEAR} AND n.cluster_id = :cluster AND n.name = ANY(:names)")

_FORGET = sa.text("""
DELETE FROM failed_starts f USING nodes n
WHERE n.id = f.node_id AND n.cluster_id = :cluster AND n.name = ANY(:names)
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
    return _drain(connection, values)


def _drain(connection: sa.Connection, values: dict[str, Any]) -> bool:
    """Drain the nodes on which too many starts failed; return whether there were any."""
    nodes = connection.execute(_DRAIN, values | {"drained_by": DRAINED_BY}).all()
    for node in nodes:
        log.warning(
            "drained a node that cannot start programs",
            extra={"event": "node_unfit", "node": node.name, "reason": node.drain_reason},
        )
    return bool(nodes)


def note_starts(connection: sa.Connection, jobs: Sequence[int]) -> bool:
    """Note that jobs (keys) train: their nodes can start jobs, and those where they failed cannot.

    They avoid no node any more. Return whether a node was drained or undrained for that.
    """
    if not jobs:
        return False
    values = {"jobs": list(jobs), "drained_by": DRAINED_BY}
    nodes = connection.execute(_PROVE, values).scalars().all()
    rows = [{"node": node, "unfit": True, "error": _PROVEN_ERROR} for node in nodes]
    has_cleared = connection.execute(_CLEAR_OF_JOBS, values).rowcount > 0
    return _drain(connection, {"rows": dump_json(rows)}) or has_cleared


def forget_failed_starts(connection: sa.Connection, cluster: int, names: Sequence[str]) -> bool:
    """Begin to count again, because the nodes' agent was restarted; undrain what was drained so.

    Return whether anything has changed.
    """
    values = {"cluster": cluster, "names": list(names), "drained_by": DRAINED_BY}
    has_forgotten = connection.execute(_FORGET, values).rowcount > 0
    return connection.execute(_CLEAR_NAMED, values).rowcount > 0 or has_forgotten
