"""Commands on jobs: submit, list and look at them."""

from __future__ import annotations

import shlex
from itertools import chain
from typing import Annotated, Final

import typer

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import limits, options, yamlfile
from tessera.service.cli.client import Client, connect, new_request_id, now
from tessera.service.cli.jobview import JobDetails, show_job, show_jobs, warn
from tessera.service.cli.names import full_name, parent, short
from tessera.service.cli.networks import said_of
from tessera.service.cli.nextround import next_round, next_round_line
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    AvoidNode,
    Cluster,
    Deadline,
    JobName,
    MaxGpus,
    MinGpus,
    Output,
    OutputOption,
    Priority,
    Server,
    ValidateOnly,
    Weight,
)
from tessera.service.cli.render import count_noun, line, note, show_message
from tessera.service.cli.watch import watch_job, watch_jobs
from tessera.v1 import estimates_pb2, jobs_pb2

READABLE: Final = (Output.TABLE, Output.WIDE)
"""Output formats for people."""

ENDED: Final = ("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED")

Batch = Annotated[
    int | None, typer.Option(min=1, max=limits.MAX_BATCH, help="Global batch size, in samples.")
]
Iterations = Annotated[
    int | None, typer.Option(min=1, max=limits.MAX_ITERATIONS, help="Iterations of the whole job.")
]
Gpus = Annotated[int | None, typer.Option(min=1, max=limits.MAX_GPUS, help="GPUs requested.")]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch", "-w", help="Show it again whenever it changes, until its end or Ctrl-C."
    ),
]


def add(app: typer.Typer) -> None:
    """Add the commands on jobs."""
    panel = "Jobs"
    app.command("submit", rich_help_panel=panel)(submit)
    app.command("jobs", rich_help_panel=panel)(list_jobs)
    app.command("job", rich_help_panel=panel)(show)


def submit(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The job's id; left out: the server chooses.")
    ] = "",
    file: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", help="YAML of one or many jobs, '-' for stdin; repeatable."),
    ] = None,
    model: Annotated[str, typer.Option(help="What is trained, e.g. bert.")] = "",
    params: Annotated[str, typer.Option(help="Its size as estimates name it, e.g. 1.3B.")] = "",
    batch: Batch = None,
    iterations: Iterations = None,
    gpus: Gpus = None,
    min_gpus: MinGpus = None,
    max_gpus: MaxGpus = None,
    gpu_type: Annotated[
        str, typer.Option(help="The GPU type asked for; rounds may choose another.")
    ] = "",
    pin_type: Annotated[
        bool, typer.Option("--pin-type", help="--gpu-type is a demand: it runs there, or waits.")
    ] = False,
    avoid_node: AvoidNode = None,
    tenant: Annotated[str, typer.Option(help="The tenant that the job counts for.")] = "",
    priority: Priority = None,
    weight: Weight = None,
    guaranteed: Annotated[bool, typer.Option(help="Never suspended once launched.")] = False,
    restart: Annotated[str, typer.Option(help="What a start or move costs, e.g. 60s.")] = "",
    deadline: Deadline = None,
    pinned: Annotated[bool, typer.Option(help="Not moved to mend fragmentation.")] = False,
    label: Annotated[list[str] | None, typer.Option(help="KEY=VALUE; repeatable.")] = None,
    max_retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=limits.MAX_RETRIES,
            help="Failures after which it is tried again. Default: 3.",
        ),
    ] = None,
    command: Annotated[
        str,
        typer.Option(
            help="What its runtime runs, quoted as in a shell. This release's agents replay jobs and"
            " train nothing: leave it out, or make the job fail on purpose with 'fail-at N'."
        ),
    ] = "",
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Measure its layers on idle GPUs, one of each type."),
    ] = False,
    watch: Watch = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Submit jobs: one from options, or one or many from YAML files (all or none)."""
    job = jobs_pb2.Job(
        workload=estimates_pb2.Workload(model=model, params=params, global_batch=batch or 0),
        iterations=iterations or 0,
        requested_gpus=gpus or 0,
        requested_gpu_type=gpu_type,
        tenant=tenant,
        priority=priority or 0,
        weight=weight or 0.0,
        guaranteed=guaranteed,
        pinned=pinned,
        labels=options.labels("--label", label),
        pinned_gpu_type=pin_type,
        avoid_nodes=[full_name(cluster, "nodes", node) for node in avoid_node or []],
        command=_words(command),
        max_retries=max_retries,
        profile=profile,
        min_gpus=min_gpus or 0,
        max_gpus=max_gpus or 0,
    )
    if restart:
        job.restart.CopyFrom(options.duration(options.seconds("--restart", restart)))
    if deadline is not None:
        job.deadline.CopyFrom(options.moment("--deadline", deadline, now()))
    if pin_type and not gpu_type:
        raise InvalidInput("--pin-type", "pins the type that --gpu-type names: give both")
    requests = _requests(name, job, file or [], cluster)
    if watch and (len(requests) != 1 or validate_only):
        raise InvalidInput("--watch", "follows one submitted job; use `tessera jobs --watch`")
    with connect(server) as client:
        jobs = _submit(client, parent(cluster), requests, validate_only=validate_only)
        warn(jobs)
        if watch:
            _follow(client, jobs[0].name, output)
            return
        show_jobs(jobs, now(), output)
        if validate_only:
            note(f"{count_noun(len(jobs), 'job')} valid; nothing changed")
            return
        note(f"{count_noun(len(jobs), 'job')} submitted")
        if output in READABLE:
            _note_next_round(client, parent(cluster))


def list_jobs(
    state: Annotated[
        list[str] | None, typer.Option(help="Only in this state, e.g. queued; repeatable.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also jobs that have ended.")
    ] = False,
    watch: Watch = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List jobs, in order of submission; those that have ended only with --all."""
    states = _states(state or [], everything=everything)
    with connect(server) as client:

        def read() -> list[jobs_pb2.Job]:
            request = jobs_pb2.ListJobsRequest(parent=parent(cluster), states=states)
            return list(
                chain.from_iterable(p.jobs for p in client.pages(client.jobs.ListJobs, request))
            )

        if watch:
            watch_jobs(read, lambda: next_round_line(client, parent(cluster)), output)
            return
        jobs = read()
        show_jobs(jobs, now(), output)
        if any(job.state == jobs_pb2.QUEUED for job in jobs) and output in READABLE:
            _note_next_round(client, parent(cluster))
    if not jobs:
        hint = "" if everything or state else "; --all lists those that have ended too"
        note(f"no such jobs in cluster {short(parent(cluster))}{hint}")


def show(
    name: JobName,
    watch: Watch = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a job: where it stands, what it runs on, and if it waits, why and what to do."""
    with connect(server) as client:
        full = full_name(cluster, "jobs", name)
        if watch:
            _follow(client, full, output)
            return
        job = client.call(client.jobs.GetJob, jobs_pb2.GetJobRequest(name=full))
        if output is Output.NAME:
            line(job.name)
        elif not show_message(job, output):
            show_job(job, now(), _details(client, job))


def _details(client: Client, job: jobs_pb2.Job) -> JobDetails:
    """Return a job's history, profiling, network part and, if it waits, the next round."""
    its_cluster = job.name.partition("/jobs/")[0]
    history = client.call(client.jobs.ListJobEvents, jobs_pb2.ListJobEventsRequest(parent=job.name))
    request = estimates_pb2.GetProfilingRequest(parent=its_cluster, workload=job.workload)
    return JobDetails(
        history=history.events,
        profiling=client.call(client.estimates.GetProfiling, request),
        network=said_of(client, its_cluster, job),
        next_round=next_round(client, its_cluster) if job.state == jobs_pb2.QUEUED else "",
    )


def _note_next_round(client: Client, cluster: str) -> None:
    """Print on stderr when the next round is, unless the server does not report it."""
    if text := next_round_line(client, cluster):
        note(text)


def _requests(
    name: str, job: jobs_pb2.Job, files: list[str], cluster: str
) -> list[jobs_pb2.SubmitJobRequest]:
    """Return the jobs to submit: the job of the options, or the jobs of the files."""
    if not files:
        asked = {
            "--model": job.workload.model,
            "--batch": job.workload.global_batch,
            "--iterations": job.iterations,
            "--gpus": job.requested_gpus,
        }
        if missing := [option for option, value in asked.items() if not value]:
            raise InvalidInput(
                "submit", f"needs {', '.join(missing)}; or -f FILE with one or many jobs in YAML"
            )
        return [jobs_pb2.SubmitJobRequest(job_id=name, job=job)]
    if name or job != jobs_pb2.Job(workload=estimates_pb2.Workload()):
        raise InvalidInput("submit", "takes a job from options or jobs from --file, not both")
    from tessera.service.cli import jobfile  # noqa: PLC0415 - pydantic starts slowly

    found = [
        request
        for file in files
        for request in jobfile.read_jobs(yamlfile.read_text(file), file, now(), cluster)
    ]
    if len(found) > limits.MAX_JOBS:
        raise InvalidInput(
            "submit",
            f"{len(found):,} jobs; one submission takes {limits.MAX_JOBS:,}: split the files",
        )
    return found


def _submit(
    client: Client, to: str, requests: list[jobs_pb2.SubmitJobRequest], *, validate_only: bool
) -> list[jobs_pb2.Job]:
    if len(requests) == 1:  # the result is the same, but errors name the field without an index
        one = jobs_pb2.SubmitJobRequest(
            parent=to,
            job_id=requests[0].job_id,
            job=requests[0].job,
            validate_only=validate_only,
            request_id=new_request_id(),
        )
        return [client.call(client.jobs.SubmitJob, one)]
    many = jobs_pb2.SubmitJobsRequest(
        parent=to, requests=requests, validate_only=validate_only, request_id=new_request_id()
    )
    return list(client.call(client.jobs.SubmitJobs, many).jobs)


def _follow(client: Client, name: str, output: Output) -> None:
    """Show a job until it has ended. Raises CallFailed: it has not succeeded."""
    updates = client.stream(client.jobs.WatchJob, jobs_pb2.WatchJobRequest(name=name))
    watch_job(updates, lambda job: _details(client, job), output)


def _states(names: list[str], *, everything: bool) -> list[jobs_pb2.JobState.ValueType]:
    """Return the states to list. An empty list stands for all states."""
    known = {name: value for name, value in jobs_pb2.JobState.items() if value}
    wanted = [part.upper() for name in names for part in name.split(",")]
    for name in wanted:
        if name not in known:
            raise InvalidInput("--state", f"{name.lower()!r}: know {', '.join(known).lower()}")
    if wanted:
        return [known[name] for name in wanted]
    return [] if everything else [v for name, v in known.items() if name not in ENDED]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InvalidInput("--command", f"is not quoted as in a shell: {error}") from error
