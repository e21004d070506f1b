"""Reports of what runs on an agent's nodes: progress, ends, failures and freed GPUs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from tessera.db.agents import require_agent
from tessera.db.documents import dump_json
from tessera.db.turn import JobChange, Turn, notify_attention
from tessera.formulation.lifecycle import ACTIVE, JobEvent, JobState, is_allowed
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.runtimes import is_training
from tessera.formulation.values import EstimateSource

MAX_ERROR_CHARS = 4000

MIN_ITER_TIME_S, MAX_ITER_TIME_S = 1e-6, 1e7
"""Range of iteration times in seconds. Values outside it are not measurements."""

MIN_PERIOD_S, MAX_PERIOD_S = 1e-3, 3600.0
MAX_SENT_BYTES = 1e15
"""Ranges of a traffic measurement: the period of an iteration in seconds, and the bytes sent in it.
Values outside are not measurements.
"""

_ON_NODES = sa.text("""
SELECT l.job_id, l.generation AS of_generation, l.node_id, n.name AS node,
    max(l.release_revision) AS release_revision,
    j.name, j.state, j.generation, j.leader_id, j.retries, j.max_retries, j.iterations,
    j.iterations_done, max(t.generation) AS traffic_of, j.runtime
FROM nodes n JOIN allocations l ON l.node_id = n.id JOIN jobs j ON j.id = l.job_id
LEFT JOIN measured_traffic t ON t.job_id = l.job_id AND t.node_id = l.node_id
WHERE n.agent_id = :agent
GROUP BY l.job_id, l.generation, l.node_id, n.name, l.hold, j.id
""")

_PROGRESS = sa.text("""
UPDATE jobs j SET iterations_done = greatest(j.iterations_done, least(c.done, j.iterations))
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, generation bigint, done float8)
WHERE j.id = c.id AND j.generation = c.generation
    AND j.state NOT IN ('succeeded', 'failed', 'cancelled', 'rejected')
""")

_LOCK_JOBS = sa.text("SELECT id FROM jobs WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE")

_FREE = sa.text("""
DELETE FROM allocations l USING json_to_recordset(CAST(:rows AS json)) AS
    c(job bigint, generation bigint, node bigint)
WHERE l.hold = 'releasing' AND l.job_id = c.job AND l.generation = c.generation
    AND l.node_id = c.node
""")


WARM_UP_REPORTS = 2
"""Number of first reports of a generation that are ignored.

Meanwhile caches fill, and kernels are compiled and chosen.
"""

REPORTS_PER_MEASUREMENT = 5
"""Number of reports whose median is the measurement. Later ones are ignored."""

# A row with any replayed report is replayed: source 3 is above 0, which is measured.
_MEASURE = sa.text("""
INSERT INTO measurements AS m (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, job_id,
    generation, samples, source)
SELECT j.workload_id, j.cell_type_id, j.cell_gpus, l.nodes, j.cell_degree, j.cell_plan_id, j.id,
    j.generation, ARRAY[c.iter_time_s], c.source
FROM json_to_recordset(CAST(:rows AS json)) AS
    c(id bigint, generation bigint, iter_time_s float8, source bigint)
JOIN jobs j ON j.id = c.id AND j.generation = c.generation
CROSS JOIN LATERAL (SELECT count(DISTINCT a.node_id) AS nodes FROM allocations a
    WHERE a.job_id = j.id AND a.generation = j.generation AND a.hold = 'held') AS l
LEFT JOIN measurements k ON k.job_id = j.id AND k.generation = j.generation
WHERE j.cell_gpus IS NOT NULL AND l.nodes > 0
    AND k.iter_time_s IS NULL
ORDER BY j.id
ON CONFLICT (job_id, generation) DO UPDATE SET
    skipped = least(m.skipped + 1, :warm_up),
    samples = CASE WHEN m.skipped < :warm_up THEN excluded.samples
        ELSE m.samples || excluded.samples END,
    changed_at = now(), source = greatest(m.source, excluded.source),
    iter_time_s = CASE WHEN m.skipped = :warm_up AND cardinality(m.samples) >= :enough - 1 THEN (
        SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY x)
        FROM unnest(m.samples || excluded.samples) AS x) END
""")


_TRAFFIC = sa.text("""
INSERT INTO measured_traffic AS m (job_id, node_id, generation, period_s, sent_bytes, unhindered)
SELECT c.job, c.node, c.generation, c.period_s, c.sent_bytes,
    s.level IS NOT NULL AND NOT EXISTS (
        SELECT FROM jsonb_array_elements_text(s.document->'meets') AS met(name)
        JOIN jobs o ON o.cluster_id = j.cluster_id AND o.name = met.name
        JOIN standings x ON x.job_id = o.id WHERE x.level >= s.level)
FROM json_to_recordset(CAST(:rows AS json)) AS
    c(job bigint, node bigint, generation bigint, period_s float8, sent_bytes float8)
JOIN jobs j ON j.id = c.job AND j.generation = c.generation
LEFT JOIN standings s ON s.job_id = j.id AND s.generation = j.generation
ORDER BY c.job, c.node
ON CONFLICT (job_id, node_id) DO UPDATE SET generation = excluded.generation,
    period_s = excluded.period_s, sent_bytes = excluded.sent_bytes,
    unhindered = excluded.unhindered
    WHERE m.generation < excluded.generation
""")


@dataclass(slots=True)
class ReportDifferences:
    """The differences between a report and the stored state."""

    progress: list[dict[str, object]] = field(default_factory=list)
    reported: list[dict[str, object]] = field(default_factory=list)
    traffic: list[dict[str, object]] = field(default_factory=list)
    changes: list[JobChange] = field(default_factory=list)
    freed: list[dict[str, object]] = field(default_factory=list)


def record_observation(
    connection: sa.Connection,
    cluster: str,
    agent: str,
    incarnation: str,
    gangs: Sequence[ObservedGang],
    revision: int,
) -> bool:
    """Record a report; return whether the desired state changed.

    See ``tessera.service.ports.Store``. A report with only progress takes no turn: it neither waits
    nor makes others wait. The same holds for measured traffic, which changes no state. It wakes the
    network planner.
    """
    me = require_agent(connection, cluster, agent, incarnation)
    findings = compare_report(
        connection.execute(_ON_NODES, {"agent": me.id}).all(), gangs, revision
    )
    if not (findings.changes or findings.freed):
        _advance_progress(connection, findings)
        _keep_traffic(connection, cluster, findings)
        return False
    # Take the turn and compare again, because other transactions may have had theirs.
    turn = Turn.take(connection, cluster)
    me = require_agent(connection, cluster, agent, incarnation)
    findings = compare_report(
        connection.execute(_ON_NODES, {"agent": me.id}).all(), gangs, revision
    )
    _advance_progress(connection, findings)
    _keep_traffic(connection, cluster, findings)
    turn.apply(findings.changes)
    if findings.freed:
        connection.execute(_FREE, {"rows": dump_json(findings.freed)})
    return turn.end()


def _advance_progress(connection: sa.Connection, found: ReportDifferences) -> None:
    if found.progress:
        connection.execute(_LOCK_JOBS, {"ids": [row["id"] for row in found.progress]})
        connection.execute(_PROGRESS, {"rows": dump_json(found.progress)})
    if found.reported:
        values = {
            "rows": dump_json(found.reported),
            "warm_up": WARM_UP_REPORTS,
            "enough": REPORTS_PER_MEASUREMENT,
        }
        connection.execute(_MEASURE, values)


def _keep_traffic(connection: sa.Connection, cluster: str, found: ReportDifferences) -> None:
    """Store the first measured traffic of an allocation on a node, and wake the network planner."""
    if found.traffic and connection.execute(_TRAFFIC, {"rows": dump_json(found.traffic)}).rowcount:
        notify_attention(connection, cluster)


def compare_report(
    rows: Sequence[sa.Row[tuple[object, ...]]], gangs: Sequence[ObservedGang], revision: int
) -> ReportDifferences:
    """Compare a report with the rows of ``_ON_NODES``.

    A gang has started, advanced or succeeded when its leader says so. It has failed when any member
    says so. Only the job's current generation counts.
    """
    present = {(gang.job, gang.generation, gang.node): gang for gang in gangs}
    findings, members = ReportDifferences(), defaultdict(list)
    for row in rows:
        gang = present.get((row.name, row.of_generation, row.node))
        if gang is None:
            # The agent knew of the release when it reported, and the gang is gone.
            if row.release_revision is not None and revision >= row.release_revision:
                findings.freed.append(
                    {"job": row.job_id, "generation": row.of_generation, "node": row.node_id}
                )
        elif row.of_generation == row.generation:
            members[row.job_id].append((row, gang))
            if row.traffic_of != row.generation and _means_something(gang):
                findings.traffic.append(
                    {
                        "job": row.job_id,
                        "node": row.node_id,
                        "generation": row.generation,
                        "period_s": gang.period_s,
                        "sent_bytes": gang.sent_bytes,
                    }
                )
    # Derive each job's change from its leader and from any member that failed.
    for job in sorted(members):
        leading = [gang for row, gang in members[job] if row.node_id == row.leader_id]
        row, leader = members[job][0][0], leading[0] if leading else None
        failed = next((gang for _, gang in members[job] if gang.phase == "failed"), None)
        change = _change(row, leader, failed)
        if change is not None:
            findings.changes.append(change)
        if leader is not None and _advances(row, leader):
            done = {"id": job, "generation": row.generation, "done": leader.iterations_done}
            findings.progress.append(done)
            if (
                leader.phase == "running"
                and MIN_ITER_TIME_S <= leader.iter_time_s <= MAX_ITER_TIME_S
            ):
                trains = is_training(leader.runtime, row.runtime)
                source = EstimateSource.MEASURED if trains else EstimateSource.REPLAYED
                time = {"iter_time_s": leader.iter_time_s, "source": int(source)}
                findings.reported.append(done | time)
    return findings


def _means_something(gang: ObservedGang) -> bool:
    return MIN_PERIOD_S <= gang.period_s <= MAX_PERIOD_S and 0 < gang.sent_bytes <= MAX_SENT_BYTES


def _advances(row: sa.Row[tuple[object, ...]], leader: ObservedGang) -> bool:
    done = leader.iterations_done
    return math.isfinite(done) and min(done, row.iterations) > row.iterations_done


def _change(
    row: sa.Row[tuple[object, ...]], leader: ObservedGang | None, failed: ObservedGang | None
) -> JobChange | None:
    """Return the change of a job, or None.

    Success has precedence over failure, and failure over running.
    """
    state = JobState(row.state)
    if leader is not None and leader.phase == "succeeded" and is_allowed(state, JobEvent.FINISH):
        return JobChange(job=row.job_id, state=state, event=JobEvent.FINISH)
    if failed is not None and state in ACTIVE:
        event = JobEvent.CRASH if row.retries + 1 <= row.max_retries else JobEvent.FAIL
        error = failed.error[:MAX_ERROR_CHARS]
        detail = f"on {failed.node}: {error}"
        return JobChange(job=row.job_id, state=state, event=event, error=error, detail=detail)
    if leader is not None and leader.phase == "running" and state is JobState.STARTING:
        return JobChange(job=row.job_id, state=state, event=JobEvent.RAN)
    return None
