"""Hosts made of network namespaces and joined by virtual cables.

They need root on Linux with iproute2.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tessera.formulation.base.errors import Unavailable
from tessera.service.agent.network.commands import run_command, runner_inside, search_path

REPOSITORY = Path(__file__).parents[2]
FLOWS = Path(__file__).with_name("flows.py")


@functools.cache
def why_unavailable() -> str:
    """Return why namespaces with shaped cables are impossible here, or "" if they are possible."""
    for program in ("ip", "tc"):
        if shutil.which(program, path=search_path()) is None:
            return f"{program} is missing: install the package iproute2"
    try:
        with hosts(1) as (name,):
            runner_inside(name)(["ip", "link", "add", "x", "type", "veth", "peer", "name", "y"])
            runner_inside(name)(["tc", "qdisc", "add", "dev", "x", "root", "handle", "1:", "htb"])
    except (Unavailable, OSError) as error:
        return f"not permitted here, or not in this kernel: {error}"
    return ""


@pytest.fixture
def namespaces() -> None:
    """Skip a test if ``why_unavailable`` returns a reason."""
    if why_unavailable():
        pytest.skip(f"network namespaces: {why_unavailable()}")


@contextmanager
def hosts(count: int) -> Iterator[tuple[str, ...]]:
    """Create ``count`` namespaces with unique names, and delete them at the end."""
    with ExitStack() as stack:
        names = []
        for number in range(count):
            name = f"tessera-{uuid.uuid4().hex[:8]}-{number}"
            run_command(["ip", "netns", "add", name])
            stack.callback(run_command, ["ip", "netns", "del", name])
            run_command(["ip", "-n", name, "link", "set", "lo", "up"])
            names.append(name)
        yield tuple(names)


def cable(left: str, right: str, subnet: str) -> tuple[str, str]:
    """Join two hosts as ``subnet``.1 and .2 of a /24, and return the interfaces' names."""
    one, two = (f"v{uuid.uuid4().hex[:8]}" for _ in range(2))
    run_command(
        [
            "ip",
            "link",
            "add",
            one,
            "netns",
            left,
            "type",
            "veth",
            "peer",
            "name",
            two,
            "netns",
            right,
        ]
    )
    for host, interface, number in ((left, one, 1), (right, two, 2)):
        run_command(["ip", "-n", host, "addr", "add", f"{subnet}.{number}/24", "dev", interface])
        run_command(["ip", "-n", host, "link", "set", interface, "up"])
    return one, two


def sysctl(host: str, name: str, value: int) -> None:
    """Set a network sysctl of one host."""
    path = f"/proc/sys/net/{name.replace('.', '/')}"
    runner_inside(host)(["sh", "-c", f"echo {value} > {path}"])


def python(host: str, code: str, *arguments: str) -> object:
    """Run Python code of this repository on a host, and return the JSON that it prints."""
    argv = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-c", code, *arguments]
    return json.loads(runner_inside(host)(argv))


class Race:
    """Two endless UDP flows from one host to another, each with its DSCP tag."""

    def __init__(self, sender: str, receiver: str, address: str, tags: tuple[int, int]) -> None:
        self._stack = ExitStack()
        shown = [str(tag) for tag in tags]
        self._receiver = self._start(receiver, "receive", address)
        assert self._line() == ["ready"]
        self._start(sender, "send", address, *shown)
        self._tags = tags

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shares(self, count: int) -> dict[int, float]:
        """Return the share of each tag in the next ``count`` bytes after those on the way."""
        assert self._receiver.stdin is not None
        self._receiver.stdin.write(f"{count}\n")
        self._receiver.stdin.flush()
        got = [int(word) for word in self._line()]
        return {tag: bytes_ / sum(got) for tag, bytes_ in zip(self._tags, got, strict=True)}

    def _line(self) -> list[str]:
        assert self._receiver.stdout is not None
        return self._receiver.stdout.readline().split()

    def _start(self, host: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-S", str(FLOWS), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process
