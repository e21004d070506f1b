"""Commands on shadows: policies that decide on the states of rounds, without any effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from tessera.service.cli.client import connect, new_request_id
from tessera.service.cli.deletion import AllowMissing
from tessera.service.cli.names import cluster_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
    parse_seconds,
    to_duration,
)
from tessera.service.cli.policies import Why
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_number,
    format_time,
    print_line,
    print_note,
    show_facts,
    show_message,
    show_table,
)
from tessera.service.cli.roundoptions.commands import with_round_options
from tessera.service.cli.roundview import policy_text
from tessera.v1 import scheduler_pb2

HONESTY: Final = (
    "each round starts from what the policy in force made of the cluster: this compares single decisions,"
    " not what would have become of the cluster; `tessera whatif` with the same options compares the next"
    " hours"
)

FIGURE_COLUMNS: Final[Sequence[Column[scheduler_pb2.ComparedFigure]]] = (
    Column("FIGURE", lambda f: f.name),
    Column("POLICY", lambda f: format_number(f.policy), right=True),
    Column("SHADOW", lambda f: format_number(f.shadow), right=True),
    Column("DIFFERENCE", lambda f: format_number(f.difference), right=True),
    Column(
        "95 % INTERVAL",
        lambda f: (
            f"{format_number(f.low)} to {format_number(f.high)}" if f.HasField("low") else "unknown"
        ),
    ),
)

ROUND_COLUMNS: Final[Sequence[Column[scheduler_pb2.ShadowRound]]] = (
    Column("ROUND", lambda r: r.round.rpartition("/")[2], right=True),
    Column("EFFECTIVE GPUS", lambda r: _pair(r, "effective_gpus")),
    Column("IN USE", lambda r: _pair(r, "used_gpus")),
    Column("RUNNING", lambda r: _pair(r, "running")),
    Column("WAITING", lambda r: _pair(r, "waiting")),
    Column("STARTED", lambda r: _pair(r, "started")),
    Column("SUSPENDED", lambda r: _pair(r, "suspended")),
    Column("CHANGED", lambda r: _pair(r, "changed")),
    Column("SECONDS", lambda r: _pair(r, "solve_seconds")),
    Column("PROBLEM", lambda r: r.problem),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands on shadows."""
    group = typer.Typer(
        help="Let a second policy decide on the same states, without effect, and compare it.",
        no_args_is_help=True,
    )
    group.command("set")(set_shadow)
    group.command("show")(show_shadow)
    group.command("stop")(stop_shadow)
    app.add_typer(group, name="shadow", rich_help_panel="Rounds")


@with_round_options
def set_shadow(
    named: scheduler_pb2.RoundOptions,
    message: Why = "",
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set the shadow of a cluster. It replaces an earlier one, whose rounds are deleted."""
    request = scheduler_pb2.SetShadowRequest(
        parent=cluster_name(cluster),
        options=named,
        message=message,
        validate_only=validate_only,
        request_id=new_request_id(),
    )
    with connect(server) as client:
        shadow = client.call(client.scheduler.SetShadow, request)
    if output is Output.NAME:
        print_line(shadow.name)
    elif not show_message(shadow, output):
        show_facts(_facts(shadow))
    print_note(
        "valid; nothing changed"
        if validate_only
        else "the shadow decides from the next round on; `tessera shadow show` compares it"
    )


def show_shadow(
    window: Annotated[
        str, typer.Option(metavar="DURATION", help="Compare the rounds of this time until now.")
    ] = "7d",
    rounds: Annotated[
        int,
        typer.Option("--rounds", min=0, max=1000, help="List this number of newest rounds, too."),
    ] = 0,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compare the decisions of a cluster's shadow with those of its rounds."""
    request = scheduler_pb2.GetShadowRequest(
        name=_name(cluster),
        window=to_duration(parse_seconds("--window", window)),
        rounds=rounds,
    )
    with connect(server) as client:
        compared = client.call(client.scheduler.GetShadow, request)
    if output is Output.NAME:
        print_line(compared.shadow.name)
        return
    if show_message(compared, output):
        return
    show_facts(_facts(compared.shadow) + _verdicts(compared))
    if compared.figures:
        show_table(compared.figures, FIGURE_COLUMNS)
        print_note(HONESTY)
    if compared.rounds:
        print_note("single rounds, as POLICY / SHADOW:")
        show_table(compared.rounds, ROUND_COLUMNS)


def stop_shadow(
    allow_missing: AllowMissing = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Delete the shadow of a cluster, with the rounds that it decided."""
    request = scheduler_pb2.DeleteShadowRequest(
        name=_name(cluster),
        allow_missing=allow_missing,
        validate_only=validate_only,
        request_id=new_request_id(),
    )
    with connect(server) as client:
        client.call(client.scheduler.DeleteShadow, request)
    print_note("valid; nothing changed" if validate_only else "the shadow was deleted")


def _name(cluster: str) -> str:
    return f"{cluster_name(cluster)}/shadow"


def _facts(shadow: scheduler_pb2.Shadow) -> list[tuple[str, str]]:
    return [
        ("shadow", policy_text(shadow.effective_options)),
        ("solver", shadow.effective_options.solver),
        ("set", format_time(shadow.create_time)),
        ("by", shadow.set_by),
        ("because", shadow.message),
    ]


def _verdicts(compared: scheduler_pb2.GetShadowResponse) -> list[tuple[str, str]]:
    if not compared.compared_rounds:
        rounds = "none was decided by the shadow yet"
    else:
        rounds = f"{count_noun(compared.compared_rounds, 'round')} decided by both"
    if compared.failed_rounds:
        rounds += f"; the shadow failed on {compared.failed_rounds}: {compared.problem}"
    facts = [("rounds", rounds)]
    for measure, verdicts in (("policy", compared.by_policy), ("shadow", compared.by_shadow)):
        if compared.compared_rounds:
            text = (
                f"better in {verdicts.better}, equal in {verdicts.equal}, worse in {verdicts.worse}"
            )
            facts.append((f"by the {measure}'s goals", f"the shadow is {text}"))
    return facts


def _pair(decided: scheduler_pb2.ShadowRound, figure: str) -> str:
    if not decided.HasField("shadow"):
        return ""
    values = (getattr(decided.policy, figure), getattr(decided.shadow, figure))
    return " / ".join(map(format_number, values))
