"""Commands that change jobs: update, cancel, hold and release."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Final, TypeVar

import grpc
import typer
from google.protobuf.field_mask_pb2 import FieldMask

from tessera.client import CallError, Client, NotAllowed, NotFound
from tessera.client.requests import field_path
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.client import Exit, connect, current_timestamp, explain_failure
from tessera.service.cli.completion import complete_jobs
from tessera.service.cli.jobs.changeoptions import ChangeOptions
from tessera.service.cli.jobs.jobfields import build_optional_job
from tessera.service.cli.jobs.jobview import READABLE_OUTPUTS, print_warnings, show_jobs
from tessera.service.cli.names import full_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    JobName,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
)
from tessera.service.cli.render import print_error, print_note, show_message
from tessera.service.cli.rounds.whatif import ask_about_job
from tessera.service.cli.rounds.whatifview import describe_effect, show_answer
from tessera.v1 import jobs_pb2

SUPPOSABLE: Final = ("weight", "priority", "deadline", "min_gpus", "max_gpus")
"""The values of a job for which the server says what a change of them would do."""
DRY_RUN_HOURS: Final = 6.0
ANSWER_S: Final = 60.0
"""Time limit of such an answer."""

_ChangeRequest = TypeVar(
    "_ChangeRequest", jobs_pb2.CancelJobRequest, jobs_pb2.HoldJobRequest, jobs_pb2.ReleaseJobRequest
)

JobNames = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB...",
        help="Ids or full names of jobs, or ids of arrays.",
        autocompletion=complete_jobs,
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands that change jobs."""
    panel = "Jobs"
    update = options.with_options(update_job, "changes", ChangeOptions)
    app.command("update", rich_help_panel=panel)(update)
    app.command("cancel", rich_help_panel=panel)(cancel_jobs)
    app.command("hold", rich_help_panel=panel)(hold_jobs)
    app.command("release", rich_help_panel=panel)(release_jobs)


def update_job(
    *,
    name: JobName,
    changes: ChangeOptions,
    validate_only: ValidateOnly = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what the change would do, now and over the next hours. Change nothing.",
        ),
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change a job's weight, priority, deadline, labels, limits, pins, or where it may run.

    On a terminal, it also says what a new weight, priority, deadline or limit of GPUs does to the next
    round.
    """
    given: dict[str, Any] = {field: value for field, value in changes.items() if value is not None}
    paths = [field_path(field) for field in given]
    if not paths:
        raise InvalidInput(
            "update",
            "needs a change, e.g. --weight, --priority, --deadline or --allowed-gpu-types; `tessera update"
            " --help` lists all",
        )
    job = build_optional_job(given, cluster)
    job.name = full_name(cluster, "jobs", name)
    request = jobs_pb2.UpdateJobRequest(
        job=job,
        update_mask=FieldMask(paths=paths),
        validate_only=validate_only,
    )
    supposed: dict[str, Any] = {path: given[path] for path in SUPPOSABLE if path in given}
    if dry_run and (validate_only or len(supposed) < len(paths)):
        raise InvalidInput(
            "--dry-run",
            "is for changes of --weight, --priority, --deadline, --min-gpus and --max-gpus alone; give"
            " the other options without it",
        )
    with connect(server) as client:
        if dry_run:
            answer = ask_about_job(client, job.name, supposed, DRY_RUN_HOURS, ANSWER_S)
            if not show_message(answer, output):
                show_answer(answer)
            return
        shows = output in READABLE_OUTPUTS and sys.stdout.isatty() and not validate_only
        effect = _effect_of(client, job.name, supposed) if supposed and shows else ""
        changed = client.call(client.stubs.jobs.UpdateJob, request)
        show_jobs([changed], current_timestamp(), output)
        print_warnings([changed])
        if effect:
            print_note(effect)


def _effect_of(client: Client, job: str, values: Mapping[str, Any]) -> str:
    """Return a sentence on what new values of ``job`` do to the next round, or why nobody knows."""
    try:
        return describe_effect(ask_about_job(client, job, values, 0.0, ANSWER_S), job)
    except CallError as error:
        problem = explain_failure(error, client)
        return f"what the change does to the next round is not known: {problem}"


def cancel_jobs(
    names: JobNames,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Cancel jobs. Running jobs are stopped; none of them starts again."""
    with connect(server) as client:
        method, request = client.stubs.jobs.CancelJob, jobs_pb2.CancelJobRequest
        requests = _change_requests(request, cluster, names, validate_only=validate_only)
        change = jobs_pb2.ChangeArrayRequest.CANCEL
        _change_jobs(
            client, method, change, requests, (jobs_pb2.CANCELLING, jobs_pb2.CANCELLED), output
        )


def hold_jobs(
    names: JobNames,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Hold jobs. Running jobs are stopped; all of them wait until `release`."""
    with connect(server) as client:
        method, request = client.stubs.jobs.HoldJob, jobs_pb2.HoldJobRequest
        requests = _change_requests(request, cluster, names, validate_only=validate_only)
        change = jobs_pb2.ChangeArrayRequest.HOLD
        _change_jobs(client, method, change, requests, (jobs_pb2.HOLDING, jobs_pb2.HELD), output)


def release_jobs(
    names: JobNames,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Release held jobs, which return to the queue."""
    with connect(server) as client:
        method, request = client.stubs.jobs.ReleaseJob, jobs_pb2.ReleaseJobRequest
        requests = _change_requests(request, cluster, names, validate_only=validate_only)
        change = jobs_pb2.ChangeArrayRequest.RELEASE
        _change_jobs(client, method, change, requests, (), output)


def _change_requests(
    request: Callable[..., _ChangeRequest], cluster: str, names: list[str], *, validate_only: bool
) -> list[_ChangeRequest]:
    """Return a request for each job."""
    full = [full_name(cluster, "jobs", name) for name in names]
    return [request(name=name, validate_only=validate_only) for name in full]


def _change_jobs(
    client: Client,
    method: grpc.UnaryUnaryMultiCallable[_ChangeRequest, jobs_pb2.Job],
    change: jobs_pb2.ChangeArrayRequest.Change.ValueType,
    requests: list[_ChangeRequest],
    wanted: Collection[jobs_pb2.JobState.ValueType],
    output: Output,
) -> None:
    """Call ``method`` for each job, print the changed jobs and report each refusal by name.

    A name that no job has may be that of an array, to which ``change`` happens. A job that is already
    in a ``wanted`` state is not a failure. The command ends with the highest exit code of the
    failures. If no server answers, the remaining jobs are not tried.
    """
    changed: list[jobs_pb2.Job] = []
    worst = Exit.OK
    for number, request in enumerate(requests):
        try:
            if job := _change_named(client, method, change, request, wanted):
                changed.append(job)
        except CallError as error:
            failure = explain_failure(error, client)
            print_error(f"{short_name(request.name)}: {failure}")
            worst = max(worst, failure.exit_code)
            if failure.exit_code is Exit.UNREACHABLE:
                if rest := [short_name(r.name) for r in requests[number + 1 :]]:
                    print_error(f"not tried: {', '.join(rest)}")
                break
    if changed or output not in READABLE_OUTPUTS:
        show_jobs(changed, current_timestamp(), output)
    if worst:
        raise typer.Exit(worst)


def _change_named(
    client: Client,
    method: grpc.UnaryUnaryMultiCallable[_ChangeRequest, jobs_pb2.Job],
    change: jobs_pb2.ChangeArrayRequest.Change.ValueType,
    request: _ChangeRequest,
    wanted: Collection[jobs_pb2.JobState.ValueType],
) -> jobs_pb2.Job | None:
    """Return the changed job, or None if an array has the name and was changed."""
    try:
        return _change_job(client, method, request, wanted)
    except NotFound:
        if not _change_array(client, request, change):
            raise
        return None


def _change_array(
    client: Client,
    request: _ChangeRequest,
    change: jobs_pb2.ChangeArrayRequest.Change.ValueType,
) -> bool:
    """Change the array that has the name of ``request``; return whether there is one."""
    asked = jobs_pb2.ChangeArrayRequest(
        name=request.name.replace("/jobs/", "/arrays/"),
        change=change,
        validate_only=request.validate_only,
    )
    try:
        array = client.call(client.stubs.jobs.ChangeArray, asked)
    except NotFound:
        return False
    counts = ", ".join(f"{count:,} {state}" for state, count in sorted(array.states.items()))
    print_note(f"array {short_name(array.name)}: {counts}")
    return True


def _change_job(
    client: Client,
    method: grpc.UnaryUnaryMultiCallable[_ChangeRequest, jobs_pb2.Job],
    request: _ChangeRequest,
    wanted: Collection[jobs_pb2.JobState.ValueType],
) -> jobs_pb2.Job:
    try:
        return client.call(method, request)
    except NotAllowed:
        job = client.call(client.stubs.jobs.GetJob, jobs_pb2.GetJobRequest(name=request.name))
        if job.state not in wanted:
            raise
        print_note(f"{short_name(job.name)} is already {jobs_pb2.JobState.Name(job.state).lower()}")
        return job
