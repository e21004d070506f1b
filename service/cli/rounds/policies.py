"""Commands that set, show and restore the standing policy of a cluster's rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Final

import typer

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.names import cluster_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
)
from tessera.service.cli.render import (
    Column,
    format_age,
    format_time,
    print_line,
    print_note,
    show_facts,
    show_list,
    show_message,
)
from tessera.service.cli.rounds.roundoptions import override_options, with_round_options
from tessera.service.cli.rounds.roundview import policy_text
from tessera.v1 import scheduler_pb2

MAX_VERSION: Final = 2**53

Why = Annotated[
    str,
    typer.Option("--message", "-m", metavar="TEXT", help="Why the policy is set, for others."),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands on standing policies."""
    group = typer.Typer(
        help="Set, show or restore the standing policy of a cluster's rounds.", no_args_is_help=True
    )
    group.command("set")(set_policy)
    group.command("show")(show_policy)
    group.command("history")(list_policies)
    group.command("restore")(restore_policy)
    app.add_typer(group, name="policy", rich_help_panel="Rounds")


@with_round_options
def set_policy(
    named: scheduler_pb2.RoundOptions,
    message: Why = "",
    from_defaults: Annotated[
        bool,
        typer.Option(
            "--from-defaults", help="Start from the defaults, and not from the policy in force."
        ),
    ] = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set the standing policy of a cluster's rounds. All replicas follow it from their next round on.

    It is refused if somebody else sets the policy at the same time.
    """
    parent = cluster_name(cluster)
    if not named.ListFields() and not from_defaults:
        raise InvalidInput(
            "policy", "names no option to set; name some, or start with --from-defaults"
        )
    request = scheduler_pb2.SetPolicyRequest(
        parent=parent, message=message, validate_only=validate_only
    )
    with connect(server) as client:
        before = client.call(
            client.stubs.scheduler.GetPolicy, scheduler_pb2.GetPolicyRequest(parent=parent)
        )
        request.etag = before.etag
        if not from_defaults:
            request.options.CopyFrom(before.options)
        override_options(request.options, named)
        policy = client.call(client.stubs.scheduler.SetPolicy, request)
    _show(policy, output)
    _note_change(policy, validate_only=validate_only)


def show_policy(
    version: Annotated[
        int | None,
        typer.Argument(
            min=0,
            max=MAX_VERSION,
            metavar="[VERSION]",
            help="The version. Default: the one in force.",
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the standing policy of a cluster's rounds, or an earlier version of it."""
    request = scheduler_pb2.GetPolicyRequest(parent=cluster_name(cluster), version=version)
    with connect(server) as client:
        _show(client.call(client.stubs.scheduler.GetPolicy, request), output)


def list_policies(
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of versions to list.")
    ] = 20,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the versions of a cluster's standing policy, newest first."""
    request = scheduler_pb2.ListPoliciesRequest(
        parent=cluster_name(cluster), page_size=min(limit, 1000)
    )
    with connect(server) as client:
        versions = client.pages(
            client.stubs.scheduler.ListPolicies, request, lambda page: page.policies
        )
        policies = list(islice(versions, limit))
    response = scheduler_pb2.ListPoliciesResponse(policies=policies)
    show_list(response, response.policies, _policy_columns(), output)
    if not policies:
        print_note(
            "no policy was set, so rounds follow the server's settings; `tessera policy set` sets one"
        )


def restore_policy(
    version: Annotated[
        int,
        typer.Argument(
            min=0,
            max=MAX_VERSION,
            metavar="VERSION",
            help="The version to go back to. 0 is the policy of the server's settings.",
        ),
    ],
    message: Why = "",
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set an earlier version of the standing policy again, as a new version."""
    request = scheduler_pb2.SetPolicyRequest(
        parent=cluster_name(cluster),
        restore_version=version,
        message=message or f"restores version {version}",
        validate_only=validate_only,
    )
    with connect(server) as client:
        policy = client.call(client.stubs.scheduler.SetPolicy, request)
    _show(policy, output)
    _note_change(policy, validate_only=validate_only)


def _note_change(policy: scheduler_pb2.StandingPolicy, *, validate_only: bool) -> None:
    print_note(
        "valid; nothing changed"
        if validate_only
        else f"version {policy.version} is in force from the next round on"
    )


def _show(policy: scheduler_pb2.StandingPolicy, output: Output) -> None:
    if output is Output.NAME:
        print_line(policy.name)
    elif not show_message(policy, output):
        show_facts(_facts(policy))


def _facts(policy: scheduler_pb2.StandingPolicy) -> list[tuple[str, str]]:
    version = f"{policy.version}"
    if policy.from_settings:
        version += " (the server's settings)"
    was_set = policy.HasField("create_time")
    return [
        ("version", version),
        ("policy", policy_text(policy.effective_options)),
        ("solver", policy.effective_options.solver),
        ("set", format_time(policy.create_time) if was_set else ""),
        ("by", policy.set_by),
        ("because", policy.message),
    ]


def _policy_columns() -> Sequence[Column[scheduler_pb2.StandingPolicy]]:
    now = current_timestamp()
    return (
        Column("VERSION", lambda p: str(p.version), right=True),
        Column("POLICY", lambda p: policy_text(p.effective_options)),
        Column("SET", lambda p: format_age(p.create_time, now)),
        Column("BY", lambda p: p.set_by),
        Column("BECAUSE", lambda p: p.message),
    )
