"""``tessera up``: a complete Tessera on this machine, in processes that are stopped in order."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.client import PLAIN_TEXT
from tessera.db import embedded
from tessera.db.engine import connect_database as connect_database
from tessera.db.migrate import upgrade_schema
from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.service.agent.files import make_private, open_private
from tessera.service.cli import clusterfile, options, yamlfile
from tessera.service.cli.children import Child, ending_signals, run_child
from tessera.service.cli.client import CallFailed, Client, Exit, connect
from tessera.service.cli.clusterfile import ClusterFile
from tessera.service.cli.clusters import apply_cluster
from tessera.service.cli.home import DataDirectory, claim_directory, default_home
from tessera.service.cli.importing import send_samples
from tessera.service.cli.listener import Health, address_of, health_of, require_free
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import DEFAULT_CLUSTER, DEFAULT_SERVER
from tessera.service.cli.render import err, print_line, print_note
from tessera.service.cli.upsettings import EXAMPLE_SOURCE, UpOptions, delete_data, resolve_settings
from tessera.service.config import Config
from tessera.v1 import clusters_pb2

START_TIMEOUT_S: Final = 600.0
"""Seconds that the server and the agents may each take to become healthy."""

PATIENCE_S: Final = 15.0
"""Seconds after which the probable reason for a slow start is printed."""

POLL_S: Final = 0.1
WATCH_S: Final = 0.5
GRACE_S: Final = 15.0
"""Seconds that the server may take to stop before it is killed."""

GANG_GRACE_S: Final = 20.0
"""Seconds that a gang may take to stop before its agent kills it. Replayed jobs stop at once."""

AGENT_MARGIN_S: Final = 10.0
"""Seconds after that in which an agent has ended, too."""

MAX_SOCKET_PATH: Final = 100
"""Longest path of a Unix socket in bytes. With a longer one, the server listens on its port alone."""

SHOWN_NODES: Final = 5
"""The number of nodes that an error names."""


def add_commands(app: typer.Typer) -> None:
    """Add ``run_up``."""
    app.command("up", rich_help_panel="Servers")(run_up)


def run_up(
    file: Annotated[
        str,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE.yaml",
            help="Cluster file. Default: the one that the data directory was made with, or a small example.",
        ),
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            "-c",
            envvar="TESSERA_CLUSTER",
            help="The cluster's id. Default: the one in the file, or else 'default'.",
        ),
    ] = "",
    agents: Annotated[
        int,
        typer.Option(min=1, help="Number of agent processes, among which the nodes are divided."),
    ] = 2,
    clock_factor: Annotated[
        float | None,
        typer.Option(
            help="Factor by which training runs faster than in reality. Periods and deadlines stay"
            " in real time."
            " Default: the data directory's, or 1."
        ),
    ] = None,
    period: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Time between two rounds. 0: rounds only on request."
        ),
    ] = "300s",
    policy: options.Policy = "",
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address on which the server listens. Port 0: any free port."
        ),
    ] = DEFAULT_SERVER,
    insecure: options.Insecure = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for the database, logs and checkpoints, with which the next `up` continues."
            " Default: one directory for each cluster file.",
        ),
    ] = None,
    database_url: Annotated[
        str,
        typer.Option(
            envvar="TESSERA_DATABASE_URL",
            help="URL of a PostgreSQL database, postgresql://... Default: an embedded PostgreSQL in the data"
            " directory.",
        ),
    ] = "",
    samples: Annotated[
        bool | None,
        typer.Option(
            "--samples/--no-samples",
            help="Whether to import sample estimates. Default: only for the example cluster.",
        ),
    ] = None,
    reset: Annotated[
        bool,
        typer.Option(
            "--reset",
            help="Delete the database, jobs, logs and checkpoints in the data directory before starting.",
        ),
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Do not ask for confirmation before --reset deletes data."
        ),
    ] = False,
) -> None:
    """Start a database, a server and agents on this machine. Ctrl-C stops them all.

    The address of the server is printed on stdout once all of them are healthy. Jobs with a command
    run it, as the present user. Other jobs train nothing: agents replay the estimated iteration
    times, CLOCK-FACTOR times as fast. With a clock factor, only such jobs run.

    The next `up` with the same file or data directory continues where this one stopped. To start from
    scratch, add --reset.
    """
    period_s, address = options.parse_seconds("--period", period), address_of(listen)
    Config(  # Refuse wrong settings here, not in the server's log.
        policy=policy,
        period_s=period_s,
        listen=address,
        insecure=insecure,
    )
    if clock_factor is not None and not clock_factor > 0:
        raise InvalidInput("--clock-factor", "must be greater than 0")
    if yes and not reset:
        raise InvalidInput("--yes", "needs --reset")
    asked = UpOptions(
        file=file,
        text=yamlfile.read_text(file) if file else "",
        cluster=short_name(cluster),
        clock_factor=clock_factor,
        database_url=database_url,
    )
    path = (data_dir or default_home(file, asked.text, _cluster_named(asked))).absolute()
    with ExitStack() as stack:
        stack.enter_context(ending_signals())
        home = stack.enter_context(claim_directory(path))
        if reset:
            delete_data(home, asked, confirmed=yes)
        record = resolve_settings(asked, home)
        described = clusterfile.read_cluster(record.description, record.source or EXAMPLE_SOURCE)
        if not described.nodes:
            raise InvalidInput(file, "names no nodes, so no agents can be started")
        plan = StartPlan(
            home=home,
            name=cluster_name(record.cluster),
            described=described,
            agents=min(agents, len(described.nodes)),
            clock_factor=record.clock_factor,
            period_s=period_s,
            policy=policy,
            address=address,
            insecure=insecure,
            instance=uuid.uuid4().hex,
            database_url=database_url,
            samples=not record.source if samples is None else samples,
            again=_repeat_command(file, data_dir),
        )
        require_free(plan.address)
        home.save(replace(record, address=plan.address, running=()))
        try:
            _watch(_start(plan, stack))
        except KeyboardInterrupt:
            print_note("stopping agents, server and database ...")
            raise typer.Exit(Exit.OK) from None


def _cluster_named(asked: UpOptions) -> str:
    """Return the id of the cluster that the options name, or 'default'."""
    text = asked.text or clusterfile.EXAMPLE_CLUSTER
    in_file = clusterfile.read_cluster(text, asked.file or EXAMPLE_SOURCE).name
    return asked.cluster or in_file or DEFAULT_CLUSTER


def _repeat_command(file: str, data_dir: Path | None) -> str:
    """Return the command that continues with the same data directory."""
    if data_dir is not None:
        return f"tessera up --data-dir {shlex.quote(str(data_dir))}"
    return f"tessera up --file {shlex.quote(file)}" if file else "tessera up"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The processes to start, with their settings."""

    home: DataDirectory
    name: str  # clusters/{cluster}
    described: ClusterFile
    agents: int
    clock_factor: float
    period_s: float
    policy: str
    address: str
    instance: str  # the id by which the server is recognised
    insecure: bool
    database_url: str  # "" for the embedded database
    samples: bool
    again: str  # the command that continues with the same data directory


def _start(plan: StartPlan, stack: ExitStack) -> list[Child]:
    """Start all processes, each once those that it needs are healthy.

    ``stack`` stops them in reverse order.
    """
    plan.home.add_running("up", os.getpid())
    print_note("starting the database ...")
    url = plan.database_url or stack.enter_context(_embedded(plan.home.path / "pg"))
    database = connect_database(url)
    upgrade_schema(database)
    if not stack.enter_context(database.held(f"tessera up {plan.name}")):
        raise CallFailed(
            f"another `tessera up` runs {plan.name} on this database; stop it, or choose another database or"
            " --cluster",
            Exit.REFUSED,
        )
    print_note("starting the server ...")
    children = [_child(plan, stack.enter_context(_server(plan, url)))]
    _wait(lambda: health_of(plan.address, plan.instance) is Health.SERVING, children)
    client = stack.enter_context(connect(plan.address, PLAIN_TEXT))
    _describe(plan, client)
    print_note(f"starting {plan.agents} agents ...")
    for k in range(plan.agents):
        children.append(_child(plan, stack.enter_context(_agent(plan, k))))
    for agent in children[1:]:
        # Stop all agents at the same time, before waiting for the first.
        stack.callback(agent.process.terminate)
    wanted = {node.name for node in plan.described.nodes}
    _wait(lambda: wanted <= _reachable_nodes(client, plan.name), children)
    print_line(plan.address)
    _print_next_steps(plan, client)
    return children


def _child(plan: StartPlan, child: Child) -> Child:
    plan.home.add_running(child.name, child.process.pid)
    return child


def _describe(plan: StartPlan, client: Client) -> None:
    """Send the cluster to the server, unless an earlier ``run_up`` did.

    Raises:
        CallFailed: the database has another cluster of this name.
    """
    record = plan.home.record
    if record is None or record.applied == record.description:
        return
    if not record.applied:
        _require_same(plan, client)
    apply_cluster(client, plan.name, plan.described, validate_only=False)
    if plan.samples and not record.applied:
        send_samples(client, plan.name)
    plan.home.save(replace(record, applied=record.description))


def _require_same(plan: StartPlan, client: Client) -> None:
    """Check that the cluster does not exist yet, or has only nodes of the description."""
    request = clusters_pb2.ListClustersRequest()
    pages = client.pages(client.clusters.ListClusters, request)
    if plan.name not in {cluster.name for page in pages for cluster in page.clusters}:
        return
    wanted = {node.name: (node.gpu_type, node.gpus) for node in plan.described.nodes}
    others = [
        short_name(node.name)
        for node in _nodes(client, plan.name)
        if wanted.get(short_name(node.name)) != (node.gpu_type, node.gpus)
    ]
    if others:
        more = ", ..." if len(others) > SHOWN_NODES else ""
        raise CallFailed(
            f"the database already has {plan.name} with other nodes ({', '.join(others[:SHOWN_NODES])}"
            f"{more}); nothing was changed. Choose another --cluster or --data-dir, or add --reset to delete"
            " it and start from scratch",
            Exit.REFUSED,
        )


@contextlib.contextmanager
def _embedded(directory: Path) -> Iterator[str]:
    url = embedded.start_server(directory)
    try:
        yield url
    finally:
        embedded.stop_server(directory)


def _server(plan: StartPlan, url: str) -> contextlib.AbstractContextManager[Child]:
    arguments = ["serve", "--listen", plan.address, "--period", f"{plan.period_s:g}s"]
    arguments += ["--insecure"] if plan.insecure else []
    socket = plan.home.path / "run" / "server.sock"
    if len(os.fsencode(socket)) <= MAX_SOCKET_PATH:
        arguments += ["--socket", str(socket)]
    settings = {
        "TESSERA_DATABASE_URL": url,
        "TESSERA_POLICY": plan.policy,
        "TESSERA_INSTANCE": plan.instance,
        "TESSERA_CLOCK_FACTOR": f"{plan.clock_factor!r}",
    }
    return run_child(
        "server",
        "tessera.service.cli.main",
        arguments,
        plan.home.path / "logs",
        GRACE_S,
        settings,
        keep_open=[plan.home.lock_fd],
    )


def _agent(plan: StartPlan, number: int) -> contextlib.AbstractContextManager[Child]:
    """Run an agent for its share of the nodes. Its gangs end with it."""
    cluster, agent = short_name(plan.name), f"agent-{number}"
    folder = plan.home.path / "agents" / cluster
    make_private(str(folder))
    listed = folder / f"{agent}.json"
    rows = [
        {"node": n.name, "gpu_type": n.gpu_type, "gpus": n.gpus, "rack": n.rack}
        for n in plan.described.nodes[number :: plan.agents]
    ]
    with open(open_private(str(listed)), "w", encoding="utf-8") as file:
        json.dump(rows, file)
    arguments = [
        "--server",
        plan.address,
        "--cluster",
        cluster,
        "--agent-id",
        agent,
        "--nodes-file",
        str(listed),
        "--data-dir",
        str(folder / agent),
        "--checkpoint-dir",
        str(plan.home.path / "checkpoints"),
        "--clock-factor",
        f"{plan.clock_factor:g}",
        "--grace-s",
        f"{GANG_GRACE_S:g}",
        "--run-as",
        pwd.getpwuid(os.geteuid()).pw_name,
        "--stop-on-exit",
    ]
    return run_child(
        agent,
        "tessera.service.agent.main",
        arguments,
        plan.home.path / "logs",
        GANG_GRACE_S + AGENT_MARGIN_S,
        {"TESSERA_DATABASE_URL": None},  # agents run users' processes
        keep_open=[plan.home.lock_fd],
    )


def _wait(ready: Callable[[], bool], children: Sequence[Child]) -> None:
    """Wait until ``ready``. Raises Unavailable if a child has ended, or if it takes too long."""
    started_s, is_explained = time.monotonic(), False
    while not ready():
        for child in children:
            child.require_running()
        waited_s = time.monotonic() - started_s
        if waited_s > PATIENCE_S and not is_explained:
            is_explained = True
            print_note(
                "still starting; the first start of an installation compiles the solvers, which takes minutes"
            )
        if waited_s > START_TIMEOUT_S:
            logs = ", ".join(str(child.log) for child in children)
            raise Unavailable(f"not healthy after {START_TIMEOUT_S:g} s; see {logs}")
        time.sleep(POLL_S)


def _watch(children: Sequence[Child]) -> None:
    """Watch the children forever. Raises Unavailable as soon as one has ended."""
    while True:
        for child in children:
            child.require_running()
        time.sleep(WATCH_S)


def _nodes(client: Client, name: str) -> list[clusters_pb2.Node]:
    request = clusters_pb2.ListNodesRequest(parent=name)
    return [
        node for page in client.pages(client.clusters.ListNodes, request) for node in page.nodes
    ]


def _reachable_nodes(client: Client, name: str) -> set[str]:
    return {
        short_name(node.name)
        for node in _nodes(client, name)
        if node.state != clusters_pb2.Node.UNREACHABLE
    }


def _print_next_steps(plan: StartPlan, client: Client) -> None:
    request = clusters_pb2.GetClusterRequest(name=plan.name)
    stored, cluster = client.call(client.clusters.GetCluster, request), short_name(plan.name)
    rounds = f"a round every {plan.period_s:g} s" if plan.period_s else "rounds only on request"
    err.print(
        f"Tessera is up: cluster {cluster}, {stored.nodes} nodes, {stored.gpus} GPUs; {rounds}.",
        style="bold",
    )
    exports = [f"TESSERA_SERVER={plan.address}"] if plan.address != DEFAULT_SERVER else []
    exports += [f"TESSERA_CLUSTER={cluster}"] if cluster != DEFAULT_CLUSTER else []
    if exports:
        print_note(f"In another terminal, first run: export {' '.join(exports)}")
    print_note(
        "Try:\n"
        "  tessera submit bert-1 --model bert --params 1.3B --batch 256 --iterations 1000 --gpus 8\n"
        "  tessera round             decide a round now\n"
        "  tessera jobs --watch      follow the jobs and their GPUs\n"
        "  tessera job bert-1        show a job in full, and why it waits\n"
        f"Data and logs: {plan.home.path}\n"
        f"Ctrl-C stops everything. `{plan.again}` then continues from there, and"
        f" `{plan.again} --reset` starts from scratch."
    )
