"""Reports of what runs on an agent's nodes: progress, ends, failures and freed GPUs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.agents.agents import require_agent
from tessera.db.base.documents import dump_json
from tessera.db.base.training import keep_training, training_row
from tessera.db.base.turn import JobChange, Turn, notify_attention
from tessera.db.clusters.failed_starts import (
    EARLY_REASONS,
    REASONS,
    note_failed_starts,
    note_starts,
)
from tessera.db.estimates.derived_estimates import notify_estimators
from tessera.db.estimates.failed_plans import exclude_plans, keep_failures
from tessera.db.estimates.tunings import (
    MAX_ITER_TIME_S,
    MIN_ITER_TIME_S,
    find_tuned_plans,
    keep_tuned_plans,
)
from tessera.db.schema.job_columns import UNTIL_EXIT
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.job.exit_reasons import ExitReason, rank_of
from tessera.formulation.job.lifecycle import ACTIVE, JobEvent, JobState, is_allowed
from tessera.formulation.job.runtimes import is_training
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.round.promises.backoff import RAN_WELL_S

MAX_ERROR_CHARS = 4000

MAX_ITERATIONS: Final = 1e12
"""The largest number of iterations that a job whose program decides its end can have done."""

FAILURES: Final = frozenset({JobEvent.CRASH, JobEvent.FAIL})

MIN_PERIOD_S, MAX_PERIOD_S = 1e-3, 3600.0
MAX_SENT_BYTES = 1e15
"""Ranges of a traffic measurement: the period of an iteration in seconds, and the bytes sent in it.
Values outside are not measurements.
"""

_ON_NODES = sa.text(f"""
SELECT l.job_id, l.generation AS of_generation, l.node_id, n.name AS node,
    max(l.release_revision) AS release_revision,
    j.name, j.state, j.generation, j.leader_id, j.retries, j.max_retries, j.iterations,
    j.iterations_done, max(t.generation) AS traffic_of, j.runtime, j.cell_gpus,
    {UNTIL_EXIT} AS until_exit,
    coalesce(clock_timestamp() - j.ran_at >= make_interval(secs => {RAN_WELL_S}), false) OR EXISTS (
        SELECT FROM measurements m WHERE m.job_id = j.id AND m.generation = j.generation
    ) AS has_trained,
    EXISTS (SELECT FROM failed_starts f WHERE f.job_id = j.id) OR EXISTS (
        SELECT FROM allocations a JOIN nodes m ON m.id = a.node_id
        WHERE a.job_id = j.id AND a.hold <> 'reserved' AND m.failed_starts > 0) AS has_failed,
    EXISTS (SELECT FROM allocations w WHERE w.job_id = j.id AND w.hold = 'reserved') AS waits
FROM nodes n JOIN allocations l ON l.node_id = n.id JOIN jobs j ON j.id = l.job_id
LEFT JOIN measured_traffic t ON t.job_id = l.job_id AND t.node_id = l.node_id
WHERE n.agent_id = :agent
GROUP BY l.job_id, l.generation, l.node_id, n.name, l.hold, j.id
""")  # noqa: S608 - a constant of db

# A job that trains goes back to its checkpoint. One that is replayed never does.
_PROGRESS = sa.text("""
UPDATE jobs j SET progress_at = clock_timestamp(), iterations_done = greatest(
    CASE WHEN c.resumed THEN 0 ELSE j.iterations_done END, c.done)
FROM json_to_recordset(CAST(:rows AS json)) AS
    c(id bigint, generation bigint, done float8, resumed boolean)
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
        SELECT FROM jsonb_array_elements_text(s.document->'contending_jobs') AS met(name)
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

    progress: list[dict[str, Any]] = field(default_factory=list)
    reported: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    traffic: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    exhausted: list[dict[str, Any]] = field(default_factory=list)  # ran out of memory
    tuned: list[dict[str, Any]] = field(default_factory=list)  # plans that tunings found
    changes: list[JobChange] = field(default_factory=list)
    freed: list[dict[str, Any]] = field(default_factory=list)
    unstarted: list[dict[str, Any]] = field(default_factory=list)  # jobs that a node cannot start
    trainers: list[int] = field(default_factory=list)  # jobs that train after failed starts


def record_observation(
    connection: sa.Connection,
    cluster: str,
    agent: str,
    incarnation: str,
    gangs: Sequence[ObservedGang],
    revision: int,
) -> bool:
    """Record a report; return whether the desired state changed.

    A releasing GPU is free if its job and generation are absent from ``gangs`` and ``revision`` is
    not older than its release. Reports of an older generation change nothing. Progress of a job
    that trains may fall, because it went on from a checkpoint. A report with only progress takes no
    turn: it neither waits nor makes others wait. The same holds for measured traffic, which changes
    no state. It wakes the network planner.

    Raises:
        NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
    """
    me = require_agent(connection, cluster, agent, incarnation)
    findings = _compare(connection, me, gangs, revision)
    if not (findings.changes or findings.freed or findings.tuned or findings.trainers):
        _keep_facts(connection, cluster, findings)
        return False
    # Take the turn and compare again, because other transactions may have had theirs.
    turn = Turn.take(connection, cluster)
    me = require_agent(connection, cluster, agent, incarnation)
    findings = _compare(connection, me, gangs, revision)
    # All jobs in one order, before the first one changes.
    rows = [*findings.progress, *findings.tuned]
    turn.lock([row["id"] for row in rows] + [c.job for c in findings.changes])
    if findings.tuned:  # first, because times and failures are those of the tuned plans
        keep_tuned_plans(connection, turn.cluster, findings.tuned)
        turn.change_plans(findings.tuned)
        notify_estimators(connection, cluster)
    keep_failures(connection, findings.failures)  # before the jobs lose their Cells
    _keep_facts(connection, cluster, findings)
    turn.needs_round |= note_starts(connection, findings.trainers)
    turn.needs_round |= note_failed_starts(connection, findings.unstarted)
    turn.apply(findings.changes)
    if findings.freed:
        connection.execute(_FREE, {"rows": dump_json(findings.freed)})
    return turn.end()


def _compare(
    connection: sa.Connection,
    agent: sa.Row[tuple[int, int, int, str, list[str]]],
    gangs: Sequence[ObservedGang],
    revision: int,
) -> ReportDifferences:
    rows = connection.execute(_ON_NODES, {"agent": agent.id}).all()
    findings = compare_report(rows, gangs, revision)
    findings.tuned = find_tuned_plans(connection, agent.cluster_id, agent.id, gangs)
    return findings


def _keep_facts(connection: sa.Connection, cluster: str, found: ReportDifferences) -> None:
    """Store everything that changes no state."""
    _advance_progress(connection, found)
    keep_training(connection, found.training)
    _keep_traffic(connection, cluster, found)
    exclude_plans(connection, cluster, found.exhausted)


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

    A gang has started or advanced when its leader says so. It has succeeded when its leader says so,
    and has reported all iterations or decides itself. It has failed when any member says so. Only
    the job's current generation counts, once it has all of its GPUs.
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
        elif row.of_generation == row.generation and not row.waits:
            members[row.job_id].append((row, _judge_end(row, gang)))
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
    for job in sorted(members):
        _compare_job(findings, members[job])
    return findings


def _judge_end(row: sa.Row[tuple[object, ...]], gang: ObservedGang) -> ObservedGang:
    """Return the report on a member, as a failure if its leader claims a success without a proof."""
    is_claim = row.node_id == row.leader_id and gang.phase == "succeeded"
    if not is_claim or row.until_exit or gang.iterations_done >= row.iterations:
        return gang
    error = (
        f"its agent reports success after {max(gang.iterations_done, 0):,.0f} of {row.iterations:,}"
        " iterations; if the program decides when it is done, submit the job with --until-exit;"
        f" otherwise upgrade tessera on {row.node}"
    )
    return replace(gang, phase="failed", exit_reason=ExitReason.ENDED_EARLY, error=error)


def _most_iterations(row: sa.Row[tuple[object, ...]]) -> float:
    """Return the largest number of iterations that a job can have done."""
    return MAX_ITERATIONS if row.until_exit else row.iterations


def _compare_job(
    findings: ReportDifferences, members: Sequence[tuple[sa.Row[tuple[object, ...]], ObservedGang]]
) -> None:
    """Add the differences of one job, from its leader and from any member that failed."""
    row, gangs = members[0][0], [gang for _, gang in members]
    leader = next((gang for of, gang in members if of.node_id == row.leader_id), None)
    failed = min(
        (gang for gang in gangs if gang.phase == "failed"),
        key=lambda gang: rank_of(gang.exit_reason),
        default=None,
    )
    change = _change(row, leader, failed)
    if change is not None:
        findings.changes.append(change)
    if failed is not None and (change is None or change.event in FAILURES):
        _note_failure(findings, row, failed, is_new=change is not None)
    has_trained = _has_trained(row, leader, change)
    if failed is not None and change is not None and change.event in FAILURES:
        is_early = not has_trained and _trains(row, failed) and failed.exit_reason in EARLY_REASONS
        if is_early or failed.exit_reason in REASONS:
            findings.unstarted += _failed_start(members, failed)
    elif has_trained and row.has_failed:
        findings.trainers.append(row.job_id)
    if training := [gang for gang in gangs if _trains(row, gang)]:
        first = leader if leader in training else None
        if (facts := training_row(_key(row), _most_iterations(row), first, training)) is not None:
            findings.training.append(facts)
    if leader is not None:
        _note_progress(findings, row, leader)


def _has_trained(
    row: sa.Row[tuple[object, ...]], leader: ObservedGang | None, change: JobChange | None
) -> bool:
    """Return whether the job's program has trained in this start, or has run for long.

    A job that trains nothing has once it runs.
    """
    if change is not None and change.event is JobEvent.FINISH:
        return True
    if leader is None or row.has_trained:
        return bool(row.has_trained)
    is_running = leader.phase == "running" and not _trains(row, leader)
    return is_running or leader.restart_times is not None


def _note_failure(
    findings: ReportDifferences,
    row: sa.Row[tuple[object, ...]],
    failed: ObservedGang,
    *,
    is_new: bool,
) -> None:
    """Add why a member failed. If it is not ``is_new``, the job has failed before this report.

    Its gang has members on nodes of other agents. They may report only now that memory was too
    small, after those that ended because of that.
    """
    trains, reason = _trains(row, failed), failed.exit_reason
    if is_new and (trains or reason is not None or failed.remark):
        facts = {"reason": reason or "", "remark": failed.remark}
        findings.failures.append(_key(row) | facts)
    if trains and reason is ExitReason.OUT_OF_MEMORY:
        text = f"ran out of memory on {failed.node}: start {row.generation} of job {row.name}"
        findings.exhausted.append(_key(row) | {"provenance": text})


def _failed_start(
    members: Sequence[tuple[sa.Row[tuple[object, ...]], ObservedGang]], failed: ObservedGang
) -> list[dict[str, Any]]:
    """Return the row of a start that failed on a node."""
    return [
        {
            "id": row.job_id,
            "node": row.node_id,
            "gpus": row.cell_gpus,
            "unfit": failed.exit_reason is ExitReason.NODE_UNFIT,
            "error": failed.error,
        }
        for row, gang in members
        if gang is failed
    ]


def _note_progress(
    findings: ReportDifferences, row: sa.Row[tuple[object, ...]], leader: ObservedGang
) -> None:
    """Add a job's progress, and the time of an iteration if the job has done more of them.

    A job that trains may have done fewer than before, because it went on from a checkpoint. It
    then does some iterations again.
    """
    if not math.isfinite(leader.iterations_done):
        return
    done = min(leader.iterations_done, _most_iterations(row))
    resumed, rises = leader.resumed_iterations, done > row.iterations_done
    if done == row.iterations_done:
        return
    went_on = resumed is not None and resumed <= done and _trains(row, leader)
    if not (rises or went_on):
        return
    findings.progress.append(_key(row) | {"done": done, "resumed": went_on})
    is_time = MIN_ITER_TIME_S <= leader.iter_time_s <= MAX_ITER_TIME_S
    if rises and leader.phase == "running" and is_time:
        source = EstimateSource.MEASURED if _trains(row, leader) else EstimateSource.REPLAYED
        time = {"iter_time_s": leader.iter_time_s, "source": int(source)}
        findings.reported.append(_key(row) | time)


def _key(row: sa.Row[tuple[object, ...]]) -> dict[str, Any]:
    return {"id": row.job_id, "generation": row.generation}


def _trains(row: sa.Row[tuple[object, ...]], gang: ObservedGang) -> bool:
    """Return whether a member is of a runtime that trains. Nothing else that it reports is measured."""
    return is_training(gang.runtime, row.runtime)


def _means_something(gang: ObservedGang) -> bool:
    return MIN_PERIOD_S <= gang.period_s <= MAX_PERIOD_S and 0 < gang.sent_bytes <= MAX_SENT_BYTES


def _change(
    row: sa.Row[tuple[object, ...]], leader: ObservedGang | None, failed: ObservedGang | None
) -> JobChange | None:
    """Return the change of a job, or None.

    Success has precedence over failure, and failure over running. A reason that is final
    is not tried again.
    """
    state = JobState(row.state)
    if leader is not None and leader.phase == "succeeded" and is_allowed(state, JobEvent.FINISH):
        return JobChange(job=row.job_id, state=state, event=JobEvent.FINISH)
    if failed is not None and state in ACTIVE:
        reason, error = failed.exit_reason, failed.error[:MAX_ERROR_CHARS]
        is_free = reason is ExitReason.NODE_UNFIT  # the job is tried elsewhere
        is_last = row.retries + 1 > row.max_retries and not is_free
        is_final = (reason is not None and reason.is_final) or is_last
        event = JobEvent.FAIL if is_final else JobEvent.CRASH
        words = [reason.sentence] if reason is not None else []
        detail = f"on {failed.node}: {': '.join([*words, error] if error else words)}"
        error = error or "".join(words)
        return JobChange(
            job=row.job_id, state=state, event=event, error=error, detail=detail, is_free=is_free
        )
    if leader is not None and leader.phase == "running" and state is JobState.STARTING:
        return JobChange(job=row.job_id, state=state, event=JobEvent.RAN)
    return None
