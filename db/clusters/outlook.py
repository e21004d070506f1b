"""The outlook of clusters, which time alone brings: ends of back-offs and of probations, windows
of reservations, planned starts, due promises, silent nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import sqlalchemy as sa

from tessera.db.base.rows import RUN_S, SILENT_S
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.moments import SAME_S
from tessera.formulation.records.clusters import ClusterOutlook

HEARD_AHEAD = "heard_at > clock_timestamp() + interval '1 s'"
"""The condition that a time lies in the future, because the clock was set back since."""

# What comes while a round is decided and committed is due at once. What the last round has seen come
# is left out: the round has acted on it, or could not. A round of the future, before the clock was set
# back, has seen only the past. A node is schedulable as for a snapshot
# (``tessera.db.rounds.snapshot.cluster``). It has fallen silent as for
# ``tessera.db.agents.agents.expire_silent_nodes``. A promise that was due before the last round is left
# out: that round was refused, and another one would be, too.
_OUTLOOK = sa.text(f"""
SELECT c.name, least(w.retry_in_s, n.probation_in_s, o.run_left_s, v.window_in_s) AS event_in_s,
    t.start_in_s, p.promise_in_s, n.silent_in_s, n.schedulable,
    coalesce(n.is_lost OR n.is_ahead, false) AS needs_round
FROM clusters c
CROSS JOIN LATERAL (
    SELECT least((SELECT (r.summary->>'created_s')::float8 FROM rounds r
            WHERE r.cluster_id = c.id AND r.number = c.last_round),
        extract(epoch FROM clock_timestamp())::float8) AS seen_s
) l
CROSS JOIN LATERAL (
    SELECT extract(epoch FROM min(j.retry_at) - clock_timestamp())::float8 AS retry_in_s
    FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE} AND j.retry_at > to_timestamp(l.seen_s)
) w
CROSS JOIN LATERAL (
    SELECT min(j.longest_run_s - ({RUN_S})) AS run_left_s
    FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE} AND j.longest_run_s < 'Infinity'
        AND (j.since_at IS NOT NULL OR j.state = 'queued' AND j.run_s >= j.longest_run_s)
) o
CROSS JOIN LATERAL (
    SELECT extract(epoch FROM min(b.at) - clock_timestamp())::float8 AS window_in_s
    FROM reservations r CROSS JOIN LATERAL (VALUES (r.start_at), (r.end_at)) AS b(at)
    WHERE r.cluster_id = c.id AND b.at > to_timestamp(l.seen_s)
) v
CROSS JOIN LATERAL (
    SELECT min(planned.start_s) - extract(epoch FROM clock_timestamp())::float8 AS start_in_s
    FROM (
        SELECT (j.planned_start->>'start_s')::float8 AS start_s FROM jobs j
        WHERE j.cluster_id = c.id AND j.{LIVE} AND j.planned_start IS NOT NULL
    ) planned WHERE planned.start_s > l.seen_s + {SAME_S}
) t
LEFT JOIN LATERAL (
    SELECT (r.summary->>'promises_due_s')::float8
        - extract(epoch FROM clock_timestamp())::float8 AS promise_in_s
    FROM rounds r WHERE r.cluster_id = c.id AND r.number = c.decided_round
        AND r.summary ? 'promises_due_s'
) p ON p.promise_in_s > 0 OR c.decided_round = c.last_round
CROSS JOIN LATERAL (
    SELECT min(:silence_s - s.silent_s) FILTER (WHERE s.silent_s <= :silence_s) AS silent_in_s,
        concat(count(*) FILTER (WHERE s.is_schedulable), ':',
            sum(s.id) FILTER (WHERE s.is_schedulable)) AS schedulable,
        bool_or(coalesce(s.silent_s, 'Infinity') > :silence_s
            AND EXISTS (SELECT FROM allocations l WHERE l.node_id = s.id)) AS is_lost,
        min(s.probation_in_s) FILTER (WHERE s.is_schedulable) AS probation_in_s,
        bool_or(s.is_ahead) AS is_ahead
    FROM (
        SELECT n.id, {SILENT_S} AS silent_s,
            coalesce(extract(epoch FROM clock_timestamp() - a.heard_at)::float8 <= :silence_s, false)
                AS is_schedulable,
            extract(epoch FROM n.probation_until - clock_timestamp())::float8 AS probation_in_s,
            coalesce(a.{HEARD_AHEAD}, n.{HEARD_AHEAD}, false) AS is_ahead
        FROM nodes n LEFT JOIN agents a ON a.id = n.agent_id WHERE n.cluster_id = c.id
    ) s
) n
WHERE c.name = ANY(:names)
""")  # noqa: S608 - constants only


def load_outlooks(
    connection: sa.Connection, clusters: Collection[str], silence_s: float
) -> dict[str, ClusterOutlook]:
    """Return the outlook of each of these clusters that exists, by name.

    A node that was not heard for ``silence_s`` has fallen silent.
    """
    values = {"names": sorted(clusters), "silence_s": silence_s}
    return {
        row.name: ClusterOutlook(
            event_in_s=0.0 if row.needs_round else _seconds(row.event_in_s),
            start_in_s=_seconds(row.start_in_s),
            promises_due_in_s=_seconds(row.promise_in_s),
            look_in_s=_seconds(row.silent_in_s),
            schedulable=row.schedulable,
        )
        for row in connection.execute(_OUTLOOK, values)
    }


def _seconds(seconds: float | None) -> float:
    """Return a number of seconds, but at least 0, or inf for None."""
    return math.inf if seconds is None else max(0.0, seconds)
