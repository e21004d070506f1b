"""Commands on webhooks: URLs that are sent what happens to jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from tessera.service.cli import options
from tessera.service.cli.client import connect
from tessera.service.cli.names import cluster_name, full_name, short_name
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
    format_time,
    print_error,
    print_line,
    print_note,
    show_list,
)
from tessera.v1 import webhooks_pb2

WEBHOOK_COLUMNS: Final[Sequence[Column[webhooks_pb2.Webhook]]] = (
    Column("WEBHOOK", lambda w: short_name(w.name)),
    Column("TENANT", lambda w: "all tenants" if w.all_tenants else w.tenant),
    Column("EVENTS", lambda w: ", ".join(w.events) or "all"),
    Column("LABELS", lambda w: ", ".join(f"{k}={v}" for k, v in sorted(w.labels.items()))),
    Column("STATE", lambda w: _state(w)),
    Column("DELIVERED", lambda w: str(w.delivered), right=True),
    Column("PENDING", lambda w: str(w.pending), right=True),
    Column("LAST ERROR", lambda w: w.last_error),
    Column("URL", lambda w: w.url, wide=True),
    Column("LAST DELIVERY", lambda w: format_time(w.delivery_time), wide=True),
    Column("CREATED BY", lambda w: w.created_by, wide=True),
)

WebhookName = Annotated[
    str, typer.Argument(metavar="WEBHOOK", help="Id or full name of the webhook.")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands on webhooks."""
    group = typer.Typer(
        help="Add, list, delete or test URLs that are sent what happens to jobs.",
        no_args_is_help=True,
    )
    group.command("add")(add_webhook)
    group.command("list")(list_webhooks)
    group.command("delete")(delete_webhooks)
    group.command("test")(send_test)
    app.add_typer(group, name="webhooks", rich_help_panel="Jobs")


def add_webhook(
    name: WebhookName,
    url: Annotated[str, typer.Argument(metavar="URL", help="https URL that takes POST requests.")],
    tenant: Annotated[str, typer.Option(help="Tenant whose jobs are reported.")] = "",
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="Report the jobs of all tenants.")
    ] = False,
    event: Annotated[
        list[str] | None,
        typer.Option(help="Event to report, e.g. failed. Repeatable. Default: all events."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Label that jobs must have, as KEY=VALUE. Repeatable."),
    ] = None,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Add a webhook, and print its secret. The secret cannot be shown again."""
    request = webhooks_pb2.CreateWebhookRequest(
        parent=cluster_name(cluster),
        webhook_id=short_name(full_name(cluster, "webhooks", name)),
        webhook=webhooks_pb2.Webhook(
            tenant=tenant,
            all_tenants=all_tenants,
            url=url,
            events=event or [],
            labels=options.parse_labels("--label", label),
        ),
        validate_only=validate_only,
    )
    with connect(server) as client:
        created = client.call(client.stubs.webhooks.CreateWebhook, request)
    if validate_only:
        print_note("valid; nothing changed")
    elif output in (Output.TABLE, Output.WIDE):
        print_note("the secret of its signatures, which is not shown again:")
        print_line(created.secret)
    else:
        show_list(created, [created], WEBHOOK_COLUMNS, output)


def list_webhooks(
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List webhooks by name, with what was delivered and what failed."""
    with connect(server) as client:
        request = webhooks_pb2.ListWebhooksRequest(parent=cluster_name(cluster))
        found = list(
            client.pages(client.stubs.webhooks.ListWebhooks, request, lambda page: page.webhooks)
        )
    show_list(webhooks_pb2.ListWebhooksResponse(webhooks=found), found, WEBHOOK_COLUMNS, output)
    if not found:
        print_note("there are no webhooks; `tessera webhooks add` adds one")


def delete_webhooks(
    names: Annotated[
        list[str],
        typer.Argument(metavar="WEBHOOK...", help="Ids or full names of the webhooks."),
    ],
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Delete webhooks, with the events that were not delivered."""
    with connect(server) as client:
        for name in dict.fromkeys(names):
            request = webhooks_pb2.DeleteWebhookRequest(
                name=full_name(cluster, "webhooks", name),
                validate_only=validate_only,
            )
            client.call(client.stubs.webhooks.DeleteWebhook, request)
            print_note(f"{name}: {'valid; nothing changed' if validate_only else 'deleted'}")


def send_test(
    name: WebhookName,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Send a test event now. If it arrives, a dead webhook works again."""
    request = webhooks_pb2.TestWebhookRequest(name=full_name(cluster, "webhooks", name))
    with connect(server) as client:
        answer = client.call(client.stubs.webhooks.TestWebhook, request)
    if not answer.delivered:
        print_error(f"{name}: {answer.error}")
        raise typer.Exit(1)
    print_note(f"{name}: the test event was delivered")


def _state(webhook: webhooks_pb2.Webhook) -> str:
    """Return whether a webhook works, in words."""
    if webhook.disabled:
        return "disabled"
    return f"{webhook.failures} failures" if webhook.failures else "works"
