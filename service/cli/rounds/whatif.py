"""The command that asks what would happen: what a change does, now and over the next hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from tessera.client import Client
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options, yamlfile
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.names import cluster_name, full_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Deadline,
    MaxGpus,
    MinGpus,
    Output,
    OutputOption,
    Priority,
    Server,
    Weight,
    parse_seconds,
    to_duration,
)
from tessera.service.cli.render import print_line, print_note, show_message
from tessera.service.cli.rounds.roundoptions import with_round_options
from tessera.service.cli.rounds.whatifview import show_answer, show_offer
from tessera.v1 import jobs_pb2, scheduler_pb2, what_if_pb2

NO_DEADLINE: Final = "none"
HOUR_S: Final = 3600.0
DRY_RUN_HOURS: Final = 24.0
DRY_RUN_FUTURES: Final = 9
"""The hours and the pairs of futures from which a dry run says when its jobs start and finish."""

_CHANGES: Final = "Changes"

Change = what_if_pb2.HypotheticalChange


def add_commands(app: typer.Typer) -> None:
    """Add the command that asks what would happen."""
    app.command("whatif", rich_help_panel="Jobs")(with_round_options(ask_what_if))


def ask_what_if(
    *,
    named: scheduler_pb2.RoundOptions,
    add_nodes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE:COUNT[xGPUS]",
            help="Add nodes like the largest of a GPU type, or with that many GPUs. Repeatable.",
            rich_help_panel=_CHANGES,
        ),
    ] = None,
    lose_node: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="Lose a node. Repeatable.", rich_help_panel=_CHANGES),
    ] = None,
    job: Annotated[
        str,
        typer.Option(
            metavar="JOB",
            help="Job to change, by --weight, --priority, --deadline, --min-gpus or --max-gpus.",
            rich_help_panel=_CHANGES,
        ),
    ] = "",
    weight: Weight = None,
    priority: Priority = None,
    deadline: Deadline = None,
    min_gpus: MinGpus = None,
    max_gpus: MaxGpus = None,
    job_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Submit the jobs of a YAML file, as for `tessera submit -f`. Repeatable.",
            rich_help_panel=_CHANGES,
        ),
    ] = None,
    remove_job: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="Remove a job. Repeatable.", rich_help_panel=_CHANGES),
    ] = None,
    tenant: Annotated[
        str,
        typer.Option(
            help="Tenant to change, by --tenant-weight or --quota.", rich_help_panel=_CHANGES
        ),
    ] = "",
    tenant_weight: Annotated[
        float | None,
        typer.Option(min=0.0, help="New weight of --tenant.", rich_help_panel=_CHANGES),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=GPUS",
            help="New quota of --tenant; 'any' stands for all types. Repeatable.",
            rich_help_panel=_CHANGES,
        ),
    ] = None,
    hours: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=168.0,
            help="Hours over which futures are followed. 0: the next round only.",
        ),
    ] = 6.0,
    futures: Annotated[
        int, typer.Option(min=1, max=256, help="Most pairs of futures to follow.")
    ] = 32,
    max_jobs: Annotated[
        int, typer.Option(min=1, max=10_000, help="Most jobs in the answer.")
    ] = 100,
    time_limit: Annotated[
        str, typer.Option(help="Time limit for the answer. It limits the futures.")
    ] = "60s",
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what a change would do, to the next round and over the next hours. Nothing is changed.

    Changes can be combined. The next round is decided without and with them. Then futures of the
    cluster are sampled, each once without and once with the changes.
    """
    job_fields = {
        "weight": weight,
        "priority": priority,
        "min_gpus": min_gpus,
        "max_gpus": max_gpus,
        "deadline": deadline,
    }
    changes = [
        *map(_added_nodes, add_nodes or []),
        *(Change(node_lost=full_name(cluster, "nodes", node)) for node in lose_node or []),
        *(Change(job_removed=full_name(cluster, "jobs", one)) for one in remove_job or []),
        *_named_job_change(cluster, job, job_fields),
        *_tenant_change(cluster, tenant, tenant_weight, quota or []),
        *_added_jobs(job_file or [], cluster),
    ]
    request = scheduler_pb2.WhatIfRequest(
        parent=cluster_name(cluster), futures=futures, max_jobs=max_jobs
    )
    if not changes and named == scheduler_pb2.RoundOptions():
        raise InvalidInput("whatif", "needs a change, e.g. --add-nodes h100:1")
    request.hypothesis.changes.extend(changes)
    request.hypothesis.options.CopyFrom(named)
    request.horizon.CopyFrom(to_duration(hours * HOUR_S))
    with connect(server) as client:
        limit_s = parse_seconds("--time-limit", time_limit)
        answer = client.call(client.stubs.scheduler.WhatIf, request, limit_s)
    if not show_message(answer, Output.JSON if json else output):
        show_answer(answer)


def dry_run_jobs(
    client: Client, cluster: str, requests: Sequence[jobs_pb2.SubmitJobRequest], output: Output
) -> None:
    """Show what jobs would get now, what they would pay and displace, and when they would run.

    ``cluster`` is a full name. Nothing is submitted.
    """
    request = scheduler_pb2.WhatIfRequest(
        parent=cluster,
        hypothesis=scheduler_pb2.Hypothesis(changes=[Change(job_added=one) for one in requests]),
        horizon=to_duration(DRY_RUN_HOURS * HOUR_S),
        futures=DRY_RUN_FUTURES,
    )
    answer = client.call(client.stubs.scheduler.WhatIf, request)
    if output is Output.NAME:
        for offer in answer.offers:
            print_line(offer.job)
    elif not show_message(answer, output):
        for offer in answer.offers:
            show_offer(offer, answer.hours, answer.create_time)
        for note in answer.notes:
            print_note(f"note: {note}")


def _added_nodes(text: str) -> Change:
    kind, colon, amount = text.partition(":")
    count, by, gpus = amount.partition("x")
    if not colon or not count.isdigit() or (by and not gpus.isdigit()):
        raise InvalidInput(
            "--add-nodes",
            f"{text!r} must be TYPE:COUNT or TYPE:COUNTxGPUS, e.g. h100:4 or h100:4x8",
        )
    added = what_if_pb2.AddedNodes(
        gpu_type=kind, count=int(count), gpus_per_node=int(gpus) if gpus else 0
    )
    return Change(nodes_added=added)


def _named_job_change(cluster: str, job: str, values: Mapping[str, Any]) -> list[Change]:
    given = [name for name, value in values.items() if value is not None]
    if job and not given:
        raise InvalidInput("--job", "needs what to change of the job, e.g. --weight 2")
    if given and not job:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidInput("--job", f"is needed, since {flags} is for a job")
    return [_change_of_job(full_name(cluster, "jobs", job), values)] if job else []


def _change_of_job(job: str, values: Mapping[str, Any]) -> Change:
    """Return the change of a job, a full name, to ``values`` by options. What is None stays as it is."""
    change = what_if_pb2.JobChange(job=job)
    for name, value in values.items():
        if value is not None and name != "deadline":
            setattr(change, name, value)
    deadline = values.get("deadline")
    if deadline == NO_DEADLINE:
        change.no_deadline = True
    elif deadline is not None:
        change.deadline.CopyFrom(options.parse_time("--deadline", deadline, current_timestamp()))
    return Change(job_changed=change)


def ask_about_job(
    client: Client, job: str, values: Mapping[str, Any], hours: float, limit_s: float
) -> what_if_pb2.WhatIfResponse:
    """Return what new ``values`` of a job do to the next round and, unless ``hours`` is 0, afterwards.

    ``job`` is a full name, and the values are those of the options for a job. Raises CallError.
    """
    changes = [_change_of_job(job, values)]
    request = scheduler_pb2.WhatIfRequest(
        parent=job.rpartition("/jobs/")[0], hypothesis=scheduler_pb2.Hypothesis(changes=changes)
    )
    if hours:
        request.horizon.CopyFrom(to_duration(hours * HOUR_S))
    answer: what_if_pb2.WhatIfResponse = client.call(
        client.stubs.scheduler.WhatIf, request, limit_s
    )
    return answer


def _tenant_change(
    cluster: str, tenant: str, weight: float | None, quotas: list[str]
) -> list[Change]:
    if not tenant:
        if weight is not None or quotas:
            raise InvalidInput(
                "--tenant", "is needed, since --tenant-weight and --quota are for one"
            )
        return []
    change = what_if_pb2.TenantChange(tenant=full_name(cluster, "tenants", tenant), weight=weight)
    for text in quotas:
        kind, equals, gpus = text.partition("=")
        if not equals or not gpus.isdigit():
            raise InvalidInput("--quota", f"{text!r} must be TYPE=GPUS, e.g. h100=16 or any=32")
        if kind in change.quotas:
            raise InvalidInput("--quota", f"has {kind} twice; give one quota for each type")
        change.quotas[kind] = int(gpus)
    if weight is None and not quotas:
        raise InvalidInput("--tenant", "needs what to change, e.g. --quota h100=16")
    return [Change(tenant_changed=change)]


def _added_jobs(files: list[str], cluster: str) -> list[Change]:
    if not files:
        return []
    from tessera.service.cli.jobs import jobfile  # noqa: PLC0415 - pydantic starts slowly

    return [
        Change(job_added=request)
        for file in files
        for request in jobfile.read_jobs(
            yamlfile.read_text(file), file, current_timestamp(), cluster
        )
    ]
