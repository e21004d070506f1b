"""``tessera-agent network``, which shows, plans and applies a node's map of priorities by hand."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.formulation.answer.network.tags import FabricCapabilities, TagSettings, assign_tags
from tessera.formulation.base.documents import NODE_LIST, NotJson, read_json
from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.service.agent.files import read_trusted
from tessera.service.agent.network.backend import AdviceBackend, Backend, find_differences
from tessera.service.agent.network.commands import runner_inside
from tessera.service.agent.network.dcb import DcbBackend
from tessera.service.agent.network.devices import forced_traffic_classes
from tessera.service.agent.network.launch import LaunchSettings, marking_environment
from tessera.service.agent.network.node import NodeNetwork
from tessera.service.agent.network.tc import TcBackend

BACKENDS = ("none", "dcb", "tc")
EXIT_INVALID = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a node's network."""
    add = parser.add_argument
    add(
        "--network-backend",
        default="none",
        choices=BACKENDS,
        help="Tool that sets priorities on the interfaces. Default: none, which changes nothing.",
    )
    add("--interface", action="append", default=[], help="A NIC that jobs use. Repeatable.")
    add(
        "--netns",
        default="",
        help="Network namespace of the interfaces. Default: that of the agent.",
    )
    add(
        "--discipline",
        default="htb",
        choices=("htb", "prio"),
        help="Queueing discipline of the back end tc. Default: htb.",
    )
    add(
        "--link-bit-per-s",
        type=int,
        default=0,
        help="Rate of the link in bit/s, which the discipline htb needs.",
    )
    add(
        "--queue-pairs",
        type=int,
        default=0,
        help="Value of NCCL_IB_QPS_PER_CONNECTION for jobs. Default: 0, which leaves it unset.",
    )


def make_backends(options: argparse.Namespace, *, dry_run: bool) -> list[Backend]:
    """Return the back end of each interface. Raises InvalidInput."""
    kind, run = options.network_backend, runner_inside(options.netns)
    if kind == "none":
        return [AdviceBackend(name) for name in options.interface or [""]]
    if not options.interface:
        raise InvalidInput("--interface", "name at least one interface for this back end")
    if kind == "dcb":
        return [DcbBackend(name, run=run, dry_run=dry_run) for name in options.interface]
    return [
        TcBackend(
            name,
            discipline=options.discipline,
            link_bit_per_s=options.link_bit_per_s,
            run=run,
            dry_run=dry_run,
        )
        for name in options.interface
    ]


def read_settings(path: Path, fabric: FabricCapabilities) -> TagSettings:
    """Read settings from a JSON file: levels, jobs (job: level) and optional tags (job: DSCP).

    Raises:
        InvalidInput: the file does not hold such settings.
        OSError: it cannot be read.
    """
    try:
        stored = read_json("--settings", read_trusted(path), NODE_LIST)
        jobs = {str(job): int(level) for job, level in stored["jobs"].items()}
        tags = {str(job): int(tag) for job, tag in stored.get("tags", {}).items()}
        levels = int(stored["levels"])
    except (NotJson, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(
            "--settings",
            f'{path} must hold {{"levels": K, "jobs": {{job: level}}, "tags": {{job: DSCP}}}}: {error!r}',
        ) from error
    return assign_tags(jobs, levels, tags, fabric=fabric)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status, which is 2 if something is wrong."""
    options = _parser().parse_args(arguments)
    try:
        answer = _answer(options)
    except (TesseraError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_INVALID
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-agent network",
        description="Show, plan or apply by hand the map of DSCP tags to priorities on a node.",
    )
    add = parser.add_argument
    add(
        "action",
        choices=("show", "plan", "apply"),
        help="show prints the current map, plan prints what apply would change, and apply changes it.",
    )
    add(
        "--settings",
        type=Path,
        help="JSON file with levels, jobs and tags, which plan and apply need.",
    )
    add(
        "--priorities",
        default="0,1,2,3,4,5,6,7",
        help="Priorities that jobs may use. The one that is served last comes first."
        " Default: %(default)s.",
    )
    add_options(parser)
    return parser


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    """Do what was requested; return the object to print."""
    selected = make_backends(options, dry_run=options.action != "apply")
    if options.action == "show":
        return {b.interface: _shown(b) for b in selected}
    if options.settings is None:
        raise InvalidInput("--settings", "must be given for plan and apply")
    try:
        fabric = FabricCapabilities(priorities=tuple(int(p) for p in options.priorities.split(",")))
    except ValueError as error:
        raise InvalidInput("--priorities", "must be numbers separated by commas") from error
    settings = read_settings(options.settings, fabric)
    launch = LaunchSettings(queue_pairs=options.queue_pairs)
    return {
        "jobs": {job: marking_environment(job, settings, launch) for job in settings.tags},
        "interfaces": {b.interface: _carried_out(b, settings) for b in selected},
    }


def _shown(backend: Backend) -> dict[str, Any]:
    return {
        "priorities": {str(tag): p for tag, p in sorted(backend.read().items())},
        "forced_traffic_class": forced_traffic_classes(backend.interface),
        "findings": list(backend.findings()),
    }


def _carried_out(backend: Backend, settings: TagSettings) -> dict[str, Any]:
    """Apply as the agent does, with a drain between the steps.

    Return the changes, the commands and the findings.
    """
    changes = find_differences(backend.interface, backend.read(), settings.priorities)
    commands = [shlex.join(argv) for argv in backend.commands(changes)]
    network = NodeNetwork([backend], clock=time.monotonic)
    network.desired(settings)
    while (wait_s := network.advance()) is not None:
        time.sleep(wait_s)
    return {
        "done": not backend.dry_run,
        "changes": [{"tag": c.tag, "before": c.before, "after": c.after} for c in changes],
        "commands": commands,
        "findings": list(network.findings()),
    }
