"""The results of a round for jobs, in addition to GPUs: deadlines, certificates, starts, rejections."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from tessera.db.base.documents import (
    dump_json,
    planned_start_plain,
    reason_plain,
    schedule_to_plain,
)
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.jobs import PlannedStartRecord, SegmentRecord
from tessera.formulation.state.last_round import (
    PlannedNodes,
    PlannedStarts,
    ScheduleSegments,
    StartPlan,
)
from tessera.formulation.state.snapshot import Snapshot

_RECORD = sa.text("""
UPDATE jobs j SET admitted = c.admitted, opportunistic = c.opportunistic,
    schedule = c.schedule, rejection = c.rejection
FROM json_to_recordset(CAST(:rows AS json)) AS c(
    id bigint, admitted boolean, opportunistic boolean, schedule jsonb, rejection jsonb
)
WHERE j.id = c.id
""")

_RECORD_STARTS = sa.text("""
UPDATE jobs j SET start_by_s = c.start_by_s, planned_start = c.planned_start
FROM json_to_recordset(CAST(:rows AS json)) AS c(
    id bigint, start_by_s float8, planned_start jsonb
)
WHERE j.id = c.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The result of a round for a job, given by its key.

    ``rejected`` says why the job can never run. It is None if it can. ``lapsed`` says whether the round
    gives up a deadline that was promised.
    """

    job: int
    admitted: bool
    opportunistic: bool
    schedule: Sequence[SegmentRecord]
    round: int
    rejected: Reason | None = None
    lapsed: bool = False


def record_promises(connection: sa.Connection, promises: Sequence[Promise]) -> None:
    """Write the promises in one statement. This does not change the versions of jobs."""
    rows = [
        {
            "id": p.job,
            "admitted": p.admitted,
            "opportunistic": p.opportunistic,
            "schedule": schedule_to_plain(p.schedule),
            "rejection": {"round": p.round, "reason": reason_plain(p.rejected)}
            if p.rejected is not None
            else None,
        }
        for p in promises
    ]
    if rows:
        connection.execute(_RECORD, {"rows": dump_json(rows)})


def segments_by_job(
    snapshot: Snapshot, segments: ScheduleSegments
) -> dict[int, list[SegmentRecord]]:
    """Return the segments of each job (its index) that has any, by names, in their order."""
    found: dict[int, list[SegmentRecord]] = defaultdict(list)
    spans = segments.job.tolist(), segments.start_s.tolist(), segments.end_s.tolist()
    for job, start_s, end_s, cell in zip(*spans, segments.keys(), strict=True):
        found[job].append(SegmentRecord(start_s=start_s, end_s=end_s, cell=snapshot.cell(cell)))
    return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJobStart:
    """The planned and the promised start of a job that waits, as a round has decided them.

    ``job`` is its index in the snapshot, or its key where it is stored. ``start_by_s`` is inf if no
    start is promised, and ``planned_start`` is None if none is reserved.
    """

    job: int
    start_by_s: float
    planned_start: PlannedStartRecord | None = None


def changed_starts(snapshot: Snapshot, plan: StartPlan) -> list[WaitingJobStart]:
    """Return the starts of ``plan`` that ``snapshot`` does not have, in order of jobs."""
    old = _planned_by_job(snapshot, snapshot.planned_starts, snapshot.planned_nodes)
    new = _planned_by_job(snapshot, plan.starts, plan.nodes)
    jobs = {job for job in old.keys() | new.keys() if old.get(job) != new.get(job)}
    jobs.update(np.flatnonzero(snapshot.jobs.start_by_s != plan.start_by_s).tolist())
    return [
        WaitingJobStart(job=job, start_by_s=float(plan.start_by_s[job]), planned_start=new.get(job))
        for job in sorted(jobs)
    ]


def record_starts(connection: sa.Connection, starts: Sequence[WaitingJobStart]) -> None:
    """Write the starts in one statement. This does not change the versions of jobs."""
    rows = [
        {
            "id": start.job,
            "start_by_s": start.start_by_s if math.isfinite(start.start_by_s) else None,
            "planned_start": planned_start_plain(start.planned_start),
        }
        for start in starts
    ]
    if rows:
        connection.execute(_RECORD_STARTS, {"rows": dump_json(rows)})


def _planned_by_job(
    snapshot: Snapshot, starts: PlannedStarts, nodes: PlannedNodes
) -> dict[int, PlannedStartRecord]:
    """Return the planned start of each job (its index) that has one, by names."""
    names, shares = snapshot.nodes.name, nodes.by_start()
    spans = starts.job.tolist(), starts.start_s.tolist(), starts.end_s.tolist(), starts.keys()
    return {
        job: PlannedStartRecord(
            start_s=start_s,
            end_s=end_s,
            cell=snapshot.cell(cell),
            nodes=tuple(sorted((names[node], gpus) for node, gpus in shares[i])),
        )
        for i, (job, start_s, end_s, cell) in enumerate(zip(*spans, strict=True))
    }
