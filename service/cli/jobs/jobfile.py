"""Job files: one or more jobs in YAML. ``docs/command-line.md`` describes the format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import Field, create_model

from tessera.client.requests import JobFields, describe_field
from tessera.estimator.files.schemas import check_value, number_between, whole_between
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.entries import FileEntry, Labels, Seconds, Text, Texts
from tessera.service.cli.jobs.jobfields import build_job, require_partners
from tessera.service.cli.jobs.workflow import parse_array
from tessera.service.cli.yamlfile import read_documents
from tessera.v1 import jobs_pb2

REQUIRED: Final = ("model", "batch", "iterations", "gpus")
"""The keys that every job of a file has."""


def _type_of(key: str) -> Any:
    """Return the type of the value of a key."""
    field, message = describe_field(key)
    if message:
        return _MESSAGE_TYPES[message]
    if field.is_repeated:
        return Texts
    if field.type == field.TYPE_BOOL:
        return bool
    if field.type == field.TYPE_STRING:
        return Text
    low, high = limits.JOB_BOUNDS[field.name]
    if field.type == field.TYPE_DOUBLE:
        return Annotated[float, number_between(low, high)]
    return Annotated[int, whole_between(int(low), int(high))]


_MESSAGE_TYPES: Final[dict[str, Any]] = {
    "Duration": Seconds,
    "Timestamp": Text,  # a time with its time zone, or a duration from now
    "Dependency": Texts,  # jobs that must end before it starts, e.g. ``JOB`` or ``JOB:ended``
    "Secret": Labels,  # the names of the tenant's files on the nodes, by variable
    "EnvEntry": Labels,
    "LabelsEntry": Labels,
}

_FIELDS: Final[dict[str, Any]] = {
    key: (_type_of(key), ... if key in REQUIRED else None) for key in JobFields.__annotations__
}

JobEntry: Final = create_model(
    "JobEntry", __base__=FileEntry, name=(Text, ""), array=(Text, ""), **_FIELDS
)
"""A model of a job in a file. A key that is absent counts as 0, empty or unset, as in the API.

``array`` has the indices of an array of such jobs, e.g. ``0-99:2%8``. The values of ``plan`` and
``submitted_plan`` are files or JSON. Relative paths begin at the folder of the job's file.
"""


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


def _jobs(where: str, document: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the jobs of a document, each with its position."""
    if isinstance(document, list):
        document = {"jobs": document}
    if not isinstance(document, dict) or not {"jobs", "defaults"} & document.keys():
        yield where, _check_job(where, document)
        return
    top = check_value(JobsEntry, where, document)
    check_value(_Defaults, f"{where}: defaults", top.defaults)
    for index, item in enumerate(top.jobs):
        at = f"{where}: jobs[{index}]"
        yield at, _check_job(at, top.defaults | item if isinstance(item, dict) else item)


def _check_job(where: str, job: object) -> dict[str, Any]:
    """Return the values of the keys that a job has."""
    return check_value(JobEntry, where, job).model_dump(exclude_unset=True)


def _request(
    where: str, values: dict[str, Any], now: Timestamp, cluster: str
) -> jobs_pb2.SubmitJobRequest:
    def place(key: str) -> str:
        return f"{where}: {key}"

    require_partners(values, place)
    name, array = values.pop("name", ""), values.pop("array", "")
    if len(values.get("avoid_nodes", ())) > limits.MAX_AVOIDED_NODES:
        raise InvalidInput(
            place("avoid_nodes"), f"may name at most {limits.MAX_AVOIDED_NODES} nodes"
        )
    for key in ("plan", "submitted_plan"):
        values[key] = _find_plan(where, values.get(key, ""))
    job = build_job(values, cluster, now, place)
    request = jobs_pb2.SubmitJobRequest(job_id=name, job=job)
    if array:
        request.array.CopyFrom(parse_array(place("array"), array))
    return request


def _find_plan(where: str, value: str) -> str:
    """Return the path of a plan from the folder of the job's file, or its JSON."""
    if not value or value.lstrip().startswith("{") or where == "-":
        return value
    return str(Path(where.partition(": ")[0]).parent / value)
