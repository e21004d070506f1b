"""Parts of an agent without processes: an interface that accepts tag maps, and endless gangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tessera.formulation.base.errors import Unavailable
from tessera.service.agent.network.backend import MapChange, find_differences
from tessera.service.agent.runtimes.protocol import (
    ExitOutcome,
    Member,
    MemberExit,
    MemberHandle,
    Progress,
)
from tessera.v1 import agents_pb2 as pb
from tests.support.patience import PATIENCE_S


class FakeInterface:
    """An interface that answers once it is ``free``, and accepts maps unless it ``refuses``."""

    dry_run = False

    def __init__(self, interface: str = "eth1", **priorities: int) -> None:
        """Begin with a map: ``t10=3`` gives tag 10 priority 3."""
        self.interface = interface
        self.table = {int(tag[1:]): priority for tag, priority in priorities.items()}
        self.writes: list[dict[int, int]] = []
        self.free = threading.Event()
        self.free.set()
        self.refuses = ""
        self.reads = 0

    def read(self) -> dict[int, int]:
        """Return the map in force."""
        self.reads += 1
        assert self.free.wait(PATIENCE_S)
        return dict(self.table)

    def apply(self, wanted: Mapping[int, int]) -> tuple[MapChange, ...]:
        """Write the map."""
        if self.refuses:
            raise Unavailable(self.refuses)
        changes = find_differences(self.interface, self.table, wanted)
        self.table |= wanted
        self.writes.append(dict(wanted))
        return changes

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        return []

    def findings(self) -> tuple[str, ...]:
        return ()


class EndlessProcess:
    """A process that runs until it is asked to end."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def begun(self) -> None:
        return

    async def ended(self) -> MemberExit:
        await self.stopped.wait()
        return MemberExit(outcome=ExitOutcome.STOPPED)

    def observe(self) -> Progress | None:
        return Progress(report=pb.ObservedGang(iterations_done=1.0, iter_time_s=1.0))

    def stop(self) -> None:
        self.stopped.set()

    def request_checkpoint(self) -> None:
        raise AssertionError("nobody asks for a checkpoint here")

    kill = stop


class EndlessRuntime:
    """A runtime of endless processes, which records the environments of the gangs it started."""

    leader_only = True

    def __init__(self) -> None:
        self.started: dict[str, dict[str, str]] = {}
        self.starts = 0

    def launch(self, member: Member) -> MemberHandle:
        self.starts += 1
        self.started[member.gang.job] = dict(member.environment)
        return EndlessProcess()

    def adopt(self, directory: Path) -> MemberHandle | None:
        return None
