"""The options of an agent that concern users' programs, and the runtimes that they configure."""

from __future__ import annotations

import argparse
import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tessera.client import is_on_this_machine
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.runtimes import PROFILER, REPLAY, RUNTIMES
from tessera.service.agent.credentials import Credentials
from tessera.service.agent.isolation import UserRule, find_user, require_entrance
from tessera.service.agent.lease import LEASE_FILE
from tessera.service.agent.log_pruner import LogLimits
from tessera.service.agent.runtimes.offers import OfferSettings
from tessera.service.agent.runtimes.profiler import ProfilerRuntime
from tessera.service.agent.runtimes.programs import ProgramRuntime, ProgramSettings
from tessera.service.agent.runtimes.protocol import Runtime
from tessera.service.agent.runtimes.replay import ReplayRuntime
from tessera.service.agent.trainer_certificate import CertificateSource

LEAST_LOG_MIB: Final = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of runtimes to the agent's parser."""
    add = parser.add_argument_group("programs of jobs").add_argument
    add(
        "--checkpoint-s",
        type=float,
        default=600.0,
        help="Seconds between checkpoints: simulated ones of replayed jobs, and real ones between"
        " requests to programs that train. Default: 600.",
    )
    add(
        "--clock-factor",
        type=float,
        default=1.0,
        help="Simulated seconds per real second of replayed jobs. Programs run only if it is 1."
        " Default: 1.",
    )
    add(
        "--address",
        default="",
        help="Address of this node for the other nodes of a job. Default: the one from which it"
        " reaches the server.",
    )
    add(
        "--run-as",
        default="",
        metavar="USER",
        help="User that programs run as if their job names none. An agent that runs as root needs it."
        " Default: the agent's own user.",
    )
    add(
        "--allow-user",
        action="append",
        default=[],
        metavar="USER",
        help="User that jobs may name for their programs. Repeatable. Only an agent that runs as root"
        " can use it.",
    )
    add(
        "--secrets-dir",
        type=Path,
        metavar="DIR",
        help="Directory with the secrets of jobs, in files TENANT/NAME. Those of jobs without a tenant"
        " are in the folder 'default'.",
    )
    add(
        "--python",
        default="python3",
        metavar="PROGRAM",
        help="Python interpreter of training scripts. A job's variable PATH may lead to another one."
        " Default: python3.",
    )
    add(
        "--log-mib",
        type=int,
        default=64,
        metavar="MIB",
        help="Output in MiB that is kept of each rank of each start. Default: 64.",
    )
    add(
        "--keep-logs-days",
        type=float,
        default=7.0,
        metavar="DAYS",
        help="Days for which the output of starts that have ended is kept on this node. Default: 7.",
    )
    add(
        "--keep-logs-gib",
        type=float,
        default=20.0,
        metavar="GIB",
        help="Output in GiB that is kept on this node. Beyond that, the oldest of starts that have ended"
        " is deleted. Default: 20.",
    )


def log_limits(options: argparse.Namespace) -> LogLimits:
    """Return how much output the node keeps. Raises InvalidInput."""
    for name in ("keep_logs_days", "keep_logs_gib"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            raise InvalidInput(f"--{name.replace('_', '-')}", f"must be at least 0, not {value}")
    return LogLimits(
        keep_s=options.keep_logs_days * 86_400, keep_bytes=int(options.keep_logs_gib * 2**30)
    )


def offer_settings(options: argparse.Namespace, servers: Sequence[str]) -> OfferSettings:
    """Return the settings that decide which runtimes the agent can start."""
    return OfferSettings(
        python=options.python,
        environment=dict(os.environ),
        users=_user_rule(options),
        refusal=_refusal(options, servers),
    )


def make_runtimes(
    options: argparse.Namespace,
    *,
    servers: Sequence[str],
    cluster: str,
    nodes: dict[str, int],
    credentials: Credentials,
    grace_s: float,
) -> dict[str, Runtime]:
    """Return the agent's runtimes by name, as in ``formulation.job.runtimes``.

    Raises:
        InvalidInput: an option is wrong, or no program could run as its users.
    """
    if options.log_mib < LEAST_LOG_MIB:
        raise InvalidInput("--log-mib", f"must be at least {LEAST_LOG_MIB}")
    settings = ProgramSettings(
        data_dir=options.data_dir.resolve(),
        address=options.address or _own_address(servers[0]),
        nodes=nodes,
        environment=dict(os.environ),
        users=_user_rule(options),
        secrets=options.secrets_dir.resolve() if options.secrets_dir else None,
        python=options.python,
        grace_s=grace_s,
        checkpoint_s=options.checkpoint_s,
        log_bytes=options.log_mib << 20,
        refusal=_refusal(options, servers),
        certificates=CertificateSource(SystemClock().wall_s()),
    )
    _require_users(settings, options.checkpoint_dir)
    lease = str(settings.data_dir / LEASE_FILE)
    runtimes: dict[str, Runtime] = {
        REPLAY: ReplayRuntime(
            clock_factor=options.clock_factor,
            checkpoint_s=options.checkpoint_s,
            lease=lease,
        ),
        PROFILER: ProfilerRuntime(
            servers=tuple(servers),
            cluster=cluster,
            environment=dict(os.environ),
            lease=lease,
            credentials=credentials,
        ),
    }
    programs = [name for name, runtime in RUNTIMES.items() if runtime.trains]
    return runtimes | {name: ProgramRuntime(name=name, settings=settings) for name in programs}


def _user_rule(options: argparse.Namespace) -> UserRule:
    return UserRule(default=options.run_as, allowed=tuple(options.allow_user))


def _require_users(settings: ProgramSettings, checkpoints: Path | None) -> None:
    """Check that the users of programs exist, and can enter what is above their directories.

    Only an agent that runs as root has other users than its own. Raises UnsuitableNode.
    """
    if os.geteuid() != 0:
        return
    rule = settings.users
    for name in dict.fromkeys(filter(None, (rule.default, *rule.allowed))):
        user = find_user(name)
        for directory in filter(None, (settings.data_dir, checkpoints)):
            existing = (path for path in directory.resolve().parents if path.is_dir())
            require_entrance(next(existing), user)


def _refusal(options: argparse.Namespace, servers: Sequence[str]) -> str:
    """Return why this agent runs no programs, or ""."""
    if options.clock_factor != 1:
        return (
            f"this agent replays jobs {options.clock_factor:g} times as fast (--clock-factor), and"
            " programs run in real time; submit the job to a cluster without a clock factor"
        )
    if not options.ca and not all(is_on_this_machine(server) for server in servers):
        return (
            "this agent's connection to the server is not encrypted, so whoever can change it could run"
            " programs here; start the agent with --ca and a join token"
        )
    return ""


def _own_address(server: str) -> str:
    """Return the address from which this machine reaches ``server``. No packet is sent."""
    host = server.rpartition(":")[0].strip("[]") or "127.0.0.1"
    if server.startswith("unix:"):
        return "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"  # the server cannot be found yet; --address says more
