"""Builders of gangs, and helpers for waiting, for tests of the agent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tessera.formulation.job.launch import LaunchSpec
from tessera.service.agent.runtimes.protocol import Member, MemberHandle, Runtime
from tessera.v1 import agents_pb2 as pb
from tests.support.launches import launch_message
from tests.support.patience import PATIENCE_S

T = TypeVar("T")


def a_gang(job: str = "a", generation: int = 1, **overrides: Any) -> pb.DesiredGang:
    """Return a gang on GPUs 0 and 1 of node n0, which is also its leader.

    The members of a larger one have equal numbers of GPUs. ``runtime`` is the launch's.
    """
    fields: dict[str, Any] = {
        "shares": (("n0", (0, 1)),),
        "leader": "n0",
        "members": ("n0",),
        "gpus": 2,
        "iter_time_s": 1.0,
        "iterations_total": 1000.0,
    }
    fields |= overrides
    members, gpus = len(fields["members"]), fields.pop("gpus")
    fields.setdefault("member_gpus", (gpus // members,) * members)
    shares = [pb.AgentShare(node=node, gpu_indices=gpus) for node, gpus in fields.pop("shares")]
    if isinstance(launch := fields.get("launch"), LaunchSpec):
        fields["launch"] = launch_message(launch)
    runtime = fields.pop("runtime", "")
    gang = pb.DesiredGang(job=job, generation=generation, shares=shares, **fields)
    gang.launch.runtime = runtime or gang.launch.runtime
    return gang


def launch_leader(
    runtime: Runtime,
    gang: pb.DesiredGang,
    directory: Path,
    store: Path,
    environment: Mapping[str, str] | None = None,
) -> MemberHandle:
    """Launch the leader of ``gang``, as the supervisor does."""
    member = Member(
        gang=gang,
        node=gang.leader,
        directory=directory,
        store=store,
        environment=environment or {},
    )
    return runtime.launch(member)


async def until(
    condition: Callable[[], T], *, within_s: float = PATIENCE_S, every_s: float = 0.01
) -> T:
    """Wait for ``condition`` and return its first true value."""
    end_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end_s, "the condition was never true"
        await asyncio.sleep(every_s)
    return value


def process_of(data_dir: Path, job: str, generation: int) -> int:
    """Return the id of a job's process."""
    path = data_dir / "gangs" / f"{job}@{generation}" / "process.json"
    return int(json.loads(path.read_text())["pid"])


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
