"""Jobs, their allocations and the reasons why they do not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from google.protobuf.duration_pb2 import Duration

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.secrets import holds_secret
from tessera.formulation.base.texts import SeesTenant, render
from tessera.formulation.base.values import PROFILING, RUN_LABEL, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, check_fits, read_execution_plan
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason
from tessera.formulation.job.runtimes import PROFILER
from tessera.formulation.job.stated_secrets import refuse_words
from tessera.formulation.job.techniques import Technique, read_techniques
from tessera.formulation.records.forecasts import Band, JobForecast
from tessera.formulation.records.jobs import (
    CHANGEABLE_FIELDS,
    AllocationRecord,
    JobEventRecord,
    JobRecord,
    JobSpec,
    PlannedStartRecord,
)
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.clusters import MAX_GPU_TYPES, to_node_id
from tessera.service.server.convert.estimates import (
    of_cell,
    of_plan,
    source_number,
    to_workload,
)
from tessera.service.server.convert.generic import (
    Reader,
    read_values,
    shared_fields,
    to_message,
    usual_readers,
    values_of,
)
from tessera.service.server.convert.launch import (
    MAX_SHOWN_CHARS,
    of_launch,
    require_runnable,
    to_launch,
)
from tessera.service.server.convert.workflows import of_array_member, of_dependency, to_dependencies
from tessera.v1 import jobs_pb2 as pb
from tessera.v1 import launch_pb2

MAX_LABELS: Final = 64
MAX_COMMAND_CHARS: Final = 65_536

CHANGEABLE: Final = {
    name: attribute
    for name, attribute in shared_fields(pb.Job, JobSpec).items()
    if attribute in CHANGEABLE_FIELDS
}
"""The fields of Job that may change after submission, with the fields of JobSpec."""

_STATE_NUMBER: Final = {state: pb.JobState.Value(state.name) for state in JobState}
EXIT_NUMBERS: Final = {r: launch_pb2.ExitReason.Value(f"EXIT_{r.name}") for r in ExitReason}
_STATE_OF: Final = {number: state for state, number in _STATE_NUMBER.items()}


PlanReader: TypeAlias = Callable[[str, str, Workload, int], ExecutionPlan]
"""A reader of the plan in a text, for a workload on a number of GPUs; the first argument is its field."""


def read_own_plan(field: str, text: str, workload: Workload, gpus: int) -> ExecutionPlan:
    """Return the plan of a text in Tessera's own format."""
    plan = read_execution_plan(field, text)
    check_fits(plan, field, workload, gpus)
    return plan


def to_job_spec(
    field: str,
    cluster: str,
    job_id: str,
    message: pb.Job,
    read_plan: PlanReader = read_own_plan,
) -> JobSpec:
    """Return the requested job. Its name and its output-only fields are ignored.

    The nodes that it avoids must belong to ``cluster``. ``read_plan`` reads a stated plan.
    """
    spec = JobSpec(
        name=job_id,
        workload=to_workload(f"{field}.workload", message.workload),
        plan=_stated_plan(f"{field}.plan", message, read_plan),
        submitted_plan=_plan(f"{field}.submitted_plan", message, message.submitted_plan, read_plan)
        or "",
        launch=to_launch(f"{field}.launch", message.launch),
        after=to_dependencies(f"{field}.after", cluster, message.after),
        **read_values(field, message, JobSpec, _FIXED_READERS),
        **to_changes(field, cluster, message),
    )
    require_type_of_pin(field, spec)
    require_allowed_types(field, spec)
    require_bounds(field, spec)
    require_no_guarantee(field, spec)
    if spec.runtime == PROFILER:
        raise InvalidInput(
            f"{field}.workload.model",
            f"{PROFILING} is reserved for profiling tasks; name another model",
        )
    require_runnable(field, spec)
    return spec


def _stated_plan(field: str, message: pb.Job, read_plan: PlanReader) -> ExecutionPlan | None:
    """Return the execution plan that a job states, or None if it states none."""
    if not message.plan and message.plan_first:
        raise InvalidInput(f"{field}_first", "needs plan, the plan of the first start")
    return _plan(field, message, message.plan, read_plan)


def _plan(field: str, message: pb.Job, text: str, read_plan: PlanReader) -> ExecutionPlan | None:
    """Return the execution plan in a text of a job, or None without a text."""
    if not text:
        return None
    workload = to_workload(f"{field}: workload", message.workload)
    return read_plan(field, text, workload, message.requested_gpus)


def _techniques(field: str, words: Sequence[str]) -> tuple[Technique, ...]:
    if len(words) > len(Technique):
        raise InvalidInput(field, f"names {len(words)}, but there are {len(Technique)} techniques")
    return read_techniques(field, [word[:MAX_SHOWN_CHARS] for word in words])


def require_type_of_pin(field: str, spec: JobSpec) -> None:
    """Check that a job that pins its GPU type names one."""
    if spec.pinned_gpu_type and not spec.requested_gpu_type:
        raise InvalidInput(
            f"{field}.pinned_gpu_type",
            "needs requested_gpu_type, which can be set only when the job is submitted",
        )


def require_allowed_types(field: str, spec: JobSpec) -> None:
    """Check that the requested GPU type is among those that the job may run on."""
    if contradiction := spec.contradicted_type():
        raise InvalidInput(f"{field}.allowed_gpu_types", contradiction[1])


def require_bounds(field: str, spec: JobSpec) -> None:
    """Check that the requested GPUs lie within the job's own bounds."""
    if contradiction := spec.contradicted_bound():
        raise InvalidInput(f"{field}.{contradiction[0]}", contradiction[1])


def require_no_guarantee(field: str, spec: JobSpec) -> None:
    """Check that a job that may be preempted is not guaranteed."""
    if spec.preemptible and spec.guaranteed:
        raise InvalidInput(
            f"{field}.preemptible",
            "is set, but the job is guaranteed, so that nothing may suspend it; state one of the two",
        )


def to_changes(field: str, cluster: str, message: pb.Job) -> dict[str, Any]:
    """Return the fields of JobSpec that may change after submission."""
    readers = _CHANGE_READERS | {"avoid_nodes": partial(_avoided, cluster)}
    return read_values(field, message, JobSpec, readers)


def populated_fields(message: pb.Job) -> list[str]:
    """Return the changeable fields that ``message`` sets. An empty update mask means these."""
    return [f.name for f, _ in message.ListFields() if f.name in CHANGEABLE]


def to_states(field: str, numbers: list[pb.JobState.ValueType]) -> list[JobState]:
    """Return the job states to select."""
    for i, number in enumerate(numbers):
        if number not in _STATE_OF:
            raise InvalidInput(f"{field}[{i}]", "is not a state of a job")
    return [_STATE_OF[number] for number in numbers]


def of_spec(cluster: str, spec: JobSpec) -> pb.Job:
    """Return the message of a job's specification, without a name."""
    return pb.Job(**_values_of_spec(cluster, spec))


def _values_of_spec(cluster: str, spec: JobSpec) -> dict[str, Any]:
    submitted = spec.submitted_plan
    return values_of(spec, pb.Job, *_NAME_FIELDS, "submitted_plan", "launch") | {
        "avoid_nodes": [names.node_name(cluster, node) for node in spec.avoid_nodes],
        "submitted_plan": of_plan(submitted if isinstance(submitted, ExecutionPlan) else None),
        "launch": of_launch(spec),
    }


def of_job(record: JobRecord, sees_tenant: SeesTenant) -> pb.Job:
    """Return the message of a stored job, for a caller who ``sees_tenant`` some tenants."""
    cluster, spec, forecast = record.cluster, record.spec, record.forecast
    dependencies = [
        of_dependency(cluster, dependency, sees_tenant) for dependency in record.dependencies
    ]
    message = pb.Job(
        **_values_of_spec(cluster, spec),
        **values_of(record, pb.Job, "allocation", "reason", "forecast"),
        name=names.job_name(cluster, spec.name),
        etag=fields.etag_of(record.version),
        after=dependencies,
        array=None if spec.array is None else of_array_member(cluster, spec.array),
        forecast=None if forecast is None or record.ended_s is not None else of_forecast(forecast),
    )
    if record.allocation is not None:
        message.allocation.CopyFrom(of_allocation(cluster, record.allocation))
    if record.reason is not None:
        message.reason.CopyFrom(of_reason(cluster, record.reason, record.reason_round, sees_tenant))
        if record.state is JobState.REJECTED:
            message.last_error = message.reason.message
    return message


def of_forecast(forecast: JobForecast) -> pb.Forecast:
    """Return the message of a forecast. Times that are too far away are unset."""
    message = pb.Forecast(
        position=forecast.position,
        coverage=forecast.coverage,
        create_time=fields.timestamp_of(forecast.created_s),
        why_not=forecast.why_not,
    )
    for band, own in ((forecast.start, message.start), (forecast.finish, message.finish)):
        if band is not None:
            own.CopyFrom(of_band(band))
    return message


def of_band(band: Band) -> pb.TimeBand:
    """Return the message of a band. Times that are too far away are unset."""
    message = pb.TimeBand(earliest=fields.timestamp_of(band.low_s))
    if math.isfinite(band.median_s):
        message.median.CopyFrom(fields.timestamp_of(band.median_s))
    if math.isfinite(band.high_s):
        message.latest.CopyFrom(fields.timestamp_of(band.high_s))
    return message


def of_event(record: JobEventRecord, sees_tenant: SeesTenant) -> pb.JobEvent:
    """Return an entry of a job's history, for a caller who ``sees_tenant`` some tenants."""
    return to_message(
        record,
        pb.JobEvent,
        time=fields.timestamp_of(record.at_s),
        detail=render(record.detail, sees_tenant),
    )


def of_allocation(cluster: str, allocation: AllocationRecord) -> pb.Allocation:
    """Return the message of an allocation."""
    return pb.Allocation(  # written out, as is a reason: a round has 10,000
        cell=of_cell(allocation.cell),
        rate=allocation.rate,
        generation=allocation.generation,
        shares=[
            pb.NodeShare(node=names.node_name(cluster, node), gpu_indices=gpus)
            for node, gpus in allocation.shares
        ],
        execution_plan=of_plan(allocation.plan),
        iter_time_s=allocation.iter_time_s,
        iter_time_source=source_number(allocation.iter_time_source),
    )


def of_reason(cluster: str, reason: Reason, number: int, sees_tenant: SeesTenant) -> pb.Reason:
    """Return the message of a reason that round ``number`` gave. If it is 0, no round is named.

    The caller ``sees_tenant`` some tenants. Its texts do not name others.
    """
    return pb.Reason(
        code=reason.code,
        message=render(reason.message, sees_tenant),
        next_step=render(reason.next_step, sees_tenant),
        evidence={
            render(key, sees_tenant): render(value, sees_tenant) for key, value in reason.evidence
        },
        round=names.round_name(cluster, number) if number else "",
    )


def of_planned_start(record: PlannedStartRecord) -> pb.PlannedStart:
    """Return the message of the start that is reserved for a job."""
    return to_message(record, pb.PlannedStart)


def _allowed(field: str, types: Sequence[str]) -> tuple[str, ...]:
    if len(types) > MAX_GPU_TYPES:
        raise InvalidInput(field, f"must name at most {MAX_GPU_TYPES} types; it names {len(types)}")
    for i, name in enumerate(types):
        names.require_gpu_type(f"{field}[{i}]", name)
    fields.require_distinct((f"{field}[{i}]", name) for i, name in enumerate(types))
    return tuple(types)


def _longest_run_s(field: str, duration: Duration) -> float:
    longest_s = fields.seconds_of_duration(field, duration)
    if longest_s <= 0:
        raise InvalidInput(field, "must be above 0 s; leave it out for no limit")
    return longest_s


def _gpu_type(field: str, name: str) -> str:
    return name and names.require_gpu_type(field, name)


def _tenant(field: str, name: str) -> str:
    return fields.require_text(field, name, 100)


def _avoided(cluster: str, field: str, nodes: Sequence[str]) -> tuple[str, ...]:
    if len(nodes) > limits.MAX_AVOIDED_NODES:
        raise InvalidInput(
            field, f"must name at most {limits.MAX_AVOIDED_NODES} nodes; it names {len(nodes)}"
        )
    ids = tuple(to_node_id(f"{field}[{i}]", cluster, name) for i, name in enumerate(nodes))
    fields.require_distinct((f"{field}[{i}]", node) for i, node in enumerate(ids))
    return ids


def to_labels(field: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a job, or those that it must have. Raises InvalidInput."""
    if RUN_LABEL in labels:
        raise InvalidInput(field, f"may not have {RUN_LABEL}, which only the service sets")
    if len(labels) > MAX_LABELS:
        raise InvalidInput(field, f"must have at most {MAX_LABELS} entries; it has {len(labels)}")
    for key, value in labels.items():
        fields.require_text(field, key, 63, required=True)
        if holds_secret(key) or holds_secret(value):
            raise InvalidInput(
                field, "hold a secret, which everyone who sees the job would see; remove it"
            )
        fields.require_text(f"{field}[{key}]", value, 255)
    return dict(labels)


def _command(field: str, command: Sequence[str]) -> tuple[str, ...]:
    if sum(map(len, command)) > MAX_COMMAND_CHARS:
        raise InvalidInput(field, f"must be at most {MAX_COMMAND_CHARS:,} characters in total")
    for i, word in enumerate(command):
        if "\0" in word:
            raise InvalidInput(f"{field}[{i}]", "must not contain a zero byte")
    refuse_words(command, field, "launch.secrets or --secret")
    return tuple(command)


_NAME_FIELDS: Final = ("name", "after", "array", "avoid_nodes")
"""The fields of Job that are full names or have them."""

_READERS: Final[dict[str, Reader | None]] = {
    **usual_readers(pb.Job, JobSpec),
    "requested_gpu_type": _gpu_type,
    "tenant": _tenant,
    "command": _command,
    "techniques": _techniques,
    "labels": to_labels,
    "allowed_gpu_types": _allowed,
    "longest_run": _longest_run_s,
}
"""The readers of the fields that users state of a job, by the API's names."""

_OWN_READERS: Final = {"name", "workload", "plan", "submitted_plan", "launch", "after", "array"}
"""The fields that need more than their value."""

_CHANGE_READERS: Final = {name: _READERS[name] for name in CHANGEABLE}
_FIXED_READERS: Final = {
    name: _READERS[name] for name in _READERS.keys() - CHANGEABLE.keys() - _OWN_READERS
}
