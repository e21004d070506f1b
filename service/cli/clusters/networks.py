"""Commands on network plans: the jobs' ranks and paths, and earlier plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.client import Client, NotFound, ServerTooOld
from tessera.service.cli.client import connect, current_timestamp, explain_failure
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    refuse_options,
)
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_age,
    format_number,
    format_span,
    format_time,
    print_line,
    print_note,
    show_list,
    show_message,
    show_table,
)
from tessera.v1 import jobs_pb2
from tessera.v1 import networks_pb2 as pb

DECISION_COLUMNS: Final[Sequence[Column[pb.NetworkDecision]]] = (
    Column("RANK", lambda d: str(d.rank), right=True),
    Column("JOB", lambda d: short_name(d.job)),
    Column("LEVEL", lambda d: "" if d.note else str(d.level), right=True),
    Column("DSCP", lambda d: _dscp(d), right=True),
    Column("INTENSITY", lambda d: _flops(d.intensity), right=True),
    Column("PRIORITY", lambda d: _flops(d.priority), right=True),
    Column("SHARES LINKS WITH", lambda d: ", ".join(map(short_name, d.contending_jobs))),
    Column("NOTE", lambda d: d.note),
)


class RouteRow(NamedTuple):
    """A route of a job."""

    job: str
    route: pb.NetworkRoute


ROUTE_COLUMNS: Final[Sequence[Column[RouteRow]]] = (
    Column("JOB", lambda w: w.job),
    Column("FROM", lambda w: w.route.source),
    Column("TO", lambda w: w.route.target),
    Column("VIA", lambda w: " > ".join(w.route.via)),
    Column("MB PER ITERATION", lambda w: format_number(w.route.sent_bytes / 1e6), right=True),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands on network plans."""
    group = typer.Typer(
        help="Show the network plan in force, make a new one, or list earlier ones.",
        invoke_without_command=True,
    )
    group.callback()(show_network_plan)
    group.command("plan")(plan_network)
    group.command("history")(list_network_plans)
    app.add_typer(group, name="network", rich_help_panel="Rounds")


Paths = Annotated[
    bool, typer.Option("--paths", help="Also show the paths of traffic that had a choice of paths.")
]


def show_network_plan(
    context: typer.Context,
    paths: Paths = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the network plan in force: jobs by rank, the most urgent first.

    The higher of two levels is served first. DSCP is the mark of a job's packets. Intensity is TFLOP for
    each second of communication; priority is the intensity, corrected for the jobs that share its links.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    with connect(server) as client:
        plan_in_force = get_plan_in_force(client, cluster_name(cluster))
    _show(plan_in_force, output, paths=paths)


def plan_network(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make a plan without putting it in force.")
    ] = False,
    paths: Paths = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan the paths and priority levels of the jobs that run now. No job is started, moved or stopped."""
    request = pb.PlanNetworkRequest(parent=cluster_name(cluster), dry_run=dry_run)
    with connect(server) as client:
        made = client.call(client.stubs.networks.PlanNetwork, request)
    _show(made, output, paths=paths)
    if dry_run:
        print_note("the plan was not put in force")


def list_network_plans(
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of plans to list.")
    ] = 20,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the latest network plans, newest first, with the cause of each."""
    request = pb.ListNetworkPlansRequest(parent=cluster_name(cluster), page_size=limit)
    with connect(server) as client:
        listed = client.call(client.stubs.networks.ListNetworkPlans, request)
    show_list(listed, listed.plans, _plans(current_timestamp()), output)
    if not listed.plans:
        print_note("no network plan yet; describe the network with `tessera topology set FILE`")


def get_plan_in_force(client: Client, cluster: str) -> pb.NetworkPlan:
    """Return the network plan in force.

    Raises:
        CallFailed: there is no plan. The message says what to do.
    """
    try:
        return _get_plan(client, cluster)
    except NotFound as failed:
        hint = (
            "; describe the network with `tessera topology set FILE`. It is planned at the next start"
            " or end of a job, or by `tessera network plan`"
        )
        raise explain_failure(failed, client, hint) from failed


def _get_plan(client: Client, cluster: str, job: str = "") -> pb.NetworkPlan:
    """Return the network plan in force, restricted to ``job`` (a full name) if it is given."""
    request = pb.GetNetworkPlanRequest(name=f"{cluster}/networkPlans/-", job=job)
    return client.call(client.stubs.networks.GetNetworkPlan, request)


def describe_job_part(client: Client, cluster: str, job: jobs_pb2.Job) -> str:
    """Return a line on a job's part in the network plan in force.

    Return "" if the job holds no GPUs or there is no plan. The list of plans is read first, because a
    server logs each request for something that does not exist.
    """
    if not job.allocation.shares:
        return ""
    request = pb.ListNetworkPlansRequest(parent=cluster, page_size=1)
    try:
        if not client.call(client.stubs.networks.ListNetworkPlans, request).plans:
            return ""
        plan_in_force = _get_plan(client, cluster, job.name)
    except (NotFound, ServerTooOld):
        return ""
    return (
        describe_part(plan_in_force.decisions[0], plan_in_force.levels)
        if plan_in_force.decisions
        else "not planned yet"
    )


def describe_part(decision: pb.NetworkDecision, levels: int) -> str:
    """Return a line on a job's part in a network plan."""
    if not math.isfinite(decision.intensity) and decision.note:
        return f"not planned: {decision.note}"
    if decision.dscp < 0 and not decision.contending_jobs:
        return f"rank {decision.rank}; sends no traffic over the network" + _noted(decision)
    mark = f", DSCP {decision.dscp}" if decision.dscp >= 0 else ""
    sharing = ", ".join(map(short_name, decision.contending_jobs)) or "no other job"
    return (
        f"rank {decision.rank}, level {decision.level} of 0 to {levels - 1}{mark}; shares links"
        f" with {sharing}" + _noted(decision)
    )


def _noted(decision: pb.NetworkDecision) -> str:
    return f"; {decision.note}" if decision.note else ""


def _show(network_plan: pb.NetworkPlan, output: Output, *, paths: bool) -> None:
    if show_message(network_plan, output):
        return
    if output is Output.NAME:
        for decision in network_plan.decisions:
            print_line(decision.job)
        return
    if network_plan.decisions:
        show_table(network_plan.decisions, DECISION_COLUMNS)
    if paths:
        ways = [
            RouteRow(short_name(d.job), route) for d in network_plan.decisions for route in d.routes
        ]
        if ways:
            show_table(ways, ROUTE_COLUMNS)
        else:
            print_note("no traffic of any job has a choice of paths")
    made = f", {format_time(network_plan.plan_time)}" if network_plan.HasField("plan_time") else ""
    print_note(
        f"plan {short_name(network_plan.name)} ({network_plan.cause}{made}):"
        f" {count_noun(len(network_plan.decisions), 'job')},"
        f" {network_plan.levels} levels, planned in {network_plan.seconds:.2g} s"
    )
    for text in network_plan.notes:
        print_note(text)


def _plans(moment: Timestamp) -> Sequence[Column[pb.NetworkPlan]]:
    return (
        Column("PLAN", lambda p: short_name(p.name), right=True),
        Column("CAUSE", lambda p: p.cause),
        Column("AGE", lambda p: format_age(p.plan_time, moment), right=True),
        Column("ROUND", lambda p: short_name(p.round), right=True),
        Column("LEVELS", lambda p: str(p.levels), right=True),
        Column("CHANGED", lambda p: f"{p.changed:,}", right=True),
        Column(
            "TOOK",
            lambda p: f"{p.seconds * 1e3:.0f} ms" if p.seconds < 1 else format_span(p.seconds),
            right=True,
        ),
    )


def _dscp(decision: pb.NetworkDecision) -> str:
    return str(decision.dscp) if decision.dscp >= 0 else ""


def _flops(value: float) -> str:
    """Return flop/s in TFLOP/s, or "" if the job has no traffic."""
    return format_number(value / 1e12) if math.isfinite(value) else ""
