"""The command ``tessera up``: all processes are started in order, watched, and stopped in order."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from tessera.client import PLAIN_TEXT, Client
from tessera.db.schema.engine import Database, connect_database
from tessera.db.schema.migrate import upgrade_schema
from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.service.cli import options, yamlfile
from tessera.service.cli.children import Child, ending_signals
from tessera.service.cli.client import CallFailed, Exit, connect
from tessera.service.cli.clusters import clusterfile
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import DEFAULT_CLUSTER, DEFAULT_SERVER, FileCluster
from tessera.service.cli.render import err, print_line, print_note
from tessera.service.cli.servers.listener import Health, address_of, health_of, require_free
from tessera.service.cli.servers.up.cluster import describe_cluster, reachable_nodes
from tessera.service.cli.servers.up.home import claim_directory, default_home
from tessera.service.cli.servers.up.processes import (
    ClusterStart,
    run_agent,
    run_database,
    run_server,
)
from tessera.service.cli.servers.up.settings import (
    EXAMPLE_SOURCE,
    UpOptions,
    delete_data,
    resolve_settings,
)
from tessera.service.cli.servers.up.supervisor import Part, Supervisor
from tessera.service.server.settings.config import Config
from tessera.v1 import clusters_pb2

START_TIMEOUT_S: Final = 600.0
"""Seconds that the server and the agents may each take to become healthy."""

PATIENCE_S: Final = 15.0
"""Seconds after which the probable reason for a slow start is printed."""

POLL_S: Final = 0.1
WATCH_S: Final = 0.5


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
    cluster: FileCluster = "",
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
        plan = ClusterStart(
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
            again=_repeat_command(file, data_dir),
        )
        require_free(plan.address)
        home.save(replace(record, address=plan.address, running=()))
        try:
            _supervise(_start(plan, stack), plan.again)
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


def _start(plan: ClusterStart, stack: ExitStack) -> list[Part]:
    """Start all parts, each once those that it needs are healthy, and return them.

    ``stack`` stops them in reverse order.
    """
    plan.home.add_running("up", os.getpid())
    print_note("starting the database ...")
    embedded = None
    if not plan.database_url:
        embedded = stack.enter_context(run_database(plan.home.path / "pg"))
    url = embedded.url if embedded else plan.database_url
    database = connect_database(url)
    upgrade_schema(database)
    claim = partial(_claim_cluster, plan, database, stack)
    claim()
    if embedded is not None:
        embedded.started_again = claim  # a claim ends with the database's process
    print_note("starting the server ...")
    children = [stack.enter_context(run_server(plan, url))]
    _wait(lambda: health_of(plan.address, plan.instance) is Health.SERVING, children)
    client = stack.enter_context(connect(plan.address, PLAIN_TEXT))
    describe_cluster(plan, client)
    print_note(f"starting {plan.agents} agents ...")
    for k in range(plan.agents):
        children.append(stack.enter_context(run_agent(plan, k)))
    for agent in children[1:]:
        # Stop all agents at the same time, before waiting for the first.
        stack.callback(agent.terminate)
    wanted = {node.name for node in plan.described.nodes}
    _wait(lambda: wanted <= reachable_nodes(client, plan.name), children)
    print_line(plan.address)
    _print_next_steps(plan, client)
    return [embedded, *children] if embedded else [*children]


def _claim_cluster(plan: ClusterStart, database: Database, stack: ExitStack) -> None:
    """Keep others away from the cluster in the database until ``stack`` ends. Raises CallFailed."""
    if not stack.enter_context(database.held(f"tessera up {plan.name}")):
        raise CallFailed(
            f"another `tessera up` runs {plan.name} on this database; stop it, or choose another database or"
            " --cluster",
            Exit.REFUSED,
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


def _supervise(parts: Sequence[Part], again: str) -> None:
    """Start parts that end again, forever. Raises Unavailable if one ends too often."""
    advice = f"correct the cause and run `{again}`, which continues where this one stopped"
    supervisor = Supervisor(parts, print_note, advice)
    while True:
        supervisor.check(time.monotonic())
        time.sleep(WATCH_S)


def _print_next_steps(plan: ClusterStart, client: Client) -> None:
    request = clusters_pb2.GetClusterRequest(name=plan.name)
    stored, cluster = client.call(client.stubs.clusters.GetCluster, request), short_name(plan.name)
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
