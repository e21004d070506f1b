"""Jobs, their allocations and the reasons why they do not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.secrets import holds_secret
from tessera.formulation.base.selectors import Selector
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
    AllocationRecord,
    JobEventRecord,
    JobRecord,
    JobSpec,
    PlannedStartRecord,
    SegmentRecord,
    TrainingRecord,
)
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.clusters import MAX_GPU_TYPES, to_node_id
from tessera.service.server.convert.estimates import (
    of_cell,
    of_plan,
    of_workload,
    source_number,
    to_workload,
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
DEFAULT_RESTART_S: Final = 60.0
DEFAULT_RETRIES: Final = 3

CHANGEABLE: Final[dict[str, str]] = {
    "weight": "weight",
    "priority": "priority",
    "pinned": "pinned",
    "deadline": "deadline_s",
    "labels": "labels",
    "pinned_gpu_type": "pinned_gpu_type",
    "allowed_gpu_types": "allowed_gpu_types",
    "avoid_nodes": "avoid_nodes",
    "node_selector": "node_selector",
    "preferred_labels": "preferred_labels",
    "min_gpus": "min_gpus",
    "max_gpus": "max_gpus",
    "longest_run": "longest_run_s",
    "preemptible": "preemptible",
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
    m = message
    requested_gpu_type = m.requested_gpu_type and names.require_gpu_type(
        f"{field}.requested_gpu_type", m.requested_gpu_type
    )
    restart_s, retries = DEFAULT_RESTART_S, DEFAULT_RETRIES
    if m.HasField("restart"):
        restart_s = fields.seconds_of_duration(f"{field}.restart", m.restart)
    if m.HasField("max_retries"):
        retries = fields.require_whole(f"{field}.max_retries", m.max_retries, 0, limits.MAX_RETRIES)
    spec = JobSpec(
        name=job_id,
        workload=to_workload(f"{field}.workload", m.workload),
        iterations=fields.require_whole(
            f"{field}.iterations", m.iterations, 1, limits.MAX_ITERATIONS
        ),
        requested_gpus=fields.require_whole(
            f"{field}.requested_gpus", m.requested_gpus, 1, limits.MAX_GPUS
        ),
        requested_gpu_type=requested_gpu_type,
        tenant=fields.require_text(f"{field}.tenant", m.tenant, 100),
        guaranteed=m.guaranteed,
        restart_s=restart_s,
        command=_command(f"{field}.command", list(m.command)),
        max_retries=retries,
        profile=m.profile,
        plan=_stated_plan(f"{field}.plan", m, read_plan),
        plan_first=m.plan_first,
        submitted_plan=_plan(f"{field}.submitted_plan", m, m.submitted_plan, read_plan) or "",
        techniques=_techniques(f"{field}.techniques", list(m.techniques)),
        requested_cpus=fields.require_whole(
            f"{field}.requested_cpus", m.requested_cpus, 0, limits.MAX_CPUS
        ),
        launch=to_launch(f"{field}.launch", m.launch),
        after=to_dependencies(f"{field}.after", cluster, m.after),
        **to_changes(field, cluster, m),
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


def _techniques(field: str, words: list[str]) -> tuple[Technique, ...]:
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
    deadline_s = math.inf
    if message.HasField("deadline"):
        deadline_s = fields.seconds_since_1970(f"{field}.deadline", message.deadline)
    return {
        "weight": fields.require_real(
            f"{field}.weight", message.weight or 1.0, limits.MIN_WEIGHT, limits.MAX_WEIGHT
        ),
        "priority": fields.require_whole(
            f"{field}.priority", message.priority or 1, 1, limits.MAX_PRIORITY
        ),
        "pinned": message.pinned,
        "preemptible": message.preemptible,
        "deadline_s": deadline_s,
        "labels": to_labels(f"{field}.labels", message.labels),
        "pinned_gpu_type": message.pinned_gpu_type,
        "allowed_gpu_types": _allowed(
            f"{field}.allowed_gpu_types", list(message.allowed_gpu_types)
        ),
        "avoid_nodes": _avoided(f"{field}.avoid_nodes", cluster, list(message.avoid_nodes)),
        "node_selector": str(Selector.read(f"{field}.node_selector", message.node_selector)),
        "preferred_labels": str(
            Selector.read(f"{field}.preferred_labels", message.preferred_labels)
        ),
        "longest_run_s": _longest_run_s(f"{field}.longest_run", message),
        "min_gpus": fields.require_whole(f"{field}.min_gpus", message.min_gpus, 0, limits.MAX_GPUS),
        "max_gpus": fields.require_whole(f"{field}.max_gpus", message.max_gpus, 0, limits.MAX_GPUS),
    }


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
    submitted = spec.submitted_plan
    message = pb.Job(
        workload=of_workload(spec.workload),
        iterations=spec.iterations,
        requested_gpus=spec.requested_gpus,
        requested_gpu_type=spec.requested_gpu_type,
        tenant=spec.tenant,
        priority=spec.priority,
        weight=spec.weight,
        guaranteed=spec.guaranteed,
        restart=fields.duration_of(spec.restart_s),
        pinned=spec.pinned,
        preemptible=spec.preemptible,
        labels=spec.labels,
        command=spec.command,
        max_retries=spec.max_retries,
        pinned_gpu_type=spec.pinned_gpu_type,
        profile=spec.profile,
        min_gpus=spec.min_gpus,
        max_gpus=spec.max_gpus,
        plan=of_plan(spec.plan),
        plan_first=spec.plan_first,
        submitted_plan=of_plan(submitted if isinstance(submitted, ExecutionPlan) else None),
        techniques=spec.techniques,
        requested_cpus=spec.requested_cpus,
        allowed_gpu_types=spec.allowed_gpu_types,
        avoid_nodes=[names.node_name(cluster, node) for node in spec.avoid_nodes],
        node_selector=spec.node_selector,
        preferred_labels=spec.preferred_labels,
        launch=of_launch(spec),
    )
    if math.isfinite(spec.deadline_s):
        message.deadline.CopyFrom(fields.timestamp_of(spec.deadline_s))
    if math.isfinite(spec.longest_run_s):
        message.longest_run.CopyFrom(fields.duration_of(spec.longest_run_s))
    return message


def of_job(record: JobRecord, sees_tenant: SeesTenant) -> pb.Job:
    """Return the message of a stored job, for a caller who ``sees_tenant`` some tenants."""
    cluster, message = record.cluster, of_spec(record.cluster, record.spec)
    message.name = names.job_name(cluster, record.spec.name)
    message.etag = fields.etag_of(record.version)
    message.state = _STATE_NUMBER[record.state]
    message.create_time.CopyFrom(fields.timestamp_of(record.created_s))
    message.iterations_done = record.iterations_done
    message.generation = record.generation
    message.after.extend(of_dependency(cluster, one, sees_tenant) for one in record.dependencies)
    if record.spec.array is not None:
        message.array.CopyFrom(of_array_member(cluster, record.spec.array))
    message.retries = record.retries
    message.last_error = record.last_error
    message.admitted = record.admitted
    message.schedule.extend(_of_segment(segment) for segment in record.schedule)
    if math.isfinite(record.start_by_s):
        message.start_by.CopyFrom(fields.timestamp_of(record.start_by_s))
    if record.planned_start is not None:
        message.planned_start.CopyFrom(of_planned_start(record.planned_start))
    message.opportunistic = record.opportunistic
    message.service_gpu_seconds = record.service_gpu_s
    message.run_seconds = record.run_s
    if record.queued_s:
        message.queue_time.CopyFrom(fields.timestamp_of(record.queued_s))
    if record.retry_s:
        message.retry_time.CopyFrom(fields.timestamp_of(record.retry_s))
    if record.started_s is not None:
        message.start_time.CopyFrom(fields.timestamp_of(record.started_s))
    if record.ended_s is not None:
        message.end_time.CopyFrom(fields.timestamp_of(record.ended_s))
    if record.allocation is not None:
        message.allocation.CopyFrom(of_allocation(cluster, record.allocation))
    if record.reason is not None:
        message.reason.CopyFrom(of_reason(cluster, record.reason, record.reason_round, sees_tenant))
        if record.state is JobState.REJECTED:
            message.last_error = message.reason.message
    if record.training is not None:
        message.training.CopyFrom(_of_training(record.training))
    if record.forecast is not None and record.ended_s is None:
        message.forecast.CopyFrom(of_forecast(record.forecast))
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


def _of_training(record: TrainingRecord) -> pb.Training:
    message = pb.Training(
        loss=record.loss,
        memory_bytes=record.memory_bytes,
        checkpoint_iterations=record.checkpoint_iterations,
        restart_seconds=record.restart_s,
        remark=record.remark,
    )
    if record.checkpoint_s is not None:
        message.checkpoint_time.CopyFrom(fields.timestamp_of(record.checkpoint_s))
    if record.restart_times is not None:
        message.restart_times.CopyFrom(launch_pb2.RestartTimes(**asdict(record.restart_times)))
    if record.exit_reason is not None:
        message.exit_reason = EXIT_NUMBERS[record.exit_reason]
    return message


def of_event(record: JobEventRecord, sees_tenant: SeesTenant) -> pb.JobEvent:
    """Return an entry of a job's history, for a caller who ``sees_tenant`` some tenants."""
    return pb.JobEvent(
        time=fields.timestamp_of(record.at_s),
        event=record.event,
        state=_STATE_NUMBER[record.state],
        detail=render(record.detail, sees_tenant),
    )


def of_allocation(cluster: str, allocation: AllocationRecord) -> pb.Allocation:
    """Return the message of an allocation."""
    return pb.Allocation(
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
    return pb.PlannedStart(
        start_time=fields.timestamp_of(record.start_s), cell=of_cell(record.cell)
    )


def _of_segment(segment: SegmentRecord) -> pb.ScheduleSegment:
    return pb.ScheduleSegment(
        start_time=fields.timestamp_of(segment.start_s),
        end_time=fields.timestamp_of(segment.end_s),
        cell=of_cell(segment.cell),
    )


def _allowed(field: str, types: list[str]) -> tuple[str, ...]:
    if len(types) > MAX_GPU_TYPES:
        raise InvalidInput(field, f"must name at most {MAX_GPU_TYPES} types; it names {len(types)}")
    for i, name in enumerate(types):
        names.require_gpu_type(f"{field}[{i}]", name)
    fields.require_distinct((f"{field}[{i}]", name) for i, name in enumerate(types))
    return tuple(types)


def _longest_run_s(field: str, message: pb.Job) -> float:
    """Return the longest run time of a job in seconds, or inf without one."""
    if not message.HasField("longest_run"):
        return math.inf
    longest_s = fields.seconds_of_duration(field, message.longest_run)
    if longest_s <= 0:
        raise InvalidInput(field, "must be above 0 s; leave it out for no limit")
    return longest_s


def _avoided(field: str, cluster: str, nodes: list[str]) -> tuple[str, ...]:
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


def _command(field: str, command: list[str]) -> tuple[str, ...]:
    if sum(map(len, command)) > MAX_COMMAND_CHARS:
        raise InvalidInput(field, f"must be at most {MAX_COMMAND_CHARS:,} characters in total")
    for i, word in enumerate(command):
        if "\0" in word:
            raise InvalidInput(f"{field}[{i}]", "must not contain a zero byte")
    refuse_words(command, field, "launch.secrets or --secret")
    return tuple(command)
