"""Commands on identities: tokens of users, join tokens and certificates of agents, the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Final

import typer

from tessera.client import Client
from tessera.formulation.base.secrets import hide_secrets
from tessera.service.cli import options
from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
)
from tessera.service.cli.render import (
    Column,
    count_noun,
    format_time,
    print_line,
    print_note,
    show_items,
)
from tessera.service.cli.rounds.certificates import export_certificate, verify_certificate
from tessera.v1 import access_pb2

PANEL: Final = "Access"

TOKEN_COLUMNS: Final[Sequence[Column[access_pb2.Token]]] = (
    Column("TOKEN", lambda t: t.name),
    Column("ROLE", lambda t: t.role),
    Column("TENANTS", lambda t: ", ".join(t.tenants) or "all"),
    Column("CLUSTERS", lambda t: ", ".join(t.clusters) or "all"),
    Column("EXPIRES", lambda t: _ending(t)),
    Column("ID", lambda t: t.id, wide=True),
    Column("CREATED", lambda t: format_time(t.create_time), wide=True),
    Column("CREATED BY", lambda t: t.created_by, wide=True),
)

JOIN_COLUMNS: Final[Sequence[Column[access_pb2.JoinToken]]] = (
    Column("JOIN TOKEN", lambda t: t.id),
    Column("NODES", lambda t: ", ".join(t.nodes)),
    Column("USED", lambda t: f"{t.used} of {t.uses}", right=True),
    Column("EXPIRES", lambda t: _ending(t)),
    Column("CREATED BY", lambda t: t.created_by),
)

CERTIFICATE_COLUMNS: Final[Sequence[Column[access_pb2.Certificate]]] = (
    Column("AGENT", lambda c: c.agent),
    Column("NODES", lambda c: _nodes(c.nodes)),
    Column("EXPIRES", lambda c: _ending(c)),
    Column("SERIAL", lambda c: c.serial, wide=True),
    Column("JOIN TOKEN", lambda c: c.join_token, wide=True),
)

AUDIT_COLUMNS: Final[Sequence[Column[access_pb2.AuditEntry]]] = (
    Column("TIME", lambda e: format_time(e.time)),
    Column("WHO", lambda e: e.subject or "(unknown)"),
    Column("ROLE", lambda e: e.role),
    Column("WHAT", lambda e: e.method),
    Column("TO", lambda e: e.target),
    Column("OUTCOME", lambda e: e.outcome if e.count == 1 else f"{e.outcome} x {e.count}"),
    Column("FROM", lambda e: e.peer),
    Column("DETAIL", lambda e: e.detail, wide=True),
    Column("REQUEST", lambda e: e.request_id, wide=True),
    Column("PROOF", lambda e: e.proof, wide=True),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands on identities."""
    tokens = typer.Typer(help="Create, list or revoke tokens of users.", no_args_is_help=True)
    tokens.command("create")(create_token)
    tokens.command("list")(list_tokens)
    tokens.command("revoke")(revoke_token)
    app.add_typer(tokens, name="token", rich_help_panel=PANEL)
    joins = typer.Typer(
        help="Create, list or revoke tokens with which agents join a cluster.", no_args_is_help=True
    )
    joins.command("create")(create_join_token)
    joins.command("list")(list_join_tokens)
    joins.command("revoke")(revoke_join_token)
    app.add_typer(joins, name="join-token", rich_help_panel=PANEL)
    certificates = typer.Typer(
        help="Check the certificates of rounds' bounds. List or revoke those of agents.",
        no_args_is_help=True,
    )
    certificates.command("list")(list_certificates)
    certificates.command("revoke")(revoke_agent)
    certificates.command("verify")(verify_certificate)
    certificates.command("export")(export_certificate)
    app.add_typer(certificates, name="certificate", rich_help_panel=PANEL)
    app.command("audit", rich_help_panel=PANEL)(show_audit)


def create_token(
    name: Annotated[str, typer.Argument(help="Who uses the token, e.g. alice or ci.")],
    role: Annotated[
        str, typer.Option(help="The token's role: viewer, user, operator or admin.")
    ] = "user",
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="A tenant whose jobs the token sees and may submit. Repeatable."),
    ] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="Let a viewer or user see all tenants.")
    ] = False,
    only_cluster: Annotated[
        list[str] | None,
        typer.Option(help="A cluster that the token sees. Repeatable. Default: all."),
    ] = None,
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="When the token expires: 30d, or a time (RFC 3339).")
    ] = "90d",
    server: Server = DEFAULT_SERVER,
) -> None:
    """Create a token of a user, and print it on stdout. It cannot be shown again.

    Save it in a file that only its user can read, and set TESSERA_TOKEN_FILE to that file.
    """
    token = access_pb2.Token(
        name=name,
        role=role,
        tenants=tenant or (),
        all_tenants=all_tenants,
        clusters=only_cluster or (),
        expire_time=options.parse_time("--expires", expires, current_timestamp()),
    )
    with connect(server) as client:
        answer = client.call(
            client.stubs.access.CreateToken, access_pb2.CreateTokenRequest(token=token)
        )
    print_line(answer.text)
    print_note(
        f"token {name} with the role {answer.token.role} expires at"
        f" {format_time(answer.token.expire_time)}; it cannot be shown again"
    )


def list_tokens(
    ended: Annotated[
        bool, typer.Option("--ended", help="Also list revoked and expired tokens.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List tokens by name. The tokens themselves are not kept and cannot be shown."""
    with connect(server) as client:
        request = access_pb2.ListTokensRequest(with_ended=ended)
        answer = client.call(client.stubs.access.ListTokens, request)
    show_items(answer, answer.tokens, TOKEN_COLUMNS, output)
    if not answer.tokens:
        print_note("there are no tokens; `tessera token create` makes one")


def revoke_token(
    name: Annotated[str, typer.Argument(metavar="TOKEN", help="Name or id of the token.")],
    server: Server = DEFAULT_SERVER,
) -> None:
    """Revoke a token. Calls with it fail from now on, and open streams end."""
    with connect(server) as client:
        answer = client.call(
            client.stubs.access.RevokeToken, access_pb2.RevokeTokenRequest(name=name)
        )
    print_note(f"revoked: {answer.name}")


def create_join_token(
    node: Annotated[
        list[str],
        typer.Option(help="A node that agents with the token speak for, or a pattern: 'gpu-*'."),
    ],
    uses: Annotated[int, typer.Option(min=1, help="Number of agents that can enrol with it.")] = 1,
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="When it expires: 1h, or a time (RFC 3339).")
    ] = "1h",
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Create a token with which agents join the cluster, and print it on stdout.

    Copy it to a file on the node that only the agent's user can read, and start the agent with
    --join-token-file.
    """
    join_token = access_pb2.JoinToken(
        nodes=node,
        uses=uses,
        expire_time=options.parse_time("--expires", expires, current_timestamp()),
    )
    request = access_pb2.CreateJoinTokenRequest(parent=cluster_name(cluster), join_token=join_token)
    with connect(server) as client:
        answer = client.call(client.stubs.access.CreateJoinToken, request)
    print_line(answer.text)
    print_note(
        f"join token {answer.join_token.id} for {count_noun(uses, 'agent')} of {short_name(cluster)}"
        f" expires at {format_time(answer.join_token.expire_time)}; it cannot be shown again"
    )


def list_join_tokens(
    ended: Annotated[
        bool, typer.Option("--ended", help="Also list tokens that are used up, revoked or expired.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List join tokens, the newest first."""
    request = access_pb2.ListJoinTokensRequest(parent=cluster_name(cluster), with_ended=ended)
    with connect(server) as client:
        answer = client.call(client.stubs.access.ListJoinTokens, request)
    show_items(answer, answer.join_tokens, JOIN_COLUMNS, output)
    if not answer.join_tokens:
        print_note("there are no join tokens; `tessera join-token create` makes one")


def revoke_join_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the join token.")],
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Revoke a join token. Agents that enrolled with it keep their certificates."""
    request = access_pb2.RevokeJoinTokenRequest(parent=cluster_name(cluster), id=token_id)
    with connect(server) as client:
        client.call(client.stubs.access.RevokeJoinToken, request)
    print_note(f"revoked: {hide_secrets(token_id)}")


def list_certificates(
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the certificates of the cluster's agents that have not expired."""
    request = access_pb2.ListCertificatesRequest(parent=cluster_name(cluster))
    with connect(server) as client:
        answer = client.call(client.stubs.access.ListCertificates, request)
    show_items(answer, answer.certificates, CERTIFICATE_COLUMNS, output)
    if not answer.certificates:
        print_note("no agent has a certificate from this server")


def revoke_agent(
    agent: Annotated[str, typer.Argument(help="Id of the agent.")],
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Revoke all certificates of an agent. Its stream ends, and its jobs move once its lease ends."""
    request = access_pb2.RevokeAgentRequest(parent=cluster_name(cluster), agent=agent)
    with connect(server) as client:
        client.call(client.stubs.access.RevokeAgent, request)
    print_note(f"revoked all certificates of agent {agent}; it can only enrol again")


def show_audit(
    subject: Annotated[str, typer.Option(help="Only calls of this name.")] = "",
    method: Annotated[str, typer.Option(help="Only calls of this method: Jobs.CancelJob.")] = "",
    target: Annotated[
        str, typer.Option(help="Only this resource and what is below it: clusters/main.")
    ] = "",
    refused: Annotated[bool, typer.Option("--refused", help="Only refused calls.")] = False,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only since then: 24h (ago), or a time (RFC 3339).")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Largest number of entries to show.")] = 100,
    server: Server = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show who did what to what, from where, and what was refused, the newest first."""
    request = access_pb2.ListAuditEntriesRequest(
        subject=subject, method=method, target=target, outcome="refused" if refused else ""
    )
    if since:
        request.since.CopyFrom(options.parse_past("--since", since, current_timestamp()))
    with connect(server) as client:
        entries = _entries(client, request, limit)
    answer = access_pb2.ListAuditEntriesResponse(entries=entries)
    show_items(answer, entries, AUDIT_COLUMNS, output)
    if not entries:
        print_note("the audit log has no such entry")


def _entries(
    client: Client, request: access_pb2.ListAuditEntriesRequest, limit: int
) -> list[access_pb2.AuditEntry]:
    request.page_size = min(limit, 1000)
    entries = client.pages(client.stubs.access.ListAuditEntries, request, lambda page: page.entries)
    return list(islice(entries, limit))


def _ending(
    message: access_pb2.Token | access_pb2.JoinToken | access_pb2.Certificate,
) -> str:
    if message.HasField("revoke_time"):
        return "revoked"
    return format_time(message.expire_time) if message.HasField("expire_time") else "never"


def _nodes(nodes: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(nodes) - shown} more" if len(nodes) > shown else ""
    return ", ".join(nodes[:shown]) + more
