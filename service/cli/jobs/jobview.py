"""Views of a job: a row of a table, and all its details."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import RenderableType
from rich.text import Text

from tessera.formulation.job.execution_plan import read_execution_plan
from tessera.service.cli.jobs.changeoptions import placing_facts
from tessera.service.cli.jobs.forecastview import (
    forecast_facts,
    listed_band,
    listed_position,
    span_until,
)
from tessera.service.cli.jobs.launchview import launch_facts
from tessera.service.cli.jobs.trainingview import training_facts
from tessera.service.cli.jobs.workflow import after_text, array_text, fold_arrays
from tessera.service.cli.names import short_name
from tessera.service.cli.options import Output
from tessera.service.cli.render import (
    Column,
    Lines,
    facts_grid,
    format_age,
    format_indices,
    format_number,
    format_percent,
    format_span,
    format_time,
    make_table,
    print_note,
    show_list,
    show_parts,
)
from tessera.v1 import estimates_pb2, jobs_pb2

DIGEST_DIGITS: Final = 12
"""Digits of a plan's digest that are shown."""

READABLE_OUTPUTS: Final = (Output.TABLE, Output.WIDE)
"""Output formats for people."""

NO_STATES: Final[Mapping[str, str]] = MappingProxyType({})

REFUSED_DEADLINE_CODES: Final = ("DEADLINE_PAST", "DEADLINE_UNREACHABLE", "DEADLINE_REFUSED")
"""Reason codes of jobs whose deadline will not be met."""


def job_columns(
    jobs: Sequence[jobs_pb2.Job], now: Timestamp, states: Mapping[str, str] = NO_STATES
) -> Sequence[Column[jobs_pb2.Job]]:
    """Return the columns of a list of ``jobs``. Ages are relative to ``now``.

    If no job has a forecast, there are no columns of forecasts. ``states`` has the states of lines
    that stand for several jobs, by name.
    """
    is_forecast = any(job.HasField("forecast") for job in jobs)
    forecasts: Sequence[Column[jobs_pb2.Job]] = (
        Column("POSITION", listed_position, wide=True, right=True),
        Column("STARTS IN", lambda j: listed_band(j, "start", now)),
        Column("FINISHES IN", lambda j: listed_band(j, "finish", now)),
    )
    return (
        Column("JOB", lambda j: short_name(j.name)),
        Column("STATE", lambda j: states.get(j.name) or jobs_pb2.JobState.Name(j.state)),
        Column("MODEL", lambda j: workload_key(j.workload)),
        Column("REQUESTED", lambda j: str(j.requested_gpus), right=True),
        Column(
            "RUNS ON", lambda j: allocation_text(j.allocation) if j.HasField("allocation") else ""
        ),
        Column("DONE %", _done_percent, right=True),
        Column("AGE", lambda j: format_age(j.create_time, now), right=True),
        *(forecasts if is_forecast else ()),
        Column("TENANT", lambda j: j.tenant, wide=True),
        Column("PRIORITY", lambda j: str(j.priority), wide=True, right=True),
        Column("WEIGHT", lambda j: format_number(j.weight), wide=True, right=True),
        Column("GUARANTEED", lambda j: "yes" if j.guaranteed else "", wide=True),
        Column("DEADLINE", lambda j: format_time(j.deadline), wide=True),
        Column("PROMISED", lambda j: "yes" if j.admitted else "", wide=True),
        Column("REASON", lambda j: j.reason.code),
        Column("NEXT STEP", lambda j: j.reason.next_step, wide=True),
    )


def job_lines(jobs: Sequence[jobs_pb2.Job], now: Timestamp, *, expand: bool) -> Lines[jobs_pb2.Job]:
    """Return the lines of a list of jobs with their columns.

    If not ``expand``, each array is one line.
    """
    if expand:
        return jobs, job_columns(jobs, now)
    folded = fold_arrays(jobs)
    return folded.jobs, job_columns(folded.jobs, now, folded.states)


def show_jobs(
    jobs: Sequence[jobs_pb2.Job], now: Timestamp, output: Output, *, expand: bool = True
) -> None:
    """Print a list of jobs. If not ``expand``, people see each array as one line."""
    response = jobs_pb2.ListJobsResponse(jobs=jobs)
    lines, columns = job_lines(jobs, now, expand=expand or output not in READABLE_OUTPUTS)
    show_list(response, lines, columns, output)


def workload_key(value: estimates_pb2.Workload) -> str:
    """Return the key of a workload's estimates, e.g. ``bert/1.3B/256``."""
    return f"{value.model}/{value.params}/{value.global_batch}"


def cell_text(value: estimates_pb2.Cell) -> str:
    """Return a Cell, e.g. ``8 x a100, pp 2``."""
    text = f"{value.gpus} x {value.gpu_type}"
    if value.pipeline_degree:
        text += f", pp {value.pipeline_degree}"
    return text


def allocation_text(held: jobs_pb2.Allocation) -> str:
    """Return the Cell of an allocation, and whether its rate is unknown."""
    return cell_text(held.cell) + ("" if held.rate else ", unknown rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetails:
    """The details of a job that come from calls other than GetJob."""

    history: Sequence[jobs_pb2.JobEvent] = ()
    profiling: estimates_pb2.Profiling = field(default_factory=estimates_pb2.Profiling)
    network: str = ""  # the job's part in the network plan
    next_round: str = ""  # the time of the next round


def show_job(job: jobs_pb2.Job, now: Timestamp, details: JobDetails | None = None) -> None:
    """Print everything about a job."""
    show_parts(job_parts(job, now, details or JobDetails()))


def job_parts(job: jobs_pb2.Job, now: Timestamp, details: JobDetails) -> list[RenderableType]:
    """Return everything about a job: its facts, and the deadline schedule that it was promised."""
    waits = job.state == jobs_pb2.QUEUED
    facts = (
        *_request_facts(job),
        *_state_facts(job, now),
        *_allocation_facts(job.allocation),
        *training_facts(job.training, now),
        ("network", details.network),
        ("next round", details.next_round if waits else ""),
        *start_facts(job, now),
        *forecast_facts(job, now),
        *_reason_facts(job),
        *profiling_facts(job, details.profiling),
        *_history(details.history),
    )
    parts: list[RenderableType] = [facts_grid(facts)]
    if job.schedule:
        parts += [
            Text(f"The schedule that meets its deadline, {format_time(job.deadline)}:"),
            make_table(job.schedule, SEGMENT_COLUMNS, wide=True),
        ]
    return parts


def _request_facts(job: jobs_pb2.Job) -> list[tuple[str, str]]:
    requested = f"{job.requested_gpus} GPUs of any type"
    if job.requested_gpu_type:
        requested = f"{job.requested_gpus} x {job.requested_gpu_type}"
    if job.pinned_gpu_type:
        requested += ", pinned to the type"
    return [
        ("job", job.name),
        ("model", workload_key(job.workload)),
        ("requested", f"{requested}{_bounds(job)}"),
        ("avoids", ", ".join(map(short_name, job.avoid_nodes))),
        *placing_facts(job),
        ("tenant", job.tenant),
        ("priority", f"{job.priority}, weight {format_number(job.weight)}"),
        ("promise", "guaranteed" if job.guaranteed else "best effort"),
        ("preemptible", "yes" if job.preemptible else ""),
        ("deadline", _deadline(job)),
        ("array", array_text(job)),
        ("starts after", after_text(job)),
        ("restart cost", format_span(job.restart.ToNanoseconds() / 1e9)),
        ("pinned", "yes" if job.pinned else ""),
        ("labels", ", ".join(f"{k}={v}" for k, v in sorted(job.labels.items()))),
        ("CPU cores", format_number(job.requested_cpus) if job.requested_cpus else ""),
        ("stated plan", _stated_plan_text(job)),
        ("submitted plan", _submitted_plan_text(job)),
        ("techniques", ", ".join(job.techniques)),
        *launch_facts(job),
    ]


def _bounds(job: jobs_pb2.Job) -> str:
    """Return the job's bounds on GPUs, e.g. ``, at least 2, at most 8``, or "" without bounds."""
    minimum = f", at minimum {job.min_gpus}" if job.min_gpus else ""
    return minimum + (f", at most {job.max_gpus}" if job.max_gpus else "")


def _state_facts(job: jobs_pb2.Job, now: Timestamp) -> list[tuple[str, str]]:
    return [
        ("state", jobs_pb2.JobState.Name(job.state)),
        ("progress", _progress(job)),
        ("submitted", _time_and_age(job.create_time, now)),
        (
            "queued since",
            _time_and_age(job.queue_time, now) if job.state == jobs_pb2.QUEUED else "",
        ),
        ("started", _time_and_age(job.start_time, now)),
        ("service", _service(job)),
        ("ended", _time_and_age(job.end_time, now)),
        ("failures", _failures(job)),
        ("last error", job.last_error if job.last_error != job.reason.message else ""),
    ]


def _progress(job: jobs_pb2.Job) -> str:
    """Return the iterations that a job's program has reported, compared with the stated number."""
    total = format_number(job.iterations)
    if not _is_counted(job):
        return f"no iterations reported ({total} expected)"
    done = format_number(job.iterations_done)
    if job.launch.until_exit:
        return f"{done} iterations ({total} expected)"
    return f"{_done_percent(job)} % ({done} of {total} iterations)"


def _done_percent(job: jobs_pb2.Job) -> str:
    """Return the share of iterations that are done, or "-" if only the program knows."""
    return format_percent(job.iterations_done, job.iterations) if _is_counted(job) else "-"


def _is_counted(job: jobs_pb2.Job) -> bool:
    """Return whether the count of iterations means something: not all programs need to report one."""
    return not job.launch.until_exit or job.iterations_done > 0


def _failures(job: jobs_pb2.Job) -> str:
    """Return the number of the job's failures, and until it has ended, how often it is tried again."""
    if not job.retries:
        return ""
    if job.HasField("end_time"):
        return f"{job.retries}"
    if not job.max_retries:
        return f"{job.retries}; the job is not tried again (max_retries is 0)"
    times = "once" if job.max_retries == 1 else f"up to {job.max_retries:,} times"
    return f"{job.retries}; the job is tried again {times}"


def print_warnings(jobs: Sequence[jobs_pb2.Job]) -> None:
    """Print the server's warnings about ``jobs`` on stderr, each once."""
    warnings = Counter(text for job in jobs for text in job.warnings)
    for text, count in warnings.items():
        print_note(f"warning: {f'{count:,} jobs: ' if len(jobs) > 1 else ''}{text}")


def _allocation_facts(held: jobs_pb2.Allocation) -> list[tuple[str, str]]:
    if not held.shares:
        return []
    shares = "; ".join(
        f"{short_name(s.node)} GPU {format_indices(s.gpu_indices)}" for s in held.shares
    )
    return [
        ("runs on", cell_text(held.cell)),
        ("execution plan", _plan_text(held)),
        ("nodes", shares),
        ("rate", _rate_text(held)),
        ("iteration", _reported_text(held)),
    ]


def _stated_plan_text(job: jobs_pb2.Job) -> str:
    if not job.plan:
        return ""
    plan = read_execution_plan("plan", job.plan)
    use = "first start only" if job.plan_first else "always"
    return f"{plan} ({plan.digest[:DIGEST_DIGITS]}), {use}"


def _submitted_plan_text(job: jobs_pb2.Job) -> str:
    if not job.submitted_plan:
        return ""
    plan = read_execution_plan("submitted_plan", job.submitted_plan)
    owed = ", the speed that it is owed" if job.guaranteed else ""
    return f"{plan} ({plan.digest[:DIGEST_DIGITS]}){owed}"


def _rate_text(held: jobs_pb2.Allocation) -> str:
    if held.rate:
        return f"{format_number(held.rate)} samples/s expected"
    return (
        "unknown, as nothing is known of its model; it keeps what it requested until it is measured"
    )


def _reported_text(held: jobs_pb2.Allocation) -> str:
    """Return the iteration time that the job's process reported, or "" before there is one."""
    if not held.iter_time_s:
        return ""
    if held.iter_time_source == estimates_pb2.REPLAYED:
        source = "replayed: nothing is trained, so it repeats the expected time"
    else:
        source = "measured"
    return f"{format_number(held.iter_time_s)} s, {source}"


def _plan_text(held: jobs_pb2.Allocation) -> str:
    if not held.execution_plan:
        return ""
    plan = read_execution_plan("execution_plan", held.execution_plan)
    return f"{plan} ({held.cell.plan[:DIGEST_DIGITS]})"


SEGMENT_COLUMNS: Final[Sequence[Column[jobs_pb2.ScheduleSegment]]] = (
    Column("START", lambda segment: format_time(segment.start_time)),
    Column("END", lambda segment: format_time(segment.end_time)),
    Column(
        "FOR",
        lambda segment: format_span(segment.end_time.ToSeconds() - segment.start_time.ToSeconds()),
        right=True,
    ),
    Column("ON", lambda segment: cell_text(segment.cell)),
)
"""The columns of a deadline schedule."""

EARLIEST_DEADLINE_KEY: Final = "earliest_deadline"
"""The key in a refused deadline's evidence whose value is the earliest deadline that could be met."""


def _deadline(job: jobs_pb2.Job) -> str:
    """Return a job's deadline, and whether it is promised or refused."""
    deadline, reason = format_time(job.deadline), job.reason
    if not deadline:
        return ""
    if job.admitted:
        return f"{deadline}, promised" + (" (schedule below)" if job.schedule else "")
    if reason.code in REFUSED_DEADLINE_CODES:
        earliest = reason.evidence.get(EARLIEST_DEADLINE_KEY, "")
        return f"{deadline}, refused" + (
            f"; the earliest that could be met is {earliest}" if earliest else ""
        )
    if job.HasField("allocation") and not job.allocation.rate:
        return f"{deadline}, not promised, because the job's rate is unknown"
    return f"{deadline}, not promised"


def _service(job: jobs_pb2.Job) -> str:
    opportunistic = ", started ahead of a blocked job, for which it is suspended once that fits"
    used = (
        f"{format_number(job.service_gpu_seconds / 3600)} GPU-hours"
        if job.service_gpu_seconds
        else ""
    )
    return f"{used or '0 GPU-hours'}{opportunistic}" if job.opportunistic else used


def start_facts(
    message: jobs_pb2.Job | jobs_pb2.ExplainJobResponse, time: Timestamp
) -> list[tuple[str, str]]:
    """Return the planned and the promised start of a job that waits."""
    start, promise = message.planned_start, ""
    if message.HasField("start_by"):
        promise = f"by {format_time(message.start_by)} ({span_until(message.start_by, time)})"
    plan = ""
    if message.HasField("planned_start"):
        moment = f"{format_time(start.start_time)} ({span_until(start.start_time, time)})"
        plan = f"{moment} on {cell_text(start.cell)}"
    return [("planned start", plan), ("promised start", promise)]


def _reason_facts(job: jobs_pb2.Job) -> list[tuple[str, str]]:
    reason, rejected = job.reason, job.state == jobs_pb2.REJECTED
    if not reason.code:
        is_new = job.state == jobs_pb2.QUEUED and not job.HasField("reason")
        hint = "no round has considered it yet; `tessera round` runs one now" if is_new else ""
        return [("why it waits", hint)]
    origin = f" (round {short_name(reason.round)})" if reason.round else ""
    evidence = "; ".join(f"{k}: {v}" for k, v in sorted(reason.evidence.items()))
    return [
        (
            "why rejected" if rejected else "why it waits",
            f"{reason.code}: {reason.message}{origin}",
        ),
        ("evidence", evidence),
        ("next step", reason.next_step),
    ]


_TASK: Final = estimates_pb2.ProfilingTask
_TASK_STATES: Final = {
    _TASK.PLANNED: "planned",
    _TASK.WAITS: "waiting",
    _TASK.RUNS: "running",
    _TASK.DONE: "done",
    _TASK.FAILED: "failed",
    _TASK.CANCELLED: "cancelled",
    _TASK.LIMITED: "stopped at a limit, so its estimates stay analytic",
}


def profiling_facts(job: jobs_pb2.Job, profiling: estimates_pb2.Profiling) -> list[tuple[str, str]]:
    """Return the progress of a job's profiling, in total and on each GPU type."""
    if job.profile and not (profiling.requested or profiling.tasks or job.HasField("end_time")):
        return [
            (
                "profiling",
                "none: its estimates were given by a user, and measurements do not replace them",
            )
        ]
    if profiling.problem:
        return [("profiling", profiling.problem)] if profiling.requested else []
    if not profiling.tasks:
        return []
    types = len(profiling.tasks)
    done = sum(task.state == _TASK.DONE for task in profiling.tasks)
    rest = "" if done == types else "; its other estimates are analytic"
    used_s = sum(t.service_gpu_seconds or t.device_seconds for t in profiling.tasks)
    head = f"done on {done} of {types} GPU types{rest}; {format_number(used_s)} GPU-seconds used"
    return [("profiling", head), *(("", _profiled_on(task)) for task in profiling.tasks)]


def _profiled_on(task: estimates_pb2.ProfilingTask) -> str:
    text = f"{task.gpu_type}: {_TASK_STATES.get(task.state, 'unknown')}"
    if task.records:
        text += f", {task.records} records"
    if task.job:
        text += f" ({task.job})"
    if task.left_out and task.state == _TASK.DONE:
        sizes = (
            f"{size.samples:g}" + f" (tp {size.tensor_parallel})" * (size.tensor_parallel > 1)
            for size in task.left_out
        )
        text += f", without {', '.join(sizes)} samples"
    if task.HasField("host"):
        text += f", {_host_text(task.host)}"
    return f"{text}: {task.problem}" if task.problem else text


def _host_text(rates: estimates_pb2.HostRates) -> str:
    """Return the rates of a host in short, e.g. ``host copies 24.1 GB/s, updates 98.2 GB/s``."""
    copied = [
        rate
        for name in ("to_device_bytes_per_s", "to_host_bytes_per_s")
        if rates.HasField(name) and (rate := getattr(rates, name))
    ]
    copies = f"host copies {min(copied) / 1e9:.3g} GB/s" if copied else rates.copy_gap
    if not rates.updates:
        return copies if rates.update_gap == rates.copy_gap else f"{copies}, {rates.update_gap}"
    fastest = max(rates.updates, key=lambda rate: rate.bytes_per_s)
    updates = f"updates {fastest.bytes_per_s / 1e9:.3g} GB/s on {fastest.cores} CPU cores"
    return f"{copies}, {updates}"


MAX_EVENTS_SHOWN = 10
"""The number of entries shown of a job's history."""


def _history(events: Sequence[jobs_pb2.JobEvent]) -> list[tuple[str, str]]:
    left_out = (
        f"({len(events) - MAX_EVENTS_SHOWN} earlier events) "
        if len(events) > MAX_EVENTS_SHOWN
        else ""
    )
    lines = (
        f"{format_time(e.time)} {e.event} -> {jobs_pb2.JobState.Name(e.state)}"
        + (f" ({e.detail})" if e.detail else "")
        for e in events[-MAX_EVENTS_SHOWN:]
    )
    return [
        ("history" if not k else "", (left_out if not k else "") + t) for k, t in enumerate(lines)
    ]


def _time_and_age(then: Timestamp, now: Timestamp) -> str:
    return f"{format_time(then)} ({format_age(then, now)} ago)" if then.ToNanoseconds() else ""
