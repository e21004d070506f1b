"""Gangs with several members on one agent: each has a keeper, and they start and end together."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.runtimes import COMMAND, REPLAY
from tessera.service.agent.gangs import Gang, GangPhase, GangReport
from tessera.service.agent.isolation import UserRule
from tessera.service.agent.process import identity_of
from tessera.service.agent.runtimes.programs import ProgramRuntime
from tessera.service.agent.runtimes.protocol import Member, Runtime, RuntimeChooser
from tessera.service.agent.runtimes.replay import ReplayRuntime
from tessera.service.agent.state import StateDir
from tessera.service.agent.supervisor import Supervisor
from tests.support.agents import is_running, until
from tests.support.patience import PATIENCE_S
from tests.support.programs import ProgramBench, train

TWO_NODES: dict[str, Any] = {
    "shares": (("n0", (0,)), ("n1", (0,))),
    "members": ("n0", "n1"),
    "member_gpus": (1, 1),
    "iterations_total": 1e9,
}

WAITS = "import time; print('up', flush=True); time.sleep(1e6)"
FAILS_ON_1 = f"""
import os
if os.environ["TESSERA_NODE_RANK"] == "1": raise ValueError("bad node")
{WAITS}
"""
LEAVES_A_CHILD = """
import subprocess, sys, time
child = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(1e6)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(1e6)
"""


class TwoNodeAgent:
    """A supervisor for the nodes n0 and n1, whose jobs run programs."""

    def __init__(self, root: Path) -> None:
        self.bench = ProgramBench(root)
        self.state = StateDir(self.bench.settings.data_dir, root / "checkpoints")
        self.state.claim()
        self._tasks: set[asyncio.Task[None]] = set()
        self._revision = 0
        self.supervisor = self._make_supervisor()

    def _make_supervisor(self) -> Supervisor:
        runtimes: dict[str, Runtime] = {
            COMMAND: ProgramRuntime(name=COMMAND, settings=self.bench.settings),
            REPLAY: ReplayRuntime(),
        }
        return Supervisor(
            RuntimeChooser(runtimes, REPLAY),
            self.state,
            grace_s=PATIENCE_S,
            spawn=self._spawn,
            changed=lambda: None,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.ensure_future(work))

    def apply(self, *gangs: Gang) -> None:
        """Receive the next desired state."""
        self._revision += 1
        self.supervisor.apply(self._revision, gangs)

    async def restart(self) -> None:
        """Replace the agent by another one that adopts what it finds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self.state.release()
        self.state.claim()
        self.supervisor = self._make_supervisor()
        self.supervisor.adopt()

    def reports(self) -> dict[str, GangReport]:
        """Return what is reported of each node."""
        self.supervisor.inspect()
        return {report.node: report for report in self.supervisor.reports()}

    def phases(self) -> dict[str, GangPhase]:
        """Return the phase of each node's member."""
        return {node: report.phase for node, report in self.reports().items()}

    async def close(self) -> None:
        """Kill what still runs."""
        self.supervisor.stop_all()
        for local in self.supervisor._here.values():
            for member in local.members:
                if member.handle is not None:
                    member.handle.kill()
        async with asyncio.timeout(PATIENCE_S):
            await self.supervisor.close()
        for task in self._tasks:
            if task.done():
                task.result()
        self.state.release()


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[TwoNodeAgent]:
    made = TwoNodeAgent(tmp_path)
    yield made
    await made.close()


async def test_both_members_run_and_the_leaders_checkpoint_counts(agent: TwoNodeAgent) -> None:
    gang = agent.bench.gang(train("import time; time.sleep(0.01)"), **TWO_NODES)
    agent.apply(gang)
    await until(lambda: set(agent.phases().values()) == {GangPhase.RUNNING})
    await until(lambda: agent.reports()["n0"].iterations_done > 0)
    reports = agent.reports()
    assert reports["n1"].runtime == ""  # only the leader reports progress
    agent.apply()
    await until(lambda: not agent.reports())
    listed = json.loads((agent.bench.store / "checkpoints.json").read_text())["checkpoints"]
    assert [row["generation"] for row in listed] == [1]
    assert not agent.state.directory(gang.key).exists()


async def test_a_member_that_fails_is_reported_and_the_other_runs_until_it_is_stopped(
    agent: TwoNodeAgent,
) -> None:
    gang = agent.bench.gang(FAILS_ON_1, **TWO_NODES)
    agent.apply(gang)
    await until(lambda: agent.phases()["n1"] is GangPhase.FAILED)
    failed = agent.reports()["n1"]
    assert (failed.exit_reason, "ValueError: bad node" in failed.error) == (ExitReason.ERROR, True)
    await until(lambda: agent.phases()["n0"] is GangPhase.RUNNING)
    agent.supervisor.note_sent(agent.supervisor.reports())
    agent.apply(gang)  # the server has not decided yet
    assert agent.phases() == {"n0": GangPhase.RUNNING, "n1": GangPhase.FAILED}
    agent.apply()
    await until(lambda: not agent.reports())


async def test_a_member_that_cannot_start_fails_without_the_others(agent: TwoNodeAgent) -> None:
    gang = agent.bench.gang(WAITS, launch={"user": "no-such-user"}, **TWO_NODES)
    agent.apply(gang)
    reports = agent.reports()
    assert {report.exit_reason for report in reports.values()} == {ExitReason.NOT_STARTED}
    agent.supervisor.note_sent(agent.supervisor.reports())
    agent.apply()
    assert agent.reports() == {}


async def test_a_restarted_agent_adopts_both_members(agent: TwoNodeAgent) -> None:
    gang = agent.bench.gang(train("import time; time.sleep(0.01)"), **TWO_NODES)
    agent.apply(gang)
    await until(lambda: agent.reports()["n0"].iterations_done > 0)
    before = agent.reports()["n0"].iterations_done
    await agent.restart()
    agent.apply(gang)
    await until(lambda: agent.reports()["n0"].iterations_done > before)
    agent.apply()
    await until(lambda: not agent.reports())


async def test_a_half_started_gang_is_ended_to_its_last_process_before_it_starts_again(
    agent: TwoNodeAgent,
) -> None:
    gang = agent.bench.gang(LEAVES_A_CHILD, **TWO_NODES)
    agent.state.add(gang)
    member = Member(
        gang=gang,
        node="n0",
        directory=agent.state.make_member_directory(gang, "n0"),
        store=agent.state.checkpoints(gang.job),
    )
    runtime = ProgramRuntime(name=COMMAND, settings=agent.bench.settings)
    runtime.prepare(member)
    runtime.launch(member)  # then the agent dies, before it has launched the other member
    written = agent.bench.store / "files" / "child"
    child = await until(lambda: written.exists() and int(written.read_text() or 0))
    identity = identity_of(child)
    await agent.restart()
    assert agent.phases() == {"n0": GangPhase.STOPPING}
    agent.apply(gang)
    await until(lambda: "n1" in agent.phases())  # it has been started again, as a whole
    assert not is_running(child) or identity_of(child) != identity
    agent.apply()
    agent.supervisor.stop_all()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start programs as another user")
async def test_programs_of_other_users_can_use_their_files_below_the_usual_directories(
    tmp_path: Path,
) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    bench = ProgramBench(tmp_path)
    state = StateDir(bench.settings.data_dir, bench.settings.data_dir / "checkpoints" / "default")
    state.claim()
    bench.store = state.checkpoints("a")
    program = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n" + train()
    words = ("/usr/bin/python3", "-c", program)
    handle = bench.start(bench.gang(words), users=UserRule(default="nobody"))
    await handle.begun()
    state.release()
    state.claim()  # a restarted agent
    (bench.store / "files" / "go").touch()
    async with asyncio.timeout(PATIENCE_S):
        assert (await handle.ended()).error == ""
    progress = handle.observe()
    assert progress is not None
    assert progress.iterations == 10
    state.release()
    await bench.clean()


async def test_a_file_that_a_program_changed_fails_one_gang_and_ends_no_agent(
    agent: TwoNodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of an endpoint belongs to the program's user, who may run another job here."""

    def read_token(_runtime: ProgramRuntime, _member: Member) -> None:
        b"\xff".decode("ascii")

    monkeypatch.setattr(ProgramRuntime, "launch", read_token)
    agent.apply(agent.bench.gang(WAITS, **TWO_NODES))
    for report in agent.reports().values():
        assert (report.phase, report.exit_reason) == (GangPhase.FAILED, ExitReason.NOT_STARTED)
        assert "can't decode byte" in report.error
