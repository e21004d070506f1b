"""Job files: one job, or many, as YAML; the format is described in ``service/cli/README.md``."""

from __future__ import annotations

from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import limits, options
from tessera.service.cli.names import full_name
from tessera.service.cli.yamlfile import Mapping, documents
from tessera.v1 import estimates_pb2, jobs_pb2

KEYS: Final = (
    "name", "model", "params", "global_batch", "iterations", "gpus", "gpu_type", "tenant",
    "priority", "weight", "guaranteed", "restart", "deadline", "pinned", "labels", "command",
    "max_retries", "pin_type", "avoid_nodes", "profile", "min_gpus", "max_gpus",
)  # fmt: skip
"""What a job in a file may say."""

REQUIRED: Final = ("model", "global_batch", "iterations", "gpus")

MAX_JOBS: Final = 10_000
"""Jobs that one SubmitJobs call takes."""


def read_jobs(
    text: str, source: str, now: Timestamp, cluster: str = options.DEFAULT_CLUSTER
) -> list[jobs_pb2.SubmitJobRequest]:
    """Return the jobs of a file, in order. Each document is a job, a list of jobs, or ``{defaults, jobs}``.

    Ids of nodes are of ``cluster``; deadlines that count from now, from ``now``.

    Raises:
        InvalidInput: names the file, the job and the key, and says what is allowed.
    """
    found = documents(text, source)
    jobs = []
    for number, document in enumerate(found):
        where = source if len(found) == 1 else f"{source}: document {number + 1}"
        jobs += [_job(job, now, cluster) for job in _document(where, document)]
    if not jobs:
        raise InvalidInput(source, "holds no jobs")
    return jobs


def _document(where: str, document: object) -> list[Mapping]:
    if isinstance(document, list):
        document = {"jobs": document}
    if not isinstance(document, dict) or not {"jobs", "defaults"} & document.keys():
        return [Mapping(where, document, KEYS)]
    top = Mapping(where, document, ("defaults", "jobs"))
    defaults = document.get("defaults") or {}
    Mapping(top.at("defaults"), defaults, [key for key in KEYS if key != "name"])
    found = []
    for at, item in top.items("jobs"):
        Mapping(at, item, KEYS)
        merged = {**defaults, **item} if isinstance(item, dict) else item
        found.append(Mapping(at, merged, KEYS))
    return found


def _job(job: Mapping, now: Timestamp, cluster: str) -> jobs_pb2.SubmitJobRequest:
    for key in REQUIRED:
        if key not in job:
            raise InvalidInput(job.where, f"needs {key!r}; every job has {', '.join(REQUIRED)}")
    if job.flag("pin_type") and "gpu_type" not in job:
        raise InvalidInput(job.at("pin_type"), "pins the type that 'gpu_type' names: give both")
    avoided = job.texts("avoid_nodes")
    if len(avoided) > limits.MAX_AVOIDED:
        raise InvalidInput(job.at("avoid_nodes"), f"must be at most {limits.MAX_AVOIDED} nodes")
    found = jobs_pb2.Job(
        workload=estimates_pb2.Workload(
            model=job.text("model"), params=job.text("params"),
            global_batch=job.whole("global_batch", 1, limits.MAX_BATCH),
        ),
        iterations=job.whole("iterations", 1, limits.MAX_ITERATIONS),
        requested_gpus=job.whole("gpus", 1, limits.MAX_GPUS),
        requested_gpu_type=job.text("gpu_type"), tenant=job.text("tenant"),
        priority=job.whole("priority", 1, limits.MAX_PRIORITY),
        weight=job.real("weight", limits.MIN_WEIGHT, limits.MAX_WEIGHT),
        guaranteed=job.flag("guaranteed"), pinned=job.flag("pinned"), labels=job.labels("labels"),
        command=job.texts("command"), pinned_gpu_type=job.flag("pin_type"), profile=job.flag("profile"),
        avoid_nodes=[full_name(cluster, "nodes", node) for node in avoided],
        min_gpus=job.whole("min_gpus", 0, limits.MAX_GPUS),
        max_gpus=job.whole("max_gpus", 0, limits.MAX_GPUS),
    )  # fmt: skip
    if "restart" in job:
        found.restart.CopyFrom(options.duration(job.seconds("restart")))
    if "deadline" in job:
        found.deadline.CopyFrom(job.moment("deadline", now))
    if "max_retries" in job:
        found.max_retries = job.whole("max_retries", 0, limits.MAX_RETRIES)
    return jobs_pb2.SubmitJobRequest(job_id=job.text("name"), job=found)
