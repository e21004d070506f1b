"""The end of jobs that have held GPUs for their longest run time."""

from __future__ import annotations

import sqlalchemy as sa

from tessera.db.base.rows import RUN_S
from tessera.db.base.turn import JobChange, Turn
from tessera.db.schema.tables.columns import one_of
from tessera.formulation.job.lifecycle import TIMES_OUT, JobEvent, JobState
from tessera.formulation.state.snapshot import Snapshot

_OVERLONG = sa.text(f"""
SELECT j.id, j.name, j.state, j.longest_run_s FROM jobs j
WHERE j.cluster_id = :cluster AND j.state IN {one_of(sorted(TIMES_OUT))}
    AND j.longest_run_s <= {RUN_S} ORDER BY j.id
""")  # noqa: S608 - constants only


def has_overlong_jobs(snapshot: Snapshot) -> bool:
    """Return whether ``end_overlong_jobs`` has something to do."""
    jobs = snapshot.jobs
    return bool(((jobs.run_left_s <= 0) & jobs.among(TIMES_OUT)).any())


def end_overlong_jobs(connection: sa.Connection, cluster: str) -> list[str]:
    """Stop the jobs that have run for their longest run time, which then fail; return their names."""
    turn = Turn.take(connection, cluster)
    rows = connection.execute(_OVERLONG, {"cluster": turn.cluster}).all()
    changes = []
    for row in rows:
        text = f"ran for its longest run time of {row.longest_run_s:,.0f} s"
        state, event = JobState(row.state), JobEvent.TIME_OUT
        changes.append(JobChange(job=row.id, state=state, event=event, detail=text, error=text))
    turn.apply(changes)
    turn.end()
    return [row.name for row in rows]
