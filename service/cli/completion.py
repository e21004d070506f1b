"""Names for the shell's completion: quick, and silent when no server answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import typer

from tessera.client import Client
from tessera.formulation.base.errors import TesseraError
from tessera.service.cli.client import connect
from tessera.service.cli.names import cluster_name, short_name
from tessera.v1 import clusters_pb2, jobs_pb2, scheduler_pb2, tenants_pb2

LIMIT_S: Final = 1.0
"""Time limit in seconds of a completion. Names that arrive later are left out."""

MAX_NAMES: Final = 200
"""Largest number of names that are offered."""

PAGE: Final = 1000

ReadNames = Callable[[Client, str, float], Iterator[str]]
"""A function that yields the names of resources of ``clusters/{cluster}`` until a time in seconds
of the monotonic clock.
"""


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs whose ids begin with a text. Those that have ended are included."""
    return _complete(ctx, incomplete, _job_names)


def complete_nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the nodes whose ids begin with a text."""
    return _complete(ctx, incomplete, _node_names)


def complete_tenants(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the tenants with settings, or with jobs, whose ids begin with a text."""
    return _complete(ctx, incomplete, _tenant_names)


def complete_rounds(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the last rounds whose numbers begin with a text."""
    return _complete(ctx, incomplete, _round_names)


def _complete(ctx: typer.Context, incomplete: str, read: ReadNames) -> list[str]:
    """Return names that begin with a text. A failure is no name: a shell shows no errors here."""
    options = _options_of(ctx)
    end_s = time.monotonic() + LIMIT_S
    names: dict[str, None] = {}
    try:
        with connect(str(options["server"])) as client:
            for name in read(client, cluster_name(str(options["cluster"])), end_s):
                if name.startswith(incomplete):
                    names[name] = None
                if len(names) == MAX_NAMES or time.monotonic() >= end_s:
                    break
    except TesseraError:
        pass  # no server, no right, or no time
    return list(names)


def _options_of(ctx: Any) -> dict[str, object]:
    """Return the server and the cluster of an incomplete command line, or those that are usual."""
    usual = {p.name: p.get_default(ctx) for p in ctx.command.params}
    given = {name: value for name, value in ctx.params.items() if value is not None}
    environment = {
        p.name: p.value_from_envvar(ctx)
        for p in ctx.command.params
        if p.name in ("server", "cluster")
    }
    return usual | {k: v for k, v in environment.items() if v} | given


def _left_s(end_s: float) -> float:
    return max(0.05, end_s - time.monotonic())


def _job_names(client: Client, cluster: str, end_s: float) -> Iterator[str]:
    request = jobs_pb2.ListJobsRequest(parent=cluster, page_size=PAGE)
    while True:
        page = client.call(client.stubs.jobs.ListJobs, request, _left_s(end_s))
        yield from (short_name(job.name) for job in page.jobs)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _node_names(client: Client, cluster: str, end_s: float) -> Iterator[str]:
    request = clusters_pb2.ListNodesRequest(parent=cluster, page_size=PAGE)
    page = client.call(client.stubs.clusters.ListNodes, request, _left_s(end_s))
    yield from (short_name(node.name) for node in page.nodes)


def _tenant_names(client: Client, cluster: str, end_s: float) -> Iterator[str]:
    tenants = tenants_pb2.ListTenantsRequest(parent=cluster, page_size=PAGE)
    page = client.call(client.stubs.tenants.ListTenants, tenants, _left_s(end_s))
    yield from (short_name(tenant.name) for tenant in page.tenants)
    jobs = jobs_pb2.ListJobsRequest(parent=cluster, page_size=PAGE)
    listed = client.call(client.stubs.jobs.ListJobs, jobs, _left_s(end_s))
    yield from (job.tenant for job in listed.jobs if job.tenant)


def _round_names(client: Client, cluster: str, end_s: float) -> Iterator[str]:
    request = scheduler_pb2.ListRoundsRequest(parent=cluster, page_size=100)
    page = client.call(client.stubs.scheduler.ListRounds, request, _left_s(end_s))
    yield from (short_name(stored.name) for stored in page.rounds)
