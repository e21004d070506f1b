"""The CPU cores and the host memory of this machine that jobs may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tessera.service.agent.files import read_trusted
from tessera.service.agent.isolation import CGROUP_ROOT, SHARE_OF_MEMORY, find_own_cgroup
from tessera.v1 import agents_pb2 as pb


def add_host_resources(node: pb.AgentNode, root: Path = CGROUP_ROOT) -> pb.AgentNode:
    """Return the node with the CPU cores and the host memory that jobs may use on this machine."""
    whole = pb.AgentNode(cpus=find_cores(root), host_bytes=find_host_bytes(root))
    whole.MergeFrom(node)
    return whole


def find_cores(root: Path = CGROUP_ROOT) -> int:
    """Return the cores that this process may run on, within the quota of its cgroup (version 2)."""
    cores = len(os.sched_getaffinity(0))
    for text in _limits("cpu.max", root):
        quota, _, period = text.partition(" ")
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def find_host_bytes(root: Path = CGROUP_ROOT) -> int:
    """Return the share of the host memory that programs may use, of what its cgroup leaves this process."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for text in _limits("memory.max", root)]
    return int(min([memory, *limits]) * SHARE_OF_MEMORY)


def _limits(file: str, root: Path) -> Iterator[str]:
    """Yield the limits of the agent's own cgroup and of those above it. One without a limit has none."""
    own = find_own_cgroup(root)
    for group in () if own is None else (own, *own.parents):
        if not group.is_relative_to(root):
            return
        with suppress(OSError):  # the uppermost cgroup has no such file
            text = read_trusted(group / file).strip()
            if not text.startswith("max"):
                yield text
