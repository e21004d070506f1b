"""The options of an agent, and the configuration that they make."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tessera.client import ChannelSettings
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.documents import NODE_LIST, NotJson, read_json
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.logs import LOG_FORMATS
from tessera.formulation.base.release import install_hint, installed_version
from tessera.formulation.base.selectors import require_node_labels
from tessera.service.agent.credentials import (
    Credentials,
    EnrolledCredentials,
    FixedCredentials,
    read_join_token,
)
from tessera.service.agent.files import read_trusted
from tessera.service.agent.hardware import options as hardware
from tessera.service.agent.hardware.monitor import HealthSettings
from tessera.service.agent.log_pruner import LogLimits
from tessera.service.agent.network import command as network
from tessera.service.agent.network.backend import Backend
from tessera.service.agent.network.launch import LaunchSettings
from tessera.service.agent.network.sampling import sent_bytes_reader
from tessera.service.agent.runtimes import options as program_options
from tessera.service.agent.runtimes.protocol import Runtime
from tessera.service.agent.stream import TimingOverrides
from tessera.v1 import agents_pb2 as pb

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


def parse_node(text: str) -> pb.AgentNode:
    """Return the node that ``NAME:TYPE:GPUS[:RACK]`` describes. Raises InvalidInput."""
    name, _, rest = text.partition(":")
    gpu_type, _, rest = rest.partition(":")
    gpus, _, rack = rest.partition(":")
    if not (name and gpu_type and gpus.isdecimal() and int(gpus) > 0):
        raise InvalidInput("--node", f"expected NAME:TYPE:GPUS[:RACK], not {text!r}")
    return pb.AgentNode(node=name, gpu_type=gpu_type, gpus=int(gpus), rack=rack)


def read_nodes(path: Path) -> list[pb.AgentNode]:
    """Read nodes from a JSON list of objects with node, gpu_type, gpus and, optionally, rack and labels.

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
                labels=dict(row.get("labels", {}).items()),
            )
            for row in read_json("--nodes-file", read_trusted(path), NODE_LIST)
        ]
    except (NotJson, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(
            "--nodes-file",
            f"{path} must hold a JSON list of objects with node, gpu_type, gpus (and rack,"
            f" labels): {error!r}",
        ) from error


def _label_nodes(nodes: Sequence[pb.AgentNode], texts: Sequence[str]) -> None:
    """Give the labels of ``--label`` to nodes that have none with the same keys."""
    given = dict(_parse_label(text) for text in texts)
    for node in nodes:
        node.labels.update(require_node_labels("--label", {**given, **node.labels}))


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput("--label", f"expected KEY=VALUE, not {text!r}")
    return key, value


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the agent's command line."""
    parser = argparse.ArgumentParser(
        prog="tessera-agent", description="Run on GPU nodes the jobs that the servers want there."
    )
    _add_servers(parser)
    _add_nodes(parser)
    _add_times(parser)
    program_options.add_options(parser)
    hardware.add_options(parser)
    network.add_options(parser)
    _add_traffic(parser)
    return parser


def _add_servers(parser: argparse.ArgumentParser) -> None:
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


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cluster", required=True, help="Cluster that the nodes belong to.")
    add(
        "--node",
        action="append",
        default=[],
        metavar="NAME:TYPE:GPUS[:RACK]",
        help="A node with its GPU type and number of GPUs. Repeatable.",
    )
    add(
        "--nodes-file",
        type=Path,
        help="JSON file with a list of {node, gpu_type, gpus, rack, labels}.",
    )
    add(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="A label of the agent's nodes, by which jobs select nodes. Repeatable. A label with the"
        " same key in --nodes-file, or that operators give to the node, counts before it.",
    )
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


def _add_times(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--lease-s",
        type=float,
        help="Seconds without contact to a server after which all gangs are stopped, at most the"
        " server's. Default: the server's value.",
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
    add(
        "--log-format",
        default=LOG_FORMATS[0],
        choices=LOG_FORMATS,
        help="Form of log records: a line of text, or a JSON object, each with its facts."
        " Default: text.",
    )


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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


def build_config(options: argparse.Namespace, incarnation: str) -> AgentConfig:
    """Return the configuration that the command line asks for. Raises InvalidInput, OSError."""
    nodes = [parse_node(text) for text in options.node]
    nodes += read_nodes(options.nodes_file) if options.nodes_file else []
    nodes, watched = hardware.resolve_nodes(options, nodes)
    if not nodes:
        raise InvalidInput(
            "--node", "name at least one node, here or in --nodes-file, or pass --discover"
        )
    _label_nodes(nodes, options.label)
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
    """Return the agent's runtimes by name, as in ``formulation.job.runtimes``. Raises InvalidInput."""
    return program_options.make_runtimes(
        options,
        servers=config.servers,
        cluster=config.cluster,
        nodes={node.node: node.gpus for node in config.nodes},
        credentials=config.credentials,
        grace_s=config.grace_s,
    )
