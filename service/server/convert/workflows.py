"""Dependencies between jobs, and arrays of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.texts import HIDDEN_NAME, SeesTenant
from tessera.formulation.job.arrays import MAX_INDEX, ArrayMember, ArrayRange, ArrayRecord
from tessera.formulation.job.dependencies import (
    MAX_DEPENDENCIES,
    Condition,
    Dependency,
    DependencyRecord,
)
from tessera.formulation.job.lifecycle import JobEvent
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.v1 import jobs_pb2 as pb

_CONDITIONS: Final = {
    pb.Dependency.CONDITION_UNSPECIFIED: Condition.SUCCEEDED,
    pb.Dependency.SUCCEEDED: Condition.SUCCEEDED,
    pb.Dependency.ENDED: Condition.ENDED,
    pb.Dependency.FAILED: Condition.FAILED,
}
_CONDITION_NUMBERS: Final = {
    condition: pb.Dependency.Condition.Value(condition.name) for condition in Condition
}
_EVENTS: Final = {
    pb.ChangeArrayRequest.CANCEL: JobEvent.CANCEL,
    pb.ChangeArrayRequest.HOLD: JobEvent.HOLD,
    pb.ChangeArrayRequest.RELEASE: JobEvent.RELEASE,
}


def to_dependencies(
    field: str, cluster: str, messages: Sequence[pb.Dependency]
) -> tuple[Dependency, ...]:
    """Return the dependencies of a job, which are on jobs of ``cluster``. Raises InvalidInput."""
    if len(messages) > MAX_DEPENDENCIES:
        raise InvalidInput(
            field,
            f"must name at most {MAX_DEPENDENCIES} jobs; it names {len(messages)}. Submit them as an"
            " array, and name that",
        )
    found = []
    for i, message in enumerate(messages):
        place = f"{field}[{i}]"
        owner, job = names.parse_job(f"{place}.job", message.job)
        if owner != cluster:
            raise InvalidInput(f"{place}.job", f"must be a job of clusters/{cluster}")
        if message.condition not in _CONDITIONS:
            raise InvalidInput(f"{place}.condition", "must be SUCCEEDED, ENDED or FAILED")
        found.append(Dependency(job=job, condition=_CONDITIONS[message.condition]))
    fields.require_distinct((f"{field}[{i}].job", d.job) for i, d in enumerate(found))
    return tuple(found)


def of_dependency(cluster: str, record: DependencyRecord, sees_tenant: SeesTenant) -> pb.Dependency:
    """Return the message of a stored dependency, for a caller who ``sees_tenant`` some tenants."""
    return pb.Dependency(
        job=names.job_name(cluster, record.job) if sees_tenant(record.tenant) else HIDDEN_NAME,
        condition=_CONDITION_NUMBERS[record.condition],
        met=record.met,
        state=record.state,
    )


def to_array_range(field: str, message: pb.ArrayIndices) -> ArrayRange:
    """Return the indices of an array, which are not expanded yet. Raises InvalidInput."""
    try:
        return ArrayRange(
            first=fields.require_whole("first", message.first, 0, MAX_INDEX),
            last=fields.require_whole("last", message.last, 0, MAX_INDEX),
            step=message.step or 1,
            max_running=message.max_running,
        )
    except InvalidInput as wrong:
        raise InvalidInput(f"{field}.{wrong.field}", wrong.problem) from wrong


def of_array_member(cluster: str, member: ArrayMember) -> pb.ArrayMember:
    """Return the message of a job's place in its array."""
    return pb.ArrayMember(
        array=names.array_name(cluster, member.array),
        index=member.index,
        size=member.size,
        max_running=member.max_running,
    )


def of_array(record: ArrayRecord) -> pb.JobArray:
    """Return the message of a stored array."""
    return pb.JobArray(
        name=names.array_name(record.cluster, record.name),
        tenant=record.tenant,
        size=record.size,
        max_running=record.max_running,
        states={state.name: count for state, count in record.states.items()},
    )


def to_event(field: str, number: pb.ChangeArrayRequest.Change.ValueType) -> JobEvent:
    """Return the event that happens to each job of an array. Raises InvalidInput."""
    if number not in _EVENTS:
        raise InvalidInput(field, "must be CANCEL, HOLD or RELEASE")
    return _EVENTS[number]
