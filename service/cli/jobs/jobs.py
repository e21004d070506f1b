"""Commands that submit, list and show jobs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import typer

from tessera.client import Client
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options, yamlfile
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.clusters.networks import describe_job_part
from tessera.service.cli.completion import complete_tenants
from tessera.service.cli.jobs.changeoptions import ChangeOptions
from tessera.service.cli.jobs.jobfields import build_optional_job, option_name, require_partners
from tessera.service.cli.jobs.jobview import (
    READABLE_OUTPUTS,
    JobDetails,
    job_lines,
    print_warnings,
    show_job,
    show_jobs,
)
from tessera.service.cli.jobs.launchoptions import ProgramOptions
from tessera.service.cli.jobs.watch import watch_job, watch_list, watched_jobs
from tessera.service.cli.jobs.workflow import After, Array, parse_array
from tessera.service.cli.names import cluster_name, full_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    JobName,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
    Watch,
)
from tessera.service.cli.render import count_noun, print_line, print_note, show_message
from tessera.service.cli.rounds.nextround import next_round, next_round_line
from tessera.service.cli.rounds.whatif import dry_run_jobs
from tessera.v1 import estimates_pb2, jobs_pb2

ENDED_STATE_NAMES: Final = ("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED")

Batch = Annotated[
    int | None, typer.Option(min=1, max=limits.MAX_BATCH, help="Global batch size, in samples.")
]
Iterations = Annotated[
    int | None,
    typer.Option(min=1, max=limits.MAX_ITERATIONS, help="Number of iterations of the whole job."),
]
Gpus = Annotated[
    int | None, typer.Option(min=1, max=limits.MAX_GPUS, help="Number of GPUs requested.")
]


class SubmitOptions(ChangeOptions, ProgramOptions):
    """The options of `submit`, by the names of the fields that they state."""

    model: Annotated[str | None, typer.Option(help="Model to train, e.g. bert.")]
    params: Annotated[
        str | None, typer.Option(help="Size of the model, as in the names of estimates, e.g. 1.3B.")
    ]
    batch: Batch
    iterations: Iterations
    gpus: Gpus
    gpu_type: Annotated[
        str | None, typer.Option(help="Requested GPU type. Rounds may choose another one.")
    ]
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant to which the job is accounted.", autocompletion=complete_tenants),
    ]
    guaranteed: Annotated[
        bool | None,
        typer.Option(
            help="Once the job is launched, never suspend it or run it slower than on what it requested."
        ),
    ]
    restart: Annotated[
        str | None, typer.Option(help="Time that a start or a move of the job costs, e.g. 60s.")
    ]
    max_retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=limits.MAX_RETRIES,
            help="Number of times that the job is tried again after a failure. Default: 3.",
        ),
    ]
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Execution plan by which the job runs: Tessera's JSON, or a command line of"
            " Megatron-LM. Without it, rounds choose the plans.",
        ),
    ]
    plan_first: Annotated[
        bool | None,
        typer.Option(
            "--plan-first", help="Use --plan for the first start only. Then rounds may choose."
        ),
    ]
    submitted_plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="Execution plan with which the job is submitted, in the formats of --plan. Rounds may"
            " choose others, but a guaranteed job is owed this plan's speed on what it requests.",
        ),
    ]
    techniques: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Techniques of plans that the script can use, e.g. dp,zero1,checkpointing. The job gets"
            " no plan that uses another one. Default: all of its runtime.",
        ),
    ]
    cpus: Annotated[
        int | None,
        typer.Option(min=0, max=limits.MAX_CPUS, help="CPU cores requested for the whole job."),
    ]
    profile: Annotated[
        bool | None,
        typer.Option(
            "--profile", help="Measure the layers of the model on one idle GPU of each type."
        ),
    ]
    after: After


def add_commands(app: typer.Typer) -> None:
    """Add the commands on jobs."""
    panel = "Jobs"
    submit = options.with_options(submit_jobs, "stated", SubmitOptions)
    app.command("submit", rich_help_panel=panel)(submit)
    app.command("jobs", rich_help_panel=panel)(list_jobs)
    app.command("job", rich_help_panel=panel)(print_job)


def submit_jobs(
    *,
    stated: SubmitOptions,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The job's id. Default: the server chooses one.")
    ] = "",
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", help="YAML file with one or more jobs; '-' for stdin. Repeatable."
        ),
    ] = None,
    array: Array = "",
    watch: Watch = False,
    validate_only: ValidateOnly = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what the jobs would get now, which jobs would lose by it, and when they would run."
            " Submit nothing.",
        ),
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Submit one job from options, or the jobs in YAML files (all or none)."""
    require_partners(stated, option_name)
    job = build_optional_job(stated, cluster)
    requests = _requests(name, job, file or [], cluster)
    if array and file:
        raise InvalidInput("--array", "is for the job of options; write 'array:' in the job file")
    if array:
        requests[0].array.CopyFrom(parse_array("--array", array))
    if watch and array:
        raise InvalidInput("--watch", "follows a single job; use `tessera jobs --watch` for arrays")
    if watch and (len(requests) != 1 or validate_only):
        raise InvalidInput(
            "--watch",
            "follows a single submitted job; use `tessera jobs --watch` to follow several",
        )
    if dry_run and (watch or validate_only):
        raise InvalidInput("--dry-run", "cannot be combined with --watch or --validate-only")
    with connect(server) as client:
        if dry_run:
            dry_run_jobs(client, cluster_name(cluster), requests, output)
            return
        jobs = _submit(client, cluster_name(cluster), requests, validate_only=validate_only)
        print_warnings(jobs)
        if watch:
            _follow(client, jobs[0].name, output)
            return
        show_jobs(jobs, current_timestamp(), output, expand=False)
        if validate_only:
            print_note(f"{count_noun(len(jobs), 'job')} valid; nothing changed")
            return
        print_note(f"{count_noun(len(jobs), 'job')} submitted")
        if output in READABLE_OUTPUTS:
            _note_next_round(client, cluster_name(cluster))


def list_jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(help="List only jobs in this state, e.g. queued. Repeatable."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="List jobs that have ended, too.")
    ] = False,
    expand: Annotated[
        bool,
        typer.Option("--expand", help="List every job of arrays. Default: one line for an array."),
    ] = False,
    watch: Watch = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List jobs in order of submission. Jobs that have ended are listed only with --all."""
    states = _states(state or [], everything=everything)
    with connect(server) as client:

        def read() -> list[jobs_pb2.Job]:
            request = jobs_pb2.ListJobsRequest(parent=cluster_name(cluster), states=states)
            return list(client.pages(client.stubs.jobs.ListJobs, request, lambda page: page.jobs))

        if watch:
            footer = partial(next_round_line, client, cluster_name(cluster))
            watch_list(watched_jobs(read, footer, partial(job_lines, expand=expand)), output)
            return
        jobs = read()
        show_jobs(jobs, current_timestamp(), output, expand=expand)
        if any(job.state == jobs_pb2.QUEUED for job in jobs) and output in READABLE_OUTPUTS:
            _note_next_round(client, cluster_name(cluster))
    if not jobs:
        hint = "" if everything or state else "; --all also lists jobs that have ended"
        print_note(f"no such jobs in cluster {short_name(cluster_name(cluster))}{hint}")


def print_job(
    name: JobName,
    watch: Watch = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a job: its state, its GPUs, and why it waits and what to do about it."""
    with connect(server) as client:
        full = full_name(cluster, "jobs", name)
        if watch:
            _follow(client, full, output)
            return
        job = client.call(client.stubs.jobs.GetJob, jobs_pb2.GetJobRequest(name=full))
        if output is Output.NAME:
            print_line(job.name)
        elif not show_message(job, output):
            show_job(job, current_timestamp(), _details(client, job))


def _details(client: Client, job: jobs_pb2.Job) -> JobDetails:
    """Return a job's history, profiling, part in the network plan and, if it waits, the next round."""
    cluster = job.name.partition("/jobs/")[0]
    history = client.call(
        client.stubs.jobs.ListJobEvents, jobs_pb2.ListJobEventsRequest(parent=job.name)
    )
    request = estimates_pb2.GetProfilingRequest(parent=cluster, workload=job.workload)
    return JobDetails(
        history=history.events,
        profiling=client.call(client.stubs.estimates.GetProfiling, request),
        network=describe_job_part(client, cluster, job),
        next_round=next_round(client, cluster) if job.state == jobs_pb2.QUEUED else "",
    )


def _note_next_round(client: Client, cluster: str) -> None:
    """Print the time of the next round on stderr, if the server reports it."""
    if text := next_round_line(client, cluster):
        print_note(text)


def _requests(
    name: str, job: jobs_pb2.Job, files: list[str], cluster: str
) -> list[jobs_pb2.SubmitJobRequest]:
    """Return the jobs to submit: the job of the options, or the jobs of the files."""
    if not files:
        required = {
            "--model": job.workload.model,
            "--batch": job.workload.global_batch,
            "--iterations": job.iterations,
            "--gpus": job.requested_gpus,
        }
        if missing := [option for option, value in required.items() if not value]:
            raise InvalidInput(
                "submit", f"needs {', '.join(missing)}, or -f FILE with one or more jobs in YAML"
            )
        return [jobs_pb2.SubmitJobRequest(job_id=name, job=job)]
    if name or job != jobs_pb2.Job():
        raise InvalidInput("submit", "takes one job from options or the jobs of --file, not both")
    from tessera.service.cli.jobs import jobfile  # noqa: PLC0415 - pydantic starts slowly

    requests = [
        request
        for file in files
        for request in jobfile.read_jobs(
            yamlfile.read_text(file), file, current_timestamp(), cluster
        )
    ]
    if len(requests) > limits.MAX_JOBS:
        raise InvalidInput(
            "submit",
            f"got {len(requests):,} jobs, but one submission takes at most {limits.MAX_JOBS:,};"
            " split the files",
        )
    return requests


def _submit(
    client: Client, to: str, requests: list[jobs_pb2.SubmitJobRequest], *, validate_only: bool
) -> list[jobs_pb2.Job]:
    # Of one job, the result is the same, but errors name the field without an index.
    if len(requests) == 1 and not requests[0].HasField("array"):
        request = jobs_pb2.SubmitJobRequest(
            parent=to,
            job_id=requests[0].job_id,
            job=requests[0].job,
            validate_only=validate_only,
        )
        return [client.call(client.stubs.jobs.SubmitJob, request)]
    batch = jobs_pb2.SubmitJobsRequest(parent=to, requests=requests, validate_only=validate_only)
    return list(client.call(client.stubs.jobs.SubmitJobs, batch).jobs)


def _follow(client: Client, name: str, output: Output) -> None:
    """Show a job until it has ended. Raises CallFailed if the job did not succeed."""
    watch_job(client.watch(name), lambda job: _details(client, job), output)


def _states(names: list[str], *, everything: bool) -> list[jobs_pb2.JobState.ValueType]:
    """Return the states to list. An empty list stands for all states."""
    known = {name: value for name, value in jobs_pb2.JobState.items() if value}
    wanted = [part.upper() for name in names for part in name.split(",")]
    for name in wanted:
        if name not in known:
            raise InvalidInput(
                "--state",
                f"unknown state {name.lower()!r}; the states are {', '.join(known).lower()}",
            )
    if wanted:
        return [known[name] for name in wanted]
    return [] if everything else [v for name, v in known.items() if name not in ENDED_STATE_NAMES]
