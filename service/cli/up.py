"""``tessera up``: a whole Tessera on this machine, each part a process of its own, stopped in order."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from db import embedded
from db.engine import connect as connect_database
from db.migrate import upgrade
from formulation.errors import InvalidInput, Unavailable
from service.cli import clusterfile, options, yamlfile
from service.cli.children import Child, ending_signals, running
from service.cli.client import Client, Exit, connect
from service.cli.clusterfile import ClusterFile
from service.cli.clusters import apply_cluster
from service.cli.importing import send_samples
from service.cli.names import parent, short
from service.cli.options import DEFAULT_CLUSTER, DEFAULT_SERVER
from service.cli.render import err, line, note
from service.config import Config
from tessera.v1 import clusters_pb2

START_S: Final = 180.0
"""How long server and agents may take to come up."""

POLL_S: Final = 0.1
WATCH_S: Final = 0.5
GRACE_S: Final = 15.0
"""How long the server may take to stop before it is killed."""

GANG_GRACE_S: Final = 2.0
"""How long a gang may take to stop before its agent kills it."""


def add(app: typer.Typer) -> None:
    """Add ``up``."""
    app.command("up", rich_help_panel="Servers")(up)


def up(
    file: Annotated[
        str, typer.Option("--file", "-f", help="YAML of a cluster; left out: a small example.")
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", envvar="TESSERA_CLUSTER",
                          help="The cluster's id; left out: as the file says, else 'default'."),
    ] = "",
    agents: Annotated[
        int, typer.Option(min=1, help="Agent processes; they share the nodes between them.")
    ] = 2,
    clock_factor: Annotated[
        float, typer.Option(help="Seconds of training that jobs do in a second.")
    ] = 1.0,
    period: Annotated[str, typer.Option(help="A round each, e.g. 300s; 0: only when asked.")] = "300s",
    policy: options.Policy = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the server listens; port 0: a free one.")
    ] = DEFAULT_SERVER,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What outlives this command.")
    ] = None,
    database_url: Annotated[
        str, typer.Option(envvar="TESSERA_DATABASE_URL", help="Left out: the embedded PostgreSQL.")
    ] = "",
    samples: Annotated[
        bool | None, typer.Option("--samples/--no-samples", help="Import sample estimates; by"
                                  " default where no file is named.")
    ] = None,
) -> None:  # fmt: skip
    """Start a database, a server and agents on this machine, and stop them all at Ctrl-C.

    Prints the server's address on stdout once everything is healthy. Jobs do not train anything: the agents
    replay what the estimates say, CLOCK-FACTOR times as fast.
    """
    period_s = options.seconds("--period", period)
    Config(policy=policy, period_s=period_s)  # refused here, not in the server's log
    if not clock_factor > 0:
        raise InvalidInput("--clock-factor", "must be above 0")
    described = clusterfile.read_cluster(
        yamlfile.read(file) if file else clusterfile.DEFAULT, file or "the example cluster"
    )
    if not described.nodes:
        raise InvalidInput(file, "names no nodes, so there is nothing to start agents for")
    plan = Plan(
        name=parent(cluster or described.name or DEFAULT_CLUSTER), described=described,
        agents=min(agents, len(described.nodes)), clock_factor=clock_factor, period_s=period_s,
        policy=policy, address=_address(listen), database_url=database_url,
        home=(data_dir or embedded.default_directory().parent).absolute(),
        samples=not file if samples is None else samples,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(ending_signals())
        children = _start(plan, stack)
        try:
            _watch(children)
        except KeyboardInterrupt:
            note("stopping agents, server and database ...")
            raise typer.Exit(Exit.OK) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to start."""

    name: str  # clusters/{cluster}
    described: ClusterFile
    agents: int
    clock_factor: float
    period_s: float
    policy: str
    address: str
    database_url: str  # "": embedded
    home: Path
    samples: bool


def _start(plan: Plan, stack: ExitStack) -> list[Child]:
    """Start everything, each when what it needs is healthy; ``stack`` stops it in reverse order."""
    note("starting the database ...")
    url = plan.database_url or stack.enter_context(_embedded(plan.home / "pg"))
    upgrade(connect_database(url))
    note("starting the server ...")
    children = [stack.enter_context(_server(plan, url))]
    _wait(lambda: _is_healthy(plan.address), children)
    client = stack.enter_context(connect(plan.address))
    apply_cluster(client, plan.name, plan.described, validate_only=False)
    if plan.samples:
        send_samples(client, plan.name)
    note(f"starting {plan.agents} agents ...")
    for k in range(plan.agents):
        children.append(stack.enter_context(_agent(plan, k)))
    for agent in children[1:]:
        stack.callback(agent.process.terminate)  # all at once, before the first is waited for
    wanted = {node.name for node in plan.described.nodes}
    _wait(lambda: wanted <= _reachable_nodes(client, plan.name), children)
    line(plan.address)
    _say_what_next(plan, client)
    return children


def _address(listen: str) -> str:
    """Return ``listen`` with a port; for port 0 one that was free a moment ago."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal():
        raise InvalidInput("--listen", f"{listen!r}: write HOST:PORT, e.g. {DEFAULT_SERVER}")
    if int(port):
        return listen
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


@contextlib.contextmanager
def _embedded(directory: Path) -> Iterator[str]:
    url = embedded.start(directory)
    try:
        yield url
    finally:
        embedded.stop(directory)


def _server(plan: Plan, url: str) -> contextlib.AbstractContextManager[Child]:
    arguments = ["serve", "--listen", plan.address, "--period", f"{plan.period_s:g}s"]
    return running(
        "server", "service.cli.main", arguments, plan.home / "logs", GRACE_S,
        {"TESSERA_DATABASE_URL": url, "TESSERA_POLICY": plan.policy},
    )  # fmt: skip


def _agent(plan: Plan, number: int) -> contextlib.AbstractContextManager[Child]:
    """Run an agent for its part of the nodes; the gangs that it runs end with it."""
    cluster, agent = short(plan.name), f"agent-{number}"
    folder = plan.home / "agents" / cluster
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / f"{agent}.json"
    rows = [
        {"node": n.name, "gpu_type": n.gpu_type, "gpus": n.gpus, "rack": n.rack}
        for n in plan.described.nodes[number :: plan.agents]
    ]
    listed.write_text(json.dumps(rows), encoding="utf-8")
    arguments = [
        "--server", plan.address, "--cluster", cluster, "--agent-id", agent,
        "--nodes-file", str(listed), "--data-dir", str(folder / agent),
        "--checkpoint-dir", str(plan.home / "checkpoints"),
        "--clock-factor", f"{plan.clock_factor:g}", "--grace-s", f"{GANG_GRACE_S:g}",
        "--stop-on-exit",
    ]  # fmt: skip
    return running(agent, "service.agent.main", arguments, plan.home / "logs", 3 * GANG_GRACE_S)


def _wait(ready: Callable[[], bool], children: Sequence[Child]) -> None:
    """Wait until ``ready``. Raises Unavailable: a child has ended, or it takes too long."""
    until_s = time.monotonic() + START_S
    while not ready():
        for child in children:
            child.require_running()
        if time.monotonic() > until_s:
            logs = ", ".join(str(child.log) for child in children)
            raise Unavailable(f"not healthy after {START_S:g} s; see {logs}")
        time.sleep(POLL_S)


def _watch(children: Sequence[Child]) -> None:
    """Return never; raise Unavailable as soon as a child has ended."""
    while True:
        for child in children:
            child.require_running()
        time.sleep(WATCH_S)


def _is_healthy(address: str) -> bool:
    """Return whether the server serves: its database answers and has the right schema."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=1.0
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _reachable_nodes(client: Client, name: str) -> set[str]:
    request = clusters_pb2.ListNodesRequest(parent=name)
    return {
        short(node.name)
        for page in client.pages(client.clusters.ListNodes, request)
        for node in page.nodes
        if node.state != clusters_pb2.Node.UNREACHABLE
    }


def _say_what_next(plan: Plan, client: Client) -> None:
    request = clusters_pb2.GetClusterRequest(name=plan.name)
    found, cluster = client.call(client.clusters.GetCluster, request), short(plan.name)
    rounds = f"a round every {plan.period_s:g} s" if plan.period_s else "rounds only when asked"
    err.print(
        f"Tessera is up: cluster {cluster}, {found.nodes} nodes, {found.gpus} GPUs; {rounds}.",
        style="bold",
    )
    exports = [f"TESSERA_SERVER={plan.address}"] if plan.address != DEFAULT_SERVER else []
    exports += [f"TESSERA_CLUSTER={cluster}"] if cluster != DEFAULT_CLUSTER else []
    if exports:
        note(f"In another terminal first: export {' '.join(exports)}")
    note(
        "Try:\n"
        "  tessera submit bert-1 --model bert --params 1.3B --batch 256 --iterations 1000 --gpus 8\n"
        "  tessera round             decide now\n"
        "  tessera jobs --watch      what runs where\n"
        "  tessera job bert-1        everything about a job, and why it waits\n"
        f"Logs: {plan.home / 'logs'}. Ctrl-C stops everything; the next `tessera up` goes on from"
        " there."
    )
