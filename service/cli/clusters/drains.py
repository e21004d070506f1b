"""``tessera drain`` and ``tessera undrain``: take nodes out of scheduling, and put them back."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Final

import typer

from tessera.client import Client
from tessera.service.cli import options
from tessera.service.cli.client import CallFailed, Exit, connect
from tessera.service.cli.clusters.nodes import NodeNames, show_nodes
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
from tessera.service.cli.render import count_noun, print_note
from tessera.v1 import clusters_pb2

POLL_S: Final = 1.0
"""Seconds between two readings of the draining nodes."""

JOBS_NAMED: Final = 3
"""The number of jobs that a line of progress names."""


def add_commands(app: typer.Typer) -> None:
    """Add ``drain_nodes`` and ``undrain_nodes``."""
    app.command("drain", rich_help_panel="Clusters")(drain_nodes)
    app.command("undrain", rich_help_panel="Clusters")(undrain_nodes)


def drain_nodes(
    names: NodeNames,
    reason: Annotated[
        str,
        typer.Option(
            help="Reason for the drain, which `tessera nodes -o wide` shows.", show_default=False
        ),
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until no job holds a GPU on the nodes.")
    ] = False,
    timeout: Annotated[
        str,
        typer.Option(
            help="With --wait: stop waiting after this time, e.g. 30m. Default: wait forever.",
            show_default=False,
        ),
    ] = "",
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Drain nodes: no job starts on them, and the next round moves their running jobs away.

    A node is DRAINED once no job holds a GPU on it. With --wait, the exit code is 1 if the nodes are not
    drained in time. They continue to drain.
    """
    timeout_s = options.parse_seconds("--timeout", timeout) if timeout else None
    request = clusters_pb2.DrainNodesRequest(
        parent=cluster_name(cluster),
        names=[full_name(cluster, "nodes", name) for name in names],
        validate_only=validate_only,
        reason=reason,
        drained_by=_user(),
    )
    with connect(server) as client:
        drained = list(client.call(client.stubs.clusters.DrainNodes, request).nodes)
        if wait and not validate_only:
            drained = wait_until_drained(client, drained, timeout_s)
    show_nodes(drained, output)


def undrain_nodes(
    names: NodeNames,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Put drained nodes back into scheduling."""
    request = clusters_pb2.UndrainNodesRequest(
        parent=cluster_name(cluster),
        names=[full_name(cluster, "nodes", name) for name in names],
        validate_only=validate_only,
    )
    with connect(server) as client:
        show_nodes(client.call(client.stubs.clusters.UndrainNodes, request).nodes, output)


def wait_until_drained(
    client: Client,
    nodes: Sequence[clusters_pb2.Node],
    timeout_s: float | None,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[clusters_pb2.Node]:
    """Return the nodes once all are drained. Report on stderr whenever the remaining ones change.

    Raises:
        CallFailed: ``timeout_s`` have passed, or a node is no longer draining or does not exist.
    """
    names, began_s, last = [node.name for node in nodes], now_s(), ""
    while True:
        current = _read(client, names)
        left = [node for node in current if not node.drained]
        if not left:
            return current
        if stopped := [node for node in left if node.state != clusters_pb2.Node.DRAINING]:
            raise CallFailed(f"{short_name(stopped[0].name)} is no longer draining", Exit.REFUSED)
        if (text := _left(left)) != last:
            print_note(
                f"{text}. The next round moves or suspends the jobs; `tessera round` runs one now"
            )
            last = text
        if timeout_s is not None and now_s() - began_s >= timeout_s:
            raise CallFailed(
                f"not drained after {timeout_s:g} s: {text}; the nodes continue to drain",
                Exit.REFUSED,
            )
        sleep(POLL_S)


def _read(client: Client, names: Collection[str]) -> list[clusters_pb2.Node]:
    """Return the named nodes, in this order. Raises CallFailed or CallError if one does not exist."""
    if len(names) == 1:
        (name,) = names
        return [client.call(client.stubs.clusters.GetNode, clusters_pb2.GetNodeRequest(name=name))]
    request = clusters_pb2.ListNodesRequest(parent=next(iter(names)).partition("/nodes/")[0])
    nodes = client.pages(client.stubs.clusters.ListNodes, request, lambda page: page.nodes)
    by_name = {node.name: node for node in nodes}
    for name in names:
        if name not in by_name:
            raise CallFailed(f"{name} no longer exists", Exit.NOT_FOUND)
    return [by_name[name] for name in names]


def _left(nodes: Sequence[clusters_pb2.Node]) -> str:
    """Return a text that names the nodes which still have jobs, and the first of these jobs."""
    jobs = sorted({short_name(job) for node in nodes for job in node.jobs})
    named = ", ".join(jobs[:JOBS_NAMED]) + (", ..." if len(jobs) > JOBS_NAMED else "")
    where = short_name(nodes[0].name) if len(nodes) == 1 else f"{len(nodes):,} nodes"
    return f"{where}: {count_noun(len(jobs), 'job')} left ({named})"


def _user() -> str:
    """Return the user of this command as user@host, or "" if the system does not know it."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"[:100]
    except (OSError, KeyError):
        return ""
