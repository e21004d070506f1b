"""Requests from the arguments of a client's methods, for both clients."""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol, TypedDict, TypeVar, Unpack

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.client.errors import JobNotSucceeded
from tessera.client.settings import ChannelSettings, find_settings, follow_login
from tessera.v1 import clusters_pb2, jobs_pb2, launch_pb2, scheduler_pb2, what_if_pb2

DEFAULT_ADDRESS: Final = "127.0.0.1:7070"
DEFAULT_CLUSTER: Final = "default"

PAGE_SIZE: Final = 1000
"""Number of items in a page of a list, unless the request says another one."""

ENDED: Final = frozenset(
    {jobs_pb2.SUCCEEDED, jobs_pb2.FAILED, jobs_pb2.CANCELLED, jobs_pb2.REJECTED}
)
"""The states of jobs that have ended."""

READING_VERBS: Final = ("Get", "List", "Read", "Watch", "Replay", "Verify", "Explain", "WhatIf")
"""Beginnings of the names of requests that change nothing."""

CHANNEL_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", 256 << 20),  # the decisions of a round
)

Q = TypeVar("Q")
"""A request."""


class Page(Protocol):
    """A page of a list."""

    @property
    def next_page_token(self) -> str:
        """Return the token of the next page, or "" if there is none."""
        ...


class Paged(Protocol):
    """A request for a page of a list."""

    page_size: int
    page_token: str


JobRef = str | jobs_pb2.Job
"""A job: its id, its full name or its message."""


class JobFields(TypedDict, total=False):
    """The fields of a job that a user states, by the names of job files.

    A deadline is a time with a time zone, or a time from now.
    """

    model: str
    params: str
    batch: int
    iterations: int
    gpus: int
    min_gpus: int
    max_gpus: int
    gpu_type: str
    pinned_gpu_type: bool
    allowed_gpu_types: Sequence[str]
    cpus: int
    node_selector: str
    preferred_labels: str
    avoid_nodes: Sequence[str | clusters_pb2.Node]
    tenant: str
    priority: int
    weight: float
    guaranteed: bool
    pinned: bool
    preemptible: bool
    deadline: datetime | timedelta
    longest_run: timedelta
    restart: timedelta
    labels: Mapping[str, str]
    max_retries: int
    until_exit: bool
    profile: bool
    after: Sequence[JobRef | jobs_pb2.Dependency]
    plan: str
    plan_first: bool
    submitted_plan: str
    techniques: Sequence[str]
    command: Sequence[str]
    runtime: str
    env: Mapping[str, str]
    workdir: str
    secrets: Mapping[str, str]
    staging_command: Sequence[str]
    user: str
    progress_pattern: str
    stall_limit: timedelta
    stop_grace: timedelta
    tuning_space: str
    tuning_budget: timedelta


FIELD_PATHS: Final = {
    "model": "workload.model",
    "params": "workload.params",
    "batch": "workload.global_batch",
    "gpus": "requested_gpus",
    "gpu_type": "requested_gpu_type",
    "cpus": "requested_cpus",
}
"""The fields of a Job that have other names here. All others are fields of Job or of its Launch."""


def make_job(cluster: str = "", **fields: Unpack[JobFields]) -> jobs_pb2.Job:
    """Return the description of a job from the fields that a user states.

    Ids of jobs and nodes belong to ``cluster``, or else to the environment's. ``secrets`` has the
    names of the tenant's files on the nodes, by variable.

    Raises:
        TypeError: a field is unknown, or has a value of another type.
        ValueError: a deadline has no time zone.
    """
    job, parent = jobs_pb2.Job(), choose_cluster(cluster)
    for name, value in fields.items():
        if name not in JobFields.__annotations__:
            raise TypeError(f"a job has no field {name!r}{_suggest_field(name)}")
        _set_field(job, name, value, parent)
    return job


def field_path(name: str) -> str:
    """Return the path in a Job of a field of ``JobFields``."""
    if name in FIELD_PATHS or name in jobs_pb2.Job.DESCRIPTOR.fields_by_name:
        return FIELD_PATHS.get(name, name)
    return f"launch.{name}"


def describe_field(name: str) -> tuple[FieldDescriptor, str]:
    """Return the descriptor of a field of ``JobFields``, and its message's name, or "" for none."""
    outer, _, field = field_path(name).rpartition(".")
    parent = jobs_pb2.Job.DESCRIPTOR.fields_by_name[outer].message_type if outer else None
    descriptor = (parent or jobs_pb2.Job.DESCRIPTOR).fields_by_name[field]
    return descriptor, descriptor.message_type.name if descriptor.message_type else ""


def _suggest_field(name: str) -> str:
    """Return a suggestion of the field that an unknown name may mean."""
    names = {field_path(known).rpartition(".")[2]: known for known in JobFields.__annotations__}
    names |= {known: known for known in JobFields.__annotations__}
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {names[near[0]]!r}?"
    return f"; the fields are {', '.join(JobFields.__annotations__)}"


def _set_field(job: jobs_pb2.Job, name: str, value: Any, cluster: str) -> None:
    """Set the field of a job that has a short name."""
    outer, _, field = field_path(name).rpartition(".")
    message: Message = getattr(job, outer) if outer else job
    descriptor, kind = describe_field(name)
    if isinstance(value, str) and (descriptor.is_repeated or kind):
        raise TypeError(f"{name} must not be a text; {_WANTED.get(kind, 'give a list of texts')}")
    match field, kind:
        case "secrets", _:
            job.launch.secrets.extend(
                launch_pb2.Secret(variable=variable, name=file) for variable, file in value.items()
            )
        case "after", _:
            job.after.extend(_dependency(cluster, other) for other in value)
        case "avoid_nodes", _:
            job.avoid_nodes.extend(full_names(cluster, "nodes", value))
        case _, "Duration" | "Timestamp" if isinstance(value, Message):
            getattr(message, field).CopyFrom(value)
        case _, "Duration":
            if not isinstance(value, timedelta):
                raise TypeError(f"{name} must be a timedelta, e.g. timedelta(minutes=2)")
            getattr(message, field).FromTimedelta(value)
        case _, "Timestamp":
            if not isinstance(value, datetime | timedelta):
                raise TypeError(
                    f"{name} must be a datetime with a time zone, or a timedelta from now"
                )
            getattr(message, field).FromDatetime(_moment(value))
        case _, "":
            if descriptor.is_repeated:
                getattr(message, field).extend(value)
            else:
                setattr(message, field, value)
        case _:
            getattr(message, field).update(value)  # a map


_WANTED: Final = {
    "Duration": "give a timedelta",
    "Timestamp": "give a datetime with a time zone, or a timedelta from now",
    "Dependency": "give a list of jobs",
    "Secret": "give a mapping of variables to names of files",
    "LabelsEntry": "give a mapping",
    "EnvEntry": "give a mapping",
}


def _dependency(cluster: str, job: JobRef | jobs_pb2.Dependency) -> jobs_pb2.Dependency:
    """Return the dependency on the success of a job, unless it is one already."""
    if isinstance(job, jobs_pb2.Dependency):
        return job
    return jobs_pb2.Dependency(
        job=full_name(cluster, "jobs", job), condition=jobs_pb2.Dependency.SUCCEEDED
    )


def _moment(value: datetime | timedelta) -> datetime:
    if isinstance(value, timedelta):
        now = Timestamp()
        now.GetCurrentTime()
        return now.ToDatetime(UTC) + value
    if value.tzinfo is None:
        raise ValueError("a deadline needs a time zone, e.g. tzinfo=timezone.utc")
    return value


def describe_job(cluster: str, job: jobs_pb2.Job | None, fields: JobFields) -> jobs_pb2.Job:
    """Return the job of a message or of fields, of which one must be given.

    Raises:
        TypeError: both are given, or neither, or a field is unknown or has another type.
    """
    if (job is None) == (not fields):
        raise TypeError("submit takes either a Job or the fields of one")
    return make_job(cluster, **fields) if job is None else job


def choose_address(address: str) -> str:
    """Return ``address``, or else the environment's, or else that of a server on this machine."""
    return address or os.environ.get("TESSERA_SERVER") or DEFAULT_ADDRESS


def choose_cluster(cluster: str) -> str:
    """Return ``clusters/{cluster}``, by default the environment's cluster."""
    chosen = cluster or os.environ.get("TESSERA_CLUSTER") or DEFAULT_CLUSTER
    return chosen if chosen.startswith("clusters/") else f"clusters/{chosen}"


def choose_settings(
    address: str, token: str, authorities: str, settings: ChannelSettings | None
) -> ChannelSettings:
    """Return the settings of a channel: those given, or else those of the environment and login.

    Raises:
        ValueError: ``settings`` and parts of them are given.
        ChannelRefused: the environment's settings contradict each other.
    """
    if settings is not None:
        if token or authorities:
            raise ValueError("give settings, or a token and authorities, but not both")
        return settings
    if not (token or authorities):
        return find_settings(address, os.environ, follow_login)
    return ChannelSettings(token=token, authorities=authorities)


def full_name(cluster: str, collection: str, resource: str | int | Message) -> str:
    """Return the full name of a resource: of its id or number, its full name, or its message."""
    if isinstance(resource, Message):
        return str(resource.name)  # type: ignore[attr-defined] # all resources have one
    text = str(resource)
    return text if "/" in text else f"{cluster}/{collection}/{text}"


def full_names(cluster: str, collection: str, resources: Iterable[str | Message]) -> list[str]:
    """Return the full names of resources."""
    return [full_name(cluster, collection, resource) for resource in resources]


def prepare(request: Q) -> tuple[Q, bool]:
    """Return a request that can be sent, and whether it can safely be sent again.

    A request that changes something gets a request id if it has none, on a copy of it. The server
    executes requests with the same id once.
    """
    if not isinstance(request, Message):
        raise TypeError(f"{request!r} is not a message")
    if "request_id" not in request.DESCRIPTOR.fields_by_name:
        return request, request.DESCRIPTOR.name.startswith(READING_VERBS)
    if request.request_id:  # type: ignore[attr-defined] # the field is there
        return request, True
    copied = type(request)()
    copied.CopyFrom(request)
    copied.request_id = str(uuid.uuid4())  # type: ignore[attr-defined] # the field is there
    return copied, True


def list_jobs(cluster: str, states: Iterable[str]) -> jobs_pb2.ListJobsRequest:
    """Return the request for jobs in states, which are named as in ``JobState``, in any case.

    Raises ValueError for an unknown state.
    """
    known = {name.lower(): value for name, value in jobs_pb2.JobState.items() if value}
    wanted = [state.lower() for state in states]
    for state in wanted:
        if state not in known:
            raise ValueError(f"unknown state {state!r}; the states are {', '.join(known)}")
    values = [known[state] for state in wanted]
    return jobs_pb2.ListJobsRequest(parent=cluster, states=values)


def update_job(job: jobs_pb2.Job, paths: Iterable[str]) -> jobs_pb2.UpdateJobRequest:
    """Return the request that sets the fields ``paths`` of a job."""
    request = jobs_pb2.UpdateJobRequest(job=job)
    request.update_mask.paths.extend(paths)
    return request


def drain_nodes(
    cluster: str, nodes: Iterable[str | clusters_pb2.Node], reason: str
) -> clusters_pb2.DrainNodesRequest:
    """Return the request that drains nodes."""
    names = full_names(cluster, "nodes", nodes)
    return clusters_pb2.DrainNodesRequest(parent=cluster, names=names, reason=reason)


def schedule(
    cluster: str, options: scheduler_pb2.RoundOptions | None, *, dry_run: bool
) -> scheduler_pb2.ScheduleRequest:
    """Return the request that decides a round."""
    return scheduler_pb2.ScheduleRequest(parent=cluster, options=options, dry_run=dry_run)


def what_if(
    cluster: str,
    changes: Iterable[what_if_pb2.HypotheticalChange],
    options: scheduler_pb2.RoundOptions | None,
    hours: float,
    futures: int,
) -> scheduler_pb2.WhatIfRequest:
    """Return the request that asks what changes would do."""
    return scheduler_pb2.WhatIfRequest(
        parent=cluster,
        hypothesis=scheduler_pb2.Hypothesis(changes=changes, options=options),
        horizon=Duration(seconds=round(3600 * hours)),
        futures=futures,
    )


def require_success(job: jobs_pb2.Job) -> jobs_pb2.Job:
    """Return a job that has succeeded. Raises JobNotSucceeded for any other."""
    state = jobs_pb2.JobState.Name(job.state)
    if job.state == jobs_pb2.SUCCEEDED:
        return job
    cause = job.last_error or job.reason.message
    raise JobNotSucceeded(f"{job.name} {state.lower()}" + (f": {cause}" if cause else ""), state)
