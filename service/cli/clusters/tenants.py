"""Commands on tenants: their weights, their quotas, and the GPUs that they borrow and lend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from tessera.client import Client
from tessera.service.cli import yamlfile
from tessera.service.cli.client import connect
from tessera.service.cli.completion import complete_tenants
from tessera.service.cli.deletion import AllowMissing
from tessera.service.cli.names import ANY_TYPE, cluster_name, full_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Output,
    OutputOption,
    Server,
    ValidateOnly,
)
from tessera.service.cli.render import Column, count_noun, format_number, print_note, show_list
from tessera.v1 import tenants_pb2

TENANT_COLUMNS: Final[Sequence[Column[tenants_pb2.Tenant]]] = (
    Column("TENANT", lambda t: short_name(t.name)),
    Column("WEIGHT", lambda t: format_number(t.weight), right=True),
    Column("QUOTAS", lambda t: _quotas(t)),
    Column("BORROWS", lambda t: str(t.borrow_gpus) if t.HasField("borrow_gpus") else "any number"),
    Column("LENDS", lambda t: "no" if t.keeps_idle_quota else "yes"),
    Column("PARENT", lambda t: t.parent, wide=True),
)

INDENT: Final = "  "
"""The indentation of a level of tenants in a tree."""


def add_commands(app: typer.Typer) -> None:
    """Add the commands on tenants."""
    group = typer.Typer(
        help="Set, list or delete the weights and quotas of tenants.", no_args_is_help=True
    )
    group.command("apply")(apply_tenant_file)
    group.command("list")(list_tenants)
    group.command("delete")(delete_tenants)
    app.add_typer(group, name="tenants", rich_help_panel="Clusters")


def apply_tenant_file(
    file: Annotated[
        str,
        typer.Option("--file", "-f", help="YAML file that describes the tenants; '-' for stdin."),
    ],
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create tenants, or replace all settings of existing ones (all or none)."""
    from tessera.service.cli.clusters import tenantfile  # noqa: PLC0415 - pydantic starts slowly

    described = tenantfile.read_tenants(yamlfile.read_text(file), file)
    with connect(server) as client:
        applied = apply_tenants(
            client, cluster_name(cluster), described, validate_only=validate_only
        )
    _show(applied.tenants, output)
    what = count_noun(len(described), "tenant")
    print_note(f"{what} valid; nothing changed" if validate_only else f"{what} applied")


def list_tenants(
    tree: Annotated[
        bool, typer.Option("--tree", help="Show each tenant below its parent, indented.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the tenants that have settings by name."""
    with connect(server) as client:
        request = tenants_pb2.ListTenantsRequest(parent=cluster_name(cluster))
        tenants = list(
            client.pages(client.stubs.tenants.ListTenants, request, lambda page: page.tenants)
        )
    if tree:
        show_tree(tenants, output)
    else:
        _show(tenants, output)
    if not tenants:
        print_note(
            "no tenant has settings, so each has weight 1 and no limits; `tessera tenants apply` sets some"
        )


def delete_tenants(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="TENANT...",
            help="Ids or full names of the tenants.",
            autocompletion=complete_tenants,
        ),
    ],
    allow_missing: AllowMissing = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Delete the settings of tenants. Their jobs remain, with weight 1 and no limits."""
    request = tenants_pb2.DeleteTenantsRequest(
        parent=cluster_name(cluster),
        names=[full_name(cluster, "tenants", name) for name in names],
        allow_missing=allow_missing,
        validate_only=validate_only,
    )
    with connect(server) as client:
        client.call(client.stubs.tenants.DeleteTenants, request)
    print_note(
        "valid; nothing changed"
        if validate_only
        else f"deleted: {', '.join(map(short_name, names))}"
    )


def apply_tenants(
    client: Client, cluster: str, described: Sequence[tenants_pb2.Tenant], *, validate_only: bool
) -> tenants_pb2.UpsertTenantsResponse:
    """Create or replace tenants, named by their ids, of ``cluster`` (a full name)."""
    request = tenants_pb2.UpsertTenantsRequest(parent=cluster, validate_only=validate_only)
    for tenant in described:
        added = request.tenants.add()
        added.CopyFrom(tenant)
        added.name = full_name(cluster, "tenants", tenant.name)
    return client.call(client.stubs.tenants.UpsertTenants, request)


def show_tree(tenants: Sequence[tenants_pb2.Tenant], output: Output) -> None:
    """Print each tenant below its parent. One whose parent is not among them is at the top."""
    children: dict[str, list[tenants_pb2.Tenant]] = {}
    known = {short_name(tenant.name) for tenant in tenants}
    for tenant in tenants:
        children.setdefault(tenant.parent if tenant.parent in known else "", []).append(tenant)
    level: dict[str, int] = {}
    rows, left = list[tenants_pb2.Tenant](), [(0, tenant) for tenant in children.get("", [])]
    while left:
        depth, tenant = left.pop(0)
        rows.append(tenant)
        level[tenant.name] = depth
        left = [(depth + 1, child) for child in children.get(short_name(tenant.name), [])] + left
    first = Column[tenants_pb2.Tenant](
        "TENANT", lambda t: INDENT * level[t.name] + short_name(t.name)
    )
    _show(rows, output, (first, *TENANT_COLUMNS[1:]))


def _show(
    tenants: Sequence[tenants_pb2.Tenant],
    output: Output,
    columns: Sequence[Column[tenants_pb2.Tenant]] = TENANT_COLUMNS,
) -> None:
    """Print tenants. Their quota of any type is called ``any``, as in files."""
    response = tenants_pb2.ListTenantsResponse(tenants=tenants)
    for tenant in response.tenants:
        if "" in tenant.quotas:
            tenant.quotas[ANY_TYPE] = tenant.quotas.pop("")
    show_list(response, response.tenants, columns, output)


def _quotas(tenant: tenants_pb2.Tenant) -> str:
    return ", ".join(
        f"{gpus} GPUs of any type" if kind in ("", ANY_TYPE) else f"{gpus} x {kind}"
        for kind, gpus in sorted(tenant.quotas.items())
    )
