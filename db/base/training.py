"""Reports of jobs' programs on their training: losses, memory, checkpoints and restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.jobs import RestartTimes, TrainingRecord

STARTS_PER_PRICE: Final = 5
"""Number of a job's last complete starts whose median duration is the price of its restart."""

# The last starts, with that of this report.
_STARTS = f"""(t.restarts_s[greatest(cardinality(t.restarts_s) - {STARTS_PER_PRICE - 2}, 1):]
        || excluded.restarts_s)"""

# The row changes only where the report has something new.
_KEEP = sa.text(f"""
INSERT INTO trainings AS t (job_id, generation, loss, memory_bytes, checkpoint_iterations,
    checkpoint_at, start_times, restarts_s, restart_s, restart_generation, remark)
SELECT j.id, c.generation, c.loss, coalesce(c.memory_bytes, 0), c.checkpoint_iterations,
    clock_timestamp() - make_interval(secs => c.checkpoint_age_s), c.start_times,
    array_remove(ARRAY[c.restart_s], NULL), c.restart_s,
    CASE WHEN c.restart_s IS NULL THEN 0 ELSE c.generation END, coalesce(c.remark, '')
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, generation bigint, loss float8,
    memory_bytes bigint, checkpoint_iterations float8, checkpoint_age_s float8, start_times jsonb,
    restart_s float8, remark text)
JOIN jobs j ON j.id = c.id AND j.generation = c.generation
ORDER BY j.id
ON CONFLICT (job_id) DO UPDATE SET
    generation = excluded.generation,
    loss = coalesce(excluded.loss, t.loss),
    memory_bytes = CASE WHEN t.generation = excluded.generation
        THEN greatest(t.memory_bytes, excluded.memory_bytes) ELSE excluded.memory_bytes END,
    checkpoint_at = CASE WHEN excluded.checkpoint_iterations IS NULL
            OR excluded.checkpoint_iterations IS NOT DISTINCT FROM t.checkpoint_iterations
        THEN t.checkpoint_at ELSE excluded.checkpoint_at END,
    checkpoint_iterations = coalesce(excluded.checkpoint_iterations, t.checkpoint_iterations),
    start_times = coalesce(excluded.start_times, t.start_times),
    restarts_s = CASE WHEN excluded.restart_generation > t.restart_generation
        THEN {_STARTS} ELSE t.restarts_s END,
    restart_s = CASE WHEN excluded.restart_generation > t.restart_generation
        THEN (SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY x) FROM unnest({_STARTS}) AS x)
        ELSE t.restart_s END,
    restart_generation = greatest(t.restart_generation, excluded.restart_generation),
    remark = coalesce(nullif(excluded.remark, ''), t.remark)
WHERE (t.generation, t.loss, t.memory_bytes, t.checkpoint_iterations, t.start_times,
        t.restart_generation, t.remark)
    IS DISTINCT FROM (excluded.generation, coalesce(excluded.loss, t.loss),
        greatest(t.memory_bytes, excluded.memory_bytes),
        coalesce(excluded.checkpoint_iterations, t.checkpoint_iterations),
        coalesce(excluded.start_times, t.start_times),
        greatest(t.restart_generation, excluded.restart_generation),
        coalesce(nullif(excluded.remark, ''), t.remark))
""")  # noqa: S608 - constants only

TRAINING_COLUMNS: Final = """tr.job_id AS training_job, tr.loss, tr.memory_bytes,
    tr.checkpoint_iterations, extract(epoch FROM tr.checkpoint_at)::float8 AS checkpoint_s,
    tr.start_times, tr.restart_s AS measured_restart_s, tr.exit_reason, tr.remark"""
"""The columns that ``training_record`` reads, of the table ``trainings`` (tr)."""


def training_row(
    job: Mapping[str, object],
    iterations: float,
    leader: ObservedGang | None,
    members: Sequence[ObservedGang],
) -> dict[str, object] | None:
    """Return what a report says of a job's training, or None if it says nothing.

    ``job`` is its key and its generation. ``members`` are those in the report, with the leader if
    it is one of them. Only the leader knows of the loss, of checkpoints and of the start.
    """
    facts: dict[str, object] = {}
    if memory_bytes := max(gang.memory_bytes for gang in members):
        facts["memory_bytes"] = memory_bytes
    if remarks := [gang.remark for gang in (leader, *members) if gang is not None and gang.remark]:
        facts["remark"] = remarks[0]
    if leader is not None:
        if leader.loss is not None:
            facts["loss"] = leader.loss
        saved, times = leader.checkpoint_iterations, leader.restart_times
        if saved is not None and saved <= iterations:
            facts |= {"checkpoint_iterations": saved, "checkpoint_age_s": leader.checkpoint_age_s}
        if times is not None and times.first_iteration_s > 0:
            facts |= {"start_times": asdict(times), "restart_s": times.total_s}
    return {**job, **facts} if facts else None


def keep_training(connection: sa.Connection, rows: Sequence[Mapping[str, object]]) -> None:
    """Store what programs reported: the rows of ``training_row``. One statement stores all."""
    if rows:
        connection.execute(_KEEP, {"rows": dump_json(rows)})


def training_record(row: sa.RowMapping) -> TrainingRecord | None:
    """Return the training in a row with ``TRAINING_COLUMNS``, or None if the job has none."""
    if row["training_job"] is None:
        return None
    times: dict[str, Any] | None = row["start_times"]
    return TrainingRecord(
        loss=row["loss"],
        memory_bytes=row["memory_bytes"],
        checkpoint_iterations=row["checkpoint_iterations"],
        checkpoint_s=row["checkpoint_s"],
        restart_times=None if times is None else RestartTimes(**times),
        restart_s=row["measured_restart_s"] or 0.0,
        exit_reason=ExitReason(row["exit_reason"]) if row["exit_reason"] else None,
        remark=row["remark"],
    )
