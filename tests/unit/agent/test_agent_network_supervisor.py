"""The network plan in the agent: set before gangs start, changed while they run, never in the way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.errors import Unavailable
from tessera.formulation.network.tags import CONTROL_TAG, TagSettings
from tessera.formulation.runtimes import REPLAY
from tessera.service.agent.gangs import (
    Gang,
    GangPhase,
    NetworkPart,
    gang_from_json,
    gang_from_message,
    gang_to_json,
)
from tessera.service.agent.main import main
from tessera.service.agent.network.backend import AdviceBackend, MapChange, find_differences
from tessera.service.agent.network.map_worker import (
    RECHECK_S,
    NetworkMapWorker,
    settings_from_message,
)
from tessera.service.agent.network.node import NodeNetwork
from tessera.service.agent.runtimes.protocol import (
    Member,
    MemberExit,
    MemberHandle,
    Progress,
    RuntimeChooser,
)
from tessera.service.agent.state import StateDir
from tessera.service.agent.supervisor import PART_VARIABLE, Supervisor
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import a_gang, until
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S

PATH = ("gpu-0", "gpu-1", ("tor-0", "agg-1", "tor-1"))


class EndlessProcess:
    """A process that runs until it is asked to end."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def begun(self) -> None:
        return

    async def ended(self) -> MemberExit:
        await self.stopped.wait()
        raise AssertionError("nobody stops it here")

    def observe(self) -> Progress | None:
        return Progress(iterations=1.0, iter_time_s=1.0)

    def stop(self) -> None:
        self.stopped.set()

    def request_checkpoint(self) -> None:
        raise AssertionError("nobody asks for a checkpoint here")

    kill = stop


class RecordingRuntime:
    """Records which gangs were started and in which environment."""

    def __init__(self) -> None:
        self.started: dict[str, dict[str, str]] = {}
        self.starts = 0

    leader_only = True

    def prepare(self, member: Member) -> None:
        """Accept every gang."""

    def launch(self, member: Member) -> MemberHandle:
        self.starts += 1
        self.started[member.gang.job] = dict(member.environment)
        return EndlessProcess()

    def adopt(self, directory: Path) -> MemberHandle | None:
        return None


class FakeInterface:
    """An interface that accepts maps once it is ``free``, or refuses them."""

    dry_run = False

    def __init__(self, interface: str = "eth1") -> None:
        self.interface = interface
        self.table: dict[int, int] = {}
        self.free = threading.Event()
        self.free.set()
        self.refuses = ""
        self.reads = 0

    def read(self) -> dict[int, int]:
        self.reads += 1
        assert self.free.wait(PATIENCE_S)
        if self.refuses:
            raise Unavailable(self.refuses)
        return dict(self.table)

    def apply(self, wanted: Mapping[int, int]) -> tuple[MapChange, ...]:
        changes = find_differences(self.interface, self.table, wanted)
        self.table |= wanted
        return changes

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        return []

    def findings(self) -> tuple[str, ...]:
        return ()


class NetworkSupervisor:
    """A supervisor with a network, on a stopped clock."""

    def __init__(self, folder: Path, *nics: Any, patience_s: float = 20.0) -> None:
        self.now_s, self.notifications, self.prepared = 0.0, 0, 0
        self.runtime, self.state = RecordingRuntime(), StateDir(folder, folder / "checkpoints")
        self.state.claim()
        self._tasks: set[asyncio.Task[None]] = set()
        self.carrying = NetworkMapWorker(
            [NodeNetwork([nic], clock=lambda: self.now_s, drain_s=0.0) for nic in nics],
            clock=lambda: self.now_s,
            spawn=self._spawn,
            prepare=self._prepare,
            patience_s=patience_s,
        )
        self.supervisor = Supervisor(
            RuntimeChooser({REPLAY: self.runtime}, REPLAY),
            self.state,
            grace_s=9.0,
            spawn=self._spawn,
            changed=self._changed,
            network=self.carrying,
        )
        self._revision = 0

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    def _prepare(self) -> None:
        self.prepared += 1

    def _changed(self) -> None:
        self.notifications += 1

    def hears(self, *gangs: Gang, **priorities: int) -> None:
        """Apply a desired state. ``t10=3`` gives tag 10 priority 3."""
        self._revision += 1
        priority_by_tag = {int(tag[1:]): p for tag, p in priorities.items()}
        tags = {g.job: g.network.dscp for g in gangs if g.network is not None}
        settings = TagSettings(tags=tags, priorities=priority_by_tag | {CONTROL_TAG: 7})
        self.supervisor.apply(self._revision, gangs, settings if priorities else None)

    def part(self, job: str) -> dict[str, Any]:
        """Return the part of the plan that a job's processes can read."""
        document: dict[str, Any] = json.loads(
            Path(self.runtime.started[job][PART_VARIABLE]).read_text(encoding="utf-8")
        )
        return document

    def phases(self) -> dict[str, GangPhase]:
        return {report.job: report.phase for report in self.supervisor.reports()}


def a_tagged_gang(job: str = "a", level: int = 1, dscp: int = 10, **rest: Any) -> Gang:
    part = NetworkPart(level=level, levels=8, dscp=dscp, routes=(PATH,))
    return a_gang(job, network=part, **rest)


async def test_a_gang_starts_once_the_map_is_in_force_and_finds_its_mark(tmp_path: Path) -> None:
    nic = FakeInterface()
    nic.free.clear()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_tagged_gang(), t10=1)
    assert agent.runtime.started == {}
    assert agent.phases() == {}
    nic.free.set()
    await until(lambda: agent.runtime.started)
    assert nic.table == {10: 1, CONTROL_TAG: 7}
    environment = agent.runtime.started["a"]
    assert (environment["NCCL_IB_TC"], environment["NCCL_IB_SL"]) == (str(10 * 4 + 2), "1")
    assert agent.part("a") == {
        "level": 1,
        "levels": 8,
        "dscp": 10,
        "routes": [["gpu-0", "gpu-1", ["tor-0", "agg-1", "tor-1"]]],
    }
    assert agent.prepared == 1


async def test_another_level_is_applied_and_reported_without_a_restart(tmp_path: Path) -> None:
    nic = FakeInterface()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_tagged_gang(level=1), t10=1)
    await until(lambda: agent.runtime.started)
    agent.hears(a_tagged_gang(level=6), t10=6)
    await until(lambda: nic.table[10] == 6)
    await until(lambda: agent.carrying.settled)
    assert agent.part("a")["level"] == 6
    assert (agent.runtime.starts, agent.phases()) == (1, {"a": GangPhase.RUNNING})


async def test_a_refusing_interface_stops_no_job_and_no_other_interface(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = FakeInterface("eth1"), FakeInterface("eth2")
    bad.refuses = "the driver refused"
    agent = NetworkSupervisor(tmp_path, bad, good)
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    assert good.table == {10: 1, CONTROL_TAG: 7}
    assert agent.supervisor.network_remarks == ("the driver refused",)
    assert agent.notifications
    agent.hears(a_tagged_gang(level=2), t10=2)
    await until(lambda: good.table[10] == 2)
    await until(lambda: agent.carrying.settled)
    assert "\n".join(logged_lines(caplog)).count("the driver refused") == 1
    bad.refuses = ""
    agent.hears(a_tagged_gang(level=3), t10=3)
    await until(lambda: agent.supervisor.network_remarks == ())


async def test_gangs_start_without_the_map_when_a_tool_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nic = FakeInterface()
    nic.free.clear()
    agent = NetworkSupervisor(tmp_path, nic, patience_s=0.5)
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    assert "NCCL_IB_TC" in agent.runtime.started["a"]
    assert "jobs start without it" in caplog.text
    nic.free.set()
    await until(lambda: nic.table)


async def test_a_server_without_a_network_changes_nothing(tmp_path: Path) -> None:
    nic = FakeInterface()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_gang())
    assert agent.runtime.started == {"a": {}}
    assert (nic.reads, agent.prepared, agent.supervisor.network_remarks) == (0, 0, ())
    assert not (agent.state.directory(("a", 1)) / "network.json").exists()


async def test_a_removed_topology_leaves_maps_in_place_and_marks_no_further_gang(
    tmp_path: Path,
) -> None:
    nic = FakeInterface()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    agent.hears(a_gang(), a_gang("b", shares=(("n0", (4,)),)))
    await until(lambda: "b" in agent.runtime.started)
    assert agent.runtime.started["b"] == {}
    assert nic.table[10] == 1


async def test_an_unchanged_map_is_checked_again_only_after_a_while(tmp_path: Path) -> None:
    nic = FakeInterface()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    reads = nic.reads
    agent.hears(a_tagged_gang(), t10=1)
    assert agent.carrying.settled
    nic.table[10] = 5  # by another program
    agent.now_s = RECHECK_S
    agent.hears(a_tagged_gang(), t10=1)
    assert agent.carrying.settled  # nothing waits for a second check
    await until(lambda: nic.table[10] == 1)
    assert nic.reads > reads


async def test_advice_only_is_reported_as_such(tmp_path: Path) -> None:
    agent = NetworkSupervisor(tmp_path, AdviceBackend(), AdviceBackend("eth1"))
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    (remark,) = agent.supervisor.network_remarks
    assert "advice only" in remark


def a_message(tag: int, **priorities: int) -> pb.Desired:
    part = pb.GangNetwork(level=2, levels=8, dscp=tag)
    return pb.Desired(
        gangs=[pb.DesiredGang(job="a", generation=1, network=part)],
        network=pb.NetworkMap(
            priorities={int(t[1:]): p for t, p in priorities.items()}, control_dscp=40
        ),
    )


def test_network_settings_are_read_from_messages_and_missing_ones_are_none() -> None:
    assert settings_from_message(pb.Desired()) is None
    assert settings_from_message(a_message(10, t10=2, t40=7)) == TagSettings(
        tags={"a": 10}, priorities={10: 2, 40: 7}, control_tag=40
    )
    assert settings_from_message(a_message(-1, t40=7)) == TagSettings(
        tags={}, priorities={40: 7}, control_tag=40
    )


@pytest.mark.parametrize("tag", [11, 64])
def test_a_tag_without_a_priority_is_left_out_and_logged(tag: int) -> None:
    settings = settings_from_message(a_message(tag, t10=2, t64=3, t12=9))
    assert settings is not None
    assert (dict(settings.tags), dict(settings.priorities)) == ({}, {10: 2})
    assert settings.remarks == (
        f"job a has DSCP tag {tag}, but the servers sent no priority for this tag",
    )


def test_a_gangs_network_part_comes_from_its_message_and_is_not_stored_or_compared() -> None:
    message = a_message(10).gangs[0]
    message.network.routes.add(source="gpu-0", target="gpu-1", via=PATH[2])
    gang = gang_from_message(message)
    assert gang.network == NetworkPart(level=2, levels=8, dscp=10, routes=(PATH,))
    message.ClearField("network")
    assert gang_from_message(message) == gang
    assert gang_from_message(message).network is None
    assert "network" not in gang_to_json(gang)
    assert gang_from_json(gang_to_json(gang)).network is None


def test_a_back_end_without_an_interface_is_refused_at_startup(tmp_path: Path) -> None:
    options = ["--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", str(tmp_path)]
    assert main([*options, "--node", "n:t:1", "--network-backend", "tc"]) == 2


def test_an_agent_imports_no_heavy_libraries() -> None:
    heavy = "('numpy', 'yaml', 'typer')"
    code = (
        f"import sys, tessera.service.agent.main; print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
