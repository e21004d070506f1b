"""The options of an agent for the discovery of its node, and for its health."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import socket
from collections.abc import Sequence

from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.service.agent.hardware.devices import Device, Devices, VirtualDevices
from tessera.service.agent.hardware.discovery import describe_node, expected_uuids
from tessera.service.agent.hardware.host import add_host_resources
from tessera.service.agent.hardware.memory import HardwareMemory
from tessera.service.agent.hardware.monitor import HealthSettings
from tessera.service.agent.hardware.nvml import NvmlDevices, load_nvml
from tessera.v1 import agents_pb2 as pb

VIRTUAL_TYPE = "cpu"
"""The GPU type of virtual GPUs, unless another one is given."""

MAX_VIRTUAL_GPUS = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--discover",
        action="store_true",
        help="In place of --node: name the node after this host, with the GPUs that NVIDIA's driver"
        " reports, and the CPU cores and host memory that jobs may use.",
    )
    add(
        "--virtual-gpus",
        default="",
        metavar="[TYPE:]GPUS",
        help="With --discover: a number of GPUs that do not exist, for a machine without."
        f" Default type: {VIRTUAL_TYPE}.",
    )
    add(
        "--watch-gpus",
        action=argparse.BooleanOptionalAction,
        help="Watch the GPUs' health through NVIDIA's driver. A fault drains the node."
        " Default: with --discover.",
    )
    add(
        "--health-command",
        default="",
        metavar="COMMAND",
        help="Command of the site that checks this node. Unless it ends with status 0, its last line"
        " is a fault, which drains the node. It runs without a shell.",
    )
    add(
        "--health-period",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Seconds between the end of --health-command and its next start. Default: 60.",
    )
    add(
        "--health-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="Seconds that --health-command may take. Default: 30.",
    )
    add(
        "--validate-command",
        default="",
        metavar="COMMAND",
        help="Command that tests the node once its faults are gone, before it can return. It runs"
        " when no job is left here, without a shell.",
    )
    add(
        "--validate-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="Seconds that --validate-command may take. Default: 1800.",
    )


def resolve_nodes(
    options: argparse.Namespace, given: Sequence[pb.AgentNode], host: str = ""
) -> tuple[list[pb.AgentNode], HealthSettings | None]:
    """Return the agent's nodes, and how their health is watched (None: not at all).

    ``given`` are the nodes of the command line. ``host`` is this host's name, "" to ask the system.

    Raises:
        InvalidInput: the options contradict each other, or nothing can be discovered.
    """
    for name in ("health_period", "health_timeout", "validate_timeout"):
        if not 0 < getattr(options, name) < math.inf:
            raise InvalidInput(f"--{name.replace('_', '-')}", "must be a number above 0")
    if options.discover and given:
        raise InvalidInput("--discover", "takes the place of --node and --nodes-file; omit those")
    if options.virtual_gpus and not options.discover:
        raise InvalidInput("--virtual-gpus", "needs --discover")
    commands = {
        name: _read_command(f"--{name.replace('_', '-')}", getattr(options, name))
        for name in ("health_command", "validate_command")
    }
    watches = options.discover if options.watch_gpus is None else options.watch_gpus
    nodes, memory = list(given), HardwareMemory.load(options.data_dir)
    if options.virtual_gpus:
        memory.uuids = ()  # their number is stated, and none of them can be lost
    devices, found = _find_devices(options, needed=options.discover or watches)
    if options.discover:
        gpu_type = found[0].product if options.virtual_gpus else ""
        node = describe_node(host or socket.gethostname(), found, memory, gpu_type)
        nodes = [add_host_resources(node)]
    if not (watches or any(commands.values())):
        return nodes, None
    if len(nodes) != 1:
        raise InvalidInput(
            "--watch-gpus" if watches else "--health-command",
            "needs an agent with one node, because the checks are those of this machine",
        )
    memory.product = found[0].product if found else memory.product
    return nodes, HealthSettings(
        node=nodes[0].node,
        memory=memory,
        devices=devices if watches else None,
        uuids=_watched_uuids(nodes[0].gpus, found, memory) if watches else (),
        health_period_s=options.health_period,
        health_timeout_s=options.health_timeout,
        validate_timeout_s=options.validate_timeout,
        **commands,
    )


def _find_devices(
    options: argparse.Namespace, *, needed: bool
) -> tuple[Devices | None, tuple[Device, ...]]:
    """Return the devices of this machine, and the list of them. Raises InvalidInput."""
    if not needed:
        return None, ()
    devices: Devices
    if options.virtual_gpus:
        gpu_type, _, gpus = options.virtual_gpus.rpartition(":")
        if not (gpus.isdecimal() and 1 <= int(gpus) <= MAX_VIRTUAL_GPUS):
            raise InvalidInput(
                "--virtual-gpus",
                f"expected [TYPE:]GPUS with 1 to {MAX_VIRTUAL_GPUS} GPUs, not {options.virtual_gpus!r}",
            )
        devices = VirtualDevices(int(gpus), gpu_type or VIRTUAL_TYPE)
    else:
        devices = NvmlDevices(load_nvml())
    try:
        return devices, devices.list()
    except Unavailable as error:
        raise InvalidInput("--discover", f"{error}; check it with nvidia-smi") from error


def _watched_uuids(gpus: int, found: Sequence[Device], memory: HardwareMemory) -> tuple[str, ...]:
    """Return the GPUs to watch, one for each index of the node. Those that are missing are lost."""
    uuids = expected_uuids(found, memory)[:gpus]
    return uuids + tuple(f"missing-{index}" for index in range(len(uuids), gpus))


def _read_command(option: str, text: str) -> tuple[str, ...]:
    """Return a command as a list of arguments. Raises InvalidInput."""
    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidInput(option, f"cannot be split into arguments: {error}") from error
    if text and not argv:
        raise InvalidInput(option, "is empty")
    if argv and shutil.which(argv[0]) is None:
        raise InvalidInput(
            option, f"{argv[0]} is not a program; give its path, and make it executable"
        )
    return argv
