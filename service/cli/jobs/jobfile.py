"""Job files: one or more jobs in YAML. ``docs/command-line.md`` describes the format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import Field, create_model

from tessera.estimator.files.schemas import check_value, number_between, whole_between
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.entries import FileEntry, Labels, Seconds, Text, Texts
from tessera.service.cli.jobs.launchoptions import make_launch, set_launch
from tessera.service.cli.jobs.workflow import parse_after, parse_array
from tessera.service.cli.names import full_name
from tessera.service.cli.yamlfile import read_documents
from tessera.v1 import estimates_pb2, jobs_pb2, launch_pb2


class JobEntry(FileEntry):
    """A job in a file. A key that is absent counts as 0, empty or unset, as in the API."""

    name: Text = ""
    model: Text
    params: Text = ""
    batch: Annotated[int, whole_between(1, limits.MAX_BATCH)]
    iterations: Annotated[int, whole_between(1, limits.MAX_ITERATIONS)]
    gpus: Annotated[int, whole_between(1, limits.MAX_GPUS)]
    gpu_type: Text = ""
    tenant: Text = ""
    priority: Annotated[int, whole_between(1, limits.MAX_PRIORITY)] = 0
    weight: Annotated[float, number_between(limits.MIN_WEIGHT, limits.MAX_WEIGHT)] = 0.0
    guaranteed: bool = False
    restart: Seconds | None = None
    deadline: Text | None = None
    """A time with its time zone, or a duration from now."""
    pinned: bool = False
    preemptible: bool = False
    labels: Labels = Field(default_factory=dict)
    command: Texts = Field(default_factory=list)
    max_retries: Annotated[int, whole_between(0, limits.MAX_RETRIES)] | None = None
    pinned_gpu_type: bool = False
    allowed_gpu_types: Texts = Field(default_factory=list)
    """The GPU types that the job may run on."""
    avoid_nodes: Texts = Field(default_factory=list)
    node_selector: Text = ""
    preferred_labels: Text = ""
    longest_run: Seconds | None = None
    profile: bool = False
    min_gpus: Annotated[int, whole_between(0, limits.MAX_GPUS)] = 0
    max_gpus: Annotated[int, whole_between(0, limits.MAX_GPUS)] = 0
    after: Texts = Field(default_factory=list)
    """Jobs that must end before it starts, e.g. ``JOB`` or ``JOB:ended``."""
    array: Text = ""
    """The indices of an array of such jobs, e.g. ``0-99:2%8``."""
    plan: Text = ""
    """The file of an execution plan. A relative path begins at the folder of the job's file."""
    plan_first: bool = False
    submitted_plan: Text = ""
    """A file, as ``plan``, or the plan in JSON."""
    techniques: Texts = Field(default_factory=list)
    cpus: Annotated[int, whole_between(0, limits.MAX_CPUS)] = 0
    runtime: Text = ""
    env: Labels = Field(default_factory=dict)
    workdir: Text = ""
    secrets: Labels = Field(default_factory=dict)
    """The names of the tenant's files on the nodes, by variable."""
    staging_command: Texts = Field(default_factory=list)
    user: Text = ""
    progress_pattern: Text = ""
    stall_limit: Seconds | None = None
    stop_grace: Seconds | None = None
    until_exit: bool = False
    tuning_space: Text = ""
    tuning_budget: Seconds | None = None


class JobsEntry(FileEntry):
    """A list of jobs. ``defaults`` supplies the keys that a job itself lacks."""

    defaults: dict[Any, Any] = Field(default_factory=dict)
    jobs: list[Any] = Field(default_factory=list)


_KEYS: Final[dict[str, Any]] = {
    key: (object, None) for key in JobEntry.model_fields if key != "name"
}
_Defaults: Final = create_model("_Defaults", __base__=FileEntry, **_KEYS)
"""A model that checks only keys. The values are checked in the jobs that inherit them."""


def read_jobs(
    text: str, source: str, now: Timestamp, cluster: str = options.DEFAULT_CLUSTER
) -> list[jobs_pb2.SubmitJobRequest]:
    """Return the jobs of a file, in order.

    Each document is a job, a list of jobs, or ``{defaults, jobs}``. Ids of nodes belong to
    ``cluster``. Relative deadlines count from ``now``.

    Raises:
        InvalidInput: names the file, the job and the key, and says what is allowed.
    """
    contents = read_documents(text, source)
    jobs = []
    for nth, document in enumerate(contents):
        where = source if len(contents) == 1 else f"{source}: document {nth + 1}"
        jobs += [_request(at, job, now, cluster) for at, job in _jobs(where, document)]
    if not jobs:
        raise InvalidInput(source, "contains no jobs")
    return jobs


def _jobs(where: str, document: object) -> Iterator[tuple[str, JobEntry]]:
    """Yield the jobs of a document, each with its position."""
    if isinstance(document, list):
        document = {"jobs": document}
    if not isinstance(document, dict) or not {"jobs", "defaults"} & document.keys():
        yield where, check_value(JobEntry, where, document)
        return
    top = check_value(JobsEntry, where, document)
    check_value(_Defaults, f"{where}: defaults", top.defaults)
    for index, item in enumerate(top.jobs):
        at = f"{where}: jobs[{index}]"
        yield at, check_value(JobEntry, at, top.defaults | item if isinstance(item, dict) else item)


def _request(where: str, job: JobEntry, now: Timestamp, cluster: str) -> jobs_pb2.SubmitJobRequest:
    if job.pinned_gpu_type and "gpu_type" not in job.model_fields_set:
        raise InvalidInput(
            f"{where}: pinned_gpu_type", "pins the type that 'gpu_type' names, so give both"
        )
    if len(job.avoid_nodes) > limits.MAX_AVOIDED_NODES:
        raise InvalidInput(
            f"{where}: avoid_nodes", f"may name at most {limits.MAX_AVOIDED_NODES} nodes"
        )
    message = jobs_pb2.Job(
        workload=estimates_pb2.Workload(model=job.model, params=job.params, global_batch=job.batch),
        iterations=job.iterations,
        requested_gpus=job.gpus,
        requested_gpu_type=job.gpu_type,
        tenant=job.tenant,
        priority=job.priority,
        weight=job.weight,
        guaranteed=job.guaranteed,
        pinned=job.pinned,
        preemptible=job.preemptible,
        labels=job.labels,
        command=job.command,
        pinned_gpu_type=job.pinned_gpu_type,
        profile=job.profile,
        allowed_gpu_types=job.allowed_gpu_types,
        avoid_nodes=[full_name(cluster, "nodes", node) for node in job.avoid_nodes],
        node_selector=job.node_selector,
        preferred_labels=job.preferred_labels,
        min_gpus=job.min_gpus,
        max_gpus=job.max_gpus,
        max_retries=job.max_retries,
        techniques=job.techniques,
        requested_cpus=job.cpus,
        after=parse_after(f"{where}: after", job.after, cluster),
    )
    message.plan = _plan(where, "plan", job.plan)
    message.submitted_plan = _plan(where, "submitted_plan", job.submitted_plan)
    if job.plan_first and not job.plan:
        raise InvalidInput(f"{where}: plan_first", "needs a plan, that of the first start")
    message.plan_first = job.plan_first
    set_launch(message, _launch(where, job))
    if job.restart is not None:
        message.restart.CopyFrom(options.to_duration(job.restart))
    if job.longest_run is not None:
        message.longest_run.CopyFrom(options.to_duration(job.longest_run))
    if job.deadline is not None:
        message.deadline.CopyFrom(options.parse_time(f"{where}: deadline", job.deadline, now))
    request = jobs_pb2.SubmitJobRequest(job_id=job.name, job=message)
    if job.array:
        request.array.CopyFrom(parse_array(f"{where}: array", job.array))
    return request


def _plan(where: str, key: str, value: str) -> str:
    """Return the text of the plan that a key has: a file next to the job's, or JSON."""
    if not value or value.lstrip().startswith("{"):
        return value
    folder = Path(where.partition(": ")[0]).parent if where != "-" else Path()
    return options.read_plan_file(f"{where}: {key}", str(folder / value))


def _launch(where: str, job: JobEntry) -> launch_pb2.Launch:
    launch = make_launch(
        f"{where}: env",
        f"{where}: secrets",
        env=job.env,
        secrets=job.secrets.items(),
        runtime=job.runtime,
        workdir=job.workdir,
        staging_command=job.staging_command,
        user=job.user,
        progress_pattern=job.progress_pattern,
        tuning_space=job.tuning_space,
        until_exit=job.until_exit,
    )
    if job.stall_limit is not None:
        launch.stall_limit.CopyFrom(options.to_duration(job.stall_limit))
    if job.stop_grace is not None:
        launch.stop_grace.CopyFrom(options.to_duration(job.stop_grace))
    if job.tuning_budget is not None:
        launch.tuning_budget.CopyFrom(options.to_duration(job.tuning_budget))
    return launch
