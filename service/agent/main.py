"""The command ``tessera-agent``, which runs on a GPU node what the servers want."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tessera.client import ChannelSettings
from tessera.formulation.clock import SystemClock
from tessera.formulation.documents import NODE_LIST, NotJson, read_json
from tessera.formulation.errors import InvalidInput, TesseraError
from tessera.formulation.logs import DiscreetFormatter
from tessera.formulation.release import install_hint, installed_version
from tessera.formulation.runtimes import DEFAULT_RUNTIME
from tessera.service.agent.credentials import (
    Credentials,
    EnrolledCredentials,
    FixedCredentials,
    read_join_token,
)
from tessera.service.agent.hardware import command as health
from tessera.service.agent.hardware import options as hardware
from tessera.service.agent.hardware.monitor import HealthSettings, start_monitor
from tessera.service.agent.log_pruner import LogLimits, keep_logs_within
from tessera.service.agent.network import command as network
from tessera.service.agent.network.backend import Backend
from tessera.service.agent.network.launch import LaunchSettings
from tessera.service.agent.network.map_worker import NetworkMapWorker
from tessera.service.agent.network.node import NodeNetwork
from tessera.service.agent.network.sampling import TrafficSampler, sent_bytes_reader
from tessera.service.agent.runtimes import options as program_options
from tessera.service.agent.runtimes.programs import LOGS
from tessera.service.agent.runtimes.protocol import Runtime, RuntimeChooser
from tessera.service.agent.state import StateDir
from tessera.service.agent.stream import (
    AgentLease,
    AgentSuperseded,
    ServerLink,
    TimingOverrides,
    watch_lease,
)
from tessera.service.agent.supervisor import Supervisor
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

EXIT_INVALID, EXIT_SUPERSEDED = 2, 3

CLUSTER_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
"""The names that a cluster may have, as servers check them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The settings that an agent is started with.

    All nodes that a job may run on share ``checkpoints``. ``backends`` apply priorities to the
    nodes' interfaces; without any, the agent ignores the network plan. ``sent_bytes`` reads the
    number of bytes that the node has sent, and traffic is measured for ``measure_s``. If
    ``sent_bytes`` is None, traffic is not measured. If ``health`` is None, health is not watched.
    """

    servers: tuple[str, ...]
    cluster: str
    agent_id: str
    incarnation: str
    nodes: tuple[pb.AgentNode, ...]
    data_dir: Path
    checkpoints: Path
    timing: TimingOverrides = field(default_factory=TimingOverrides)
    grace_s: float = 30.0
    stop_on_exit: bool = False
    backends: tuple[Backend, ...] = ()
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    measure_s: float = 0.0
    sent_bytes: Callable[[], int] | None = None
    credentials: Credentials = field(default_factory=FixedCredentials)
    health: HealthSettings | None = None
    logs: LogLimits = field(default_factory=LogLimits)

    def hello(self) -> pb.Hello:
        """Return the message that registers the agent."""
        return pb.Hello(
            parent=f"clusters/{self.cluster}",
            agent_id=self.agent_id,
            incarnation=self.incarnation,
            nodes=self.nodes,
            version=installed_version(),
        )


class _LeaveRequest(Exception):
    """A request that the agent end."""


async def run_agent(
    config: AgentConfig,
    runtimes: RuntimeChooser,
    leave: asyncio.Event,
    renew: asyncio.Event | None = None,
) -> None:
    """Run the agent until ``leave`` is set. Renew its certificate whenever ``renew`` is set.

    Its children continue to run, unless ``config.stop_on_exit`` is set.

    Raises:
        InvalidInput: another user could write to the data directory.
        NotAllowed: another agent runs on the same data directory.
        Superseded: a newer incarnation has taken over the nodes; the children have been stopped.
    """
    state = StateDir(config.data_dir.resolve(), config.checkpoints.resolve() / config.cluster)
    state.claim()
    try:
        async with asyncio.TaskGroup() as tasks:
            changed = asyncio.Event()
            sampling = _sampling(config)
            supervisor = Supervisor(
                runtimes,
                state,
                grace_s=config.grace_s,
                spawn=tasks.create_task,
                changed=changed.set,
                network=_carrying(config, tasks),
                sampling=sampling,
            )
            supervisor.adopt()
            if sampling is not None:
                tasks.create_task(sampling.watch(supervisor.live, changed.set))
            lease = AgentLease(state, time.monotonic, config.timing.lease_s)
            link = ServerLink(
                servers=config.servers,
                credentials=config.credentials,
                hello=config.hello(),
                supervisor=supervisor,
                lease=lease,
                timing=config.timing,
                changed=changed,
                leave=leave,
                clock=time.monotonic,
                health=start_monitor(
                    config.health, tasks.create_task, changed.set, supervisor.live
                ),
                logs=config.data_dir.resolve() / LOGS,
            )
            tasks.create_task(watch_lease(lease, supervisor))
            logs = config.data_dir.resolve() / LOGS
            tasks.create_task(keep_logs_within(logs, config.logs, supervisor.live))
            tasks.create_task(
                _stay_connected(link, supervisor, config.credentials, renew or asyncio.Event())
            )
            await leave.wait()
            if config.stop_on_exit:
                await supervisor.close()
            raise _LeaveRequest
    except* _LeaveRequest:
        log.info("leaving", extra={"action": "leave"})
    finally:
        state.release()


async def _stay_connected(
    link: ServerLink, supervisor: Supervisor, credentials: Credentials, renew: asyncio.Event
) -> None:
    """Keep the credentials valid and the stream open.

    If the agent can never connect, or another process has taken over, all gangs are stopped. That
    process cannot adopt the gangs: this process holds the data directory, so the other one has
    a different directory. It starts the same gangs itself, and nobody would ever stop the ones
    started here.

    Raises:
        InvalidInput: there are no credentials. AgentSuperseded: another process has taken over.
    """
    renewing = None
    try:
        await credentials.prepare()
        renewing = asyncio.create_task(credentials.keep(link.renew, renew))
        await link.run()
    except AgentSuperseded:
        log.error("replaced by another process: stopping all gangs", extra={"action": "superseded"})
        await supervisor.close()
        raise
    except InvalidInput:
        await supervisor.close()
        raise
    finally:
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


def _carrying(config: AgentConfig, tasks: asyncio.TaskGroup) -> NetworkMapWorker | None:
    """Return the object that applies the network plan, or None if no back end is configured."""
    if not config.backends:
        return None
    clock = time.monotonic
    nodes = [NodeNetwork([b], clock=clock, launch=config.launch) for b in config.backends]
    return NetworkMapWorker(nodes, clock=clock, spawn=tasks.create_task)


def _sampling(config: AgentConfig) -> TrafficSampler | None:
    """Return the object that measures the traffic of gangs, or None if none is to be measured."""
    if config.sent_bytes is None:
        return None
    return TrafficSampler(
        config.sent_bytes, window_s=config.measure_s, clock=time.monotonic, sleep=time.sleep
    )


def parse_node(text: str) -> pb.AgentNode:
    """Return the node that ``NAME:TYPE:GPUS[:RACK]`` describes. Raises InvalidInput."""
    name, _, rest = text.partition(":")
    gpu_type, _, rest = rest.partition(":")
    gpus, _, rack = rest.partition(":")
    if not (name and gpu_type and gpus.isdecimal() and int(gpus) > 0):
        raise InvalidInput("--node", f"expected NAME:TYPE:GPUS[:RACK], not {text!r}")
    return pb.AgentNode(node=name, gpu_type=gpu_type, gpus=int(gpus), rack=rack)


def read_nodes(path: Path) -> list[pb.AgentNode]:
    """Read nodes from a JSON list of objects with node, gpu_type, gpus and, optionally, rack.

    Raises:
        InvalidInput: the file does not hold such a list.
        OSError: the file cannot be read.
    """
    try:
        return [
            pb.AgentNode(
                node=row["node"],
                gpu_type=row["gpu_type"],
                gpus=row["gpus"],
                rack=row.get("rack", ""),
            )
            for row in read_json("--nodes-file", path.read_text(encoding="utf-8"), NODE_LIST)
        ]
    except (NotJson, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(
            "--nodes-file",
            f"{path} must hold a JSON list of objects with node, gpu_type, gpus (and rack): {error!r}",
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-agent", description="Run on GPU nodes the jobs that the servers want there."
    )
    add = parser.add_argument
    add(
        "--server",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="Address of a server. Any replica will do. Repeat the option to name several.",
    )
    add(
        "--ca",
        default=os.environ.get("TESSERA_CA", ""),
        metavar="FILE",
        help="File of the authorities (PEM) whose servers are trusted, or 'system'. With it,"
        " connections use TLS. Default: TESSERA_CA.",
    )
    add(
        "--join-token-file",
        type=Path,
        metavar="FILE",
        help="File with a join token, with which this agent gets its first certificate."
        " Default: the token in TESSERA_JOIN_TOKEN.",
    )
    add(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="File of a certificate (PEM) of your own authority for this agent, in place of a join"
        " token. It is read again for each connection. Name the servers' port for agents with"
        " --server.",
    )
    add("--key", type=Path, metavar="FILE", help="File of the certificate's private key (PEM).")
    add("--cluster", required=True, help="Cluster that the nodes belong to.")
    add(
        "--node",
        action="append",
        default=[],
        metavar="NAME:TYPE:GPUS[:RACK]",
        help="A node with its GPU type and number of GPUs. Repeatable.",
    )
    add("--nodes-file", type=Path, help="JSON file with a list of {node, gpu_type, gpus, rack}.")
    add(
        "--agent-id",
        default="",
        help="Name of the agent, unique in the cluster and the same after a restart."
        " Default: the first node.",
    )
    add(
        "--data-dir",
        type=Path,
        required=True,
        help="Directory of the state that must survive a restart of the agent.",
    )
    add(
        "--checkpoint-dir",
        type=Path,
        help="Directory of the checkpoints, shared by all nodes. Default: DATA_DIR/checkpoints.",
    )
    add(
        "--lease-s",
        type=float,
        help="Seconds without contact to a server after which all gangs are stopped."
        " Default: the server's value.",
    )
    add(
        "--heartbeat-s", type=float, help="Seconds between heartbeats. Default: the server's value."
    )
    add(
        "--inspect-s",
        type=float,
        help="Seconds between inspections of the gangs. Default: the server's value.",
    )
    add(
        "--grace-s",
        type=float,
        default=30.0,
        help="Seconds between SIGTERM and SIGKILL to a gang. Default: 30.",
    )
    add(
        "--stop-on-exit",
        action="store_true",
        help="Stop the gangs when this process is asked to end. Default: they continue.",
    )
    add(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="Lowest level of messages to log. Default: INFO.",
    )
    program_options.add_options(parser)
    hardware.add_options(parser)
    network.add_options(parser)
    add(
        "--network-dry-run",
        action="store_true",
        help="Only report what the network back end would change.",
    )
    add(
        "--mark-traffic",
        action="store_true",
        help="Mark jobs' traffic although no back end here maps the marks."
        " Use this if switches or another program map them.",
    )
    add(
        "--measure-traffic",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Seconds for which the bytes of a job are counted while no other job sends from this node"
        " (Crux: 30). Default: 0, which disables measuring.",
    )
    return parser


def build_config(options: argparse.Namespace, incarnation: str) -> AgentConfig:
    """Return the configuration that the command line asks for. Raises InvalidInput, OSError."""
    nodes = [parse_node(text) for text in options.node]
    nodes += read_nodes(options.nodes_file) if options.nodes_file else []
    nodes, watched = hardware.resolve_nodes(options, nodes)
    if not nodes:
        raise InvalidInput(
            "--node", "name at least one node, here or in --nodes-file, or pass --discover"
        )
    # The name becomes a part of the path of checkpoints.
    if not CLUSTER_PATTERN.fullmatch(options.cluster):
        raise InvalidInput(
            "--cluster",
            "must be 1 to 100 letters, digits, '-', '_' or '.', the first a letter or digit",
        )
    for name in ("lease_s", "heartbeat_s", "inspect_s", "grace_s"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InvalidInput(f"--{name.replace('_', '-')}", f"must be above 0, not {value}")
    backends = tuple(network.make_backends(options, dry_run=options.network_dry_run))
    marks = options.mark_traffic or any(not backend.dry_run for backend in backends)
    return AgentConfig(
        servers=tuple(options.server),
        cluster=options.cluster,
        agent_id=options.agent_id or nodes[0].node,
        incarnation=incarnation,
        nodes=tuple(nodes),
        data_dir=options.data_dir,
        checkpoints=options.checkpoint_dir or options.data_dir / "checkpoints",
        timing=TimingOverrides(
            lease_s=options.lease_s, heartbeat_s=options.heartbeat_s, inspect_s=options.inspect_s
        ),
        grace_s=options.grace_s,
        stop_on_exit=options.stop_on_exit,
        backends=backends,
        launch=LaunchSettings(queue_pairs=options.queue_pairs, marks=marks),
        measure_s=options.measure_traffic,
        sent_bytes=_counted(options, nodes),
        credentials=_credentials(options, nodes),
        health=watched,
        logs=program_options.log_limits(options),
    )


def _credentials(options: argparse.Namespace, nodes: Sequence[pb.AgentNode]) -> Credentials:
    """Return what the agent shows servers. Raises InvalidInput."""
    if (options.certificate is None) != (options.key is None):
        raise InvalidInput("--key", "must be given together with --certificate")
    text = os.environ.pop("TESSERA_JOIN_TOKEN", "")  # the processes of jobs must not get it
    enrols = options.join_token_file is not None or text
    if not options.ca:
        if enrols or options.certificate:
            raise InvalidInput(
                "--ca",
                "must be given, because secrets are only sent to servers of a trusted authority",
            )
        return FixedCredentials()
    if options.certificate is not None:
        return FixedCredentials(
            channel=ChannelSettings(
                authorities=options.ca, certificate=options.certificate, key=options.key
            )
        )
    return EnrolledCredentials(
        directory=options.data_dir.resolve() / "identity",
        servers=tuple(options.server),
        authorities=options.ca,
        join_token=read_join_token(options.join_token_file, text),
        cluster=options.cluster,
        agent=options.agent_id or nodes[0].node,
        nodes=[node.node for node in nodes],
        wall_s=SystemClock().wall_s,
    )


def _counted(
    options: argparse.Namespace, nodes: Sequence[pb.AgentNode]
) -> Callable[[], int] | None:
    """Return a function that reads the bytes that the node has sent. Raises InvalidInput.

    If measuring was not requested, return None.
    """
    window_s = options.measure_traffic
    if not (window_s == 0 or 1 <= window_s < math.inf):
        raise InvalidInput("--measure-traffic", f"must be 0, or at least 1 second, not {window_s}")
    if window_s == 0:
        return None
    if len(nodes) > 1:
        raise InvalidInput(
            "--measure-traffic",
            "needs an agent with one node, because the traffic of several nodes cannot be distinguished",
        )
    if options.netns:
        raise InvalidInput(
            "--measure-traffic",
            "cannot read the counters in --netns; run the agent in that namespace",
        )
    if find_spec("numpy") is None:
        raise InvalidInput(
            "--measure-traffic", f"needs numpy; install it with: {install_hint('traffic')}"
        )
    return sent_bytes_reader(options.interface)


def make_runtimes(options: argparse.Namespace, config: AgentConfig) -> dict[str, Runtime]:
    """Return the agent's runtimes by name, as in ``formulation.runtimes``. Raises InvalidInput."""
    return program_options.make_runtimes(
        options,
        servers=config.servers,
        cluster=config.cluster,
        nodes={node.node: node.gpus for node in config.nodes},
        credentials=config.credentials,
        grace_s=config.grace_s,
    )


async def _serve_until_signal(config: AgentConfig, runtimes: RuntimeChooser) -> None:
    leave, renew, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    # Not SIGHUP: an agent in a terminal that is closed must end.
    loop.add_signal_handler(signal.SIGUSR1, renew.set)
    await run_agent(config, runtimes, leave, renew)


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(DiscreetFormatter())
    logging.basicConfig(level=level, handlers=[handler])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent, ``network ...`` or ``health ...``, and return the exit status.

    The status is 2 if a setting is wrong and 3 if the agent was superseded.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["network"]:
        return network.main(given[1:])
    if given[:1] == ["health"]:
        return health.main(given[1:])
    options = _parser().parse_args(given)
    _set_up_logging(options.log_level)
    status = 0
    try:
        config = build_config(options, uuid.uuid4().hex)
        runtimes = RuntimeChooser(make_runtimes(options, config), DEFAULT_RUNTIME)
        asyncio.run(_serve_until_signal(config, runtimes))
    except* AgentSuperseded as group:
        status = EXIT_SUPERSEDED
        log.error("%s", group.exceptions[0], extra={"action": "exit"})
    except* (TesseraError, OSError) as group:
        status = EXIT_INVALID
        log.error("%s", group.exceptions[0], extra={"action": "exit"})
    return status


if __name__ == "__main__":
    sys.exit(main())
