"""Changes of stored jobs that users request: new values of fields, and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.base.limits import require_few_open_jobs
from tessera.db.base.rows import jobs_named
from tessera.db.base.turn import JobChange, Turn, request_round
from tessera.db.jobs import arrays, pins
from tessera.db.schema.job_columns import UPDATABLE_COLUMNS
from tessera.formulation.base.errors import InvalidInput, NotAllowed, NotFound, StaleEtag
from tessera.formulation.job.arrays import ArrayRecord
from tessera.formulation.job.lifecycle import TERMINAL, JobEvent, JobState, is_allowed
from tessera.formulation.records.jobs import JobRecord, JobSpec

_JOB = sa.text("""
SELECT id, version, state FROM jobs WHERE cluster_id = :cluster AND name = :name
""")

_USER_EVENTS: Final = {
    JobEvent.CANCEL: "cancelled",
    JobEvent.HOLD: "held",
    JobEvent.RELEASE: "released",
}
"""The participles that error messages use for the events that users may request."""


def update_job(
    connection: sa.Connection,
    cluster: str,
    spec: JobSpec,
    fields: Sequence[str],
    version: int | None,
) -> JobRecord:
    """Change the named fields (of JobSpec) of a job.

    A change that asks for more withdraws a promised deadline.

    Raises:
        NotFound, StaleEtag, NotAllowed (ended), InvalidInput and LimitReached (as ``submit_jobs``).
    """
    turn, name = Turn.take(connection, cluster), spec.name
    job, state = _find_job(turn, name, version)
    if state in TERMINAL:
        raise NotAllowed(
            f"job {name} {_state_in_words(state)}; only jobs that have not ended can be changed"
        )
    if unknown := set(fields) - UPDATABLE_COLUMNS:
        allowed = ", ".join(sorted(UPDATABLE_COLUMNS))
        raise InvalidInput("fields", f"{min(unknown)} cannot be changed; these can: {allowed}")
    old = jobs_named(connection, turn.cluster, [name])[0].spec
    new = replace(old, **{field: getattr(spec, field) for field in fields})
    pins.require_change(connection, turn.cluster, new, fields)
    if fields:
        _store_fields(connection, job, old, new, fields)
    if set(fields) - {"labels"}:
        request_round(connection, turn.cluster)
    if new.tenant != old.tenant:
        require_few_open_jobs(connection, turn.name, [new.tenant])
    if "avoid_nodes" in fields:
        pins.put_avoids(connection, turn.cluster, [new])
    return jobs_named(connection, turn.cluster, [name])[0]


def _store_fields(
    connection: sa.Connection, job: int, old: JobSpec, new: JobSpec, fields: Sequence[str]
) -> None:
    """Store the fields of a job that are columns. Promises that it asks too much for are withdrawn."""
    values = {f: getattr(new, f) for f in fields if f != "avoid_nodes"}
    for document in {"labels", "command", "allowed_gpu_types"} & values.keys():
        values[document] = dump_json(values[document])
    if not pins.keeps_promise(old, new):
        values |= {"admitted": False, "schedule": "[]"}
    if not pins.keeps_start(old, new):
        values |= {"start_by_s": None, "planned_start": None}
    assignments = "".join(f"{field} = :{field}, " for field in values)  # names: UPDATABLE_COLUMNS
    update = f"UPDATE jobs SET {assignments}version = version + 1 WHERE id = :job"  # noqa: S608
    connection.execute(sa.text(update), values | {"job": job})


def apply_event(
    connection: sa.Connection,
    cluster: str,
    name: str,
    event: JobEvent,
    version: int | None = None,
    detail: str = "",
) -> JobRecord:
    """Apply a user's event (cancel, hold, release) to a job, with a ``detail`` for its history.

    Raises NotFound, StaleEtag, NotAllowed.
    """
    turn = Turn.take(connection, cluster)
    job, state = _find_job(turn, name, version)
    _require_allowed(name, state, event)
    turn.apply([JobChange(job=job, state=state, event=event, detail=detail)])
    turn.end()
    return jobs_named(turn.connection, turn.cluster, [name])[0]


def apply_event_to_array(
    connection: sa.Connection, cluster: str, name: str, event: JobEvent
) -> ArrayRecord:
    """Apply a user's event to all members of an array to which it may happen. Raises NotFound."""
    turn = Turn.take(connection, cluster)
    states = [state for state in JobState if is_allowed(state, event)]
    members = arrays.members_in(turn.connection, turn.cluster, name, states)
    turn.apply([JobChange(job=job, state=state, event=event) for job, state in members])
    turn.end()
    return arrays.get_array(turn.connection, turn.name, name)


def _find_job(turn: Turn, name: str, version: int | None) -> tuple[int, JobState]:
    """Return the key and the state of a job, which must be at ``version`` unless it is None."""
    row = turn.connection.execute(_JOB, {"cluster": turn.cluster, "name": name}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{turn.name}/jobs/{name}")
    if version is not None and version != row.version:
        raise StaleEtag(
            f"job {name} has changed since you read it (etag {version}, now {row.version});"
            " read it again and retry"
        )
    return row.id, JobState(row.state)


def _require_allowed(name: str, state: JobState, event: JobEvent) -> None:
    """Raise NotAllowed, with possible alternatives, if ``event`` is not allowed in ``state``."""
    if is_allowed(state, event):
        return
    others = [said for other, said in _USER_EVENTS.items() if is_allowed(state, other)]
    if others:
        instead = f"it can be {' or '.join(others)}"
    elif state in TERMINAL:
        instead = "submit it again under another name"
    else:
        instead = "wait until its GPUs are free"
    raise NotAllowed(
        f"job {name} {_state_in_words(state)}, so it cannot be {_USER_EVENTS[event]}; {instead}"
    )


def _state_in_words(state: JobState) -> str:
    """Return the words for a job's state, with a verb."""
    verbs = dict.fromkeys(TERMINAL, "has") | {JobState.CANCELLED: "was", JobState.REJECTED: "was"}
    return f"{verbs.get(state, 'is')} {state}"
