"""Whoever holds GPUs ends within the agent's lease: agent, keeper, ranks, and what these started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.agent_server import LONG, AgentProcess, FakeServer
from tests.support.agents import a_gang, is_running, until
from tests.support.programs import own_user

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = ["/usr/bin/env", "-i", sys.executable, "-c",
    "import os, signal, sys, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "os.fork();"
    "open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close();"
    "time.sleep(10**6)", os.environ["PIDS"]]
subprocess.Popen(child, start_new_session=True)
subprocess.Popen([sys.executable, "-c", child[4], os.environ["PIDS"]], start_new_session=True)
open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
time.sleep(10**6)
"""
"""A rank that ignores SIGTERM, with four processes in sessions of their own.

Two of them have lost the mark of the member.
"""

PROCESSES = 5


@pytest.fixture
def lease_s() -> float:
    return 3.0


@pytest.fixture
async def server(lease_s: float) -> AsyncIterator[FakeServer]:
    fake = FakeServer(lease_s=lease_s, margin_s=8.0)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder in which each process of the job makes a file with its id as the name."""
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("PIDS", str(folder))
    yield folder
    for pid in living(folder):
        with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def agent(tmp_path: Path, server: FakeServer, pids: Path) -> AsyncIterator[AgentProcess]:
    """Yield an agent with a job whose processes do not stop when they are asked to."""
    command = (sys.executable, "-c", STUBBORN)
    server.want(1, a_gang(runtime="command", command=command, iterations_total=LONG))
    agent = AgentProcess(tmp_path / "agent", [server.port], f"--run-as={own_user()}")
    agent.start()
    await server.sees(1, ("a", 1, "n0", "RUNNING"))
    known = agent.data_dir / "gangs" / "a@1" / "processes.json"
    await until(lambda: len(living(pids)) == PROCESSES)
    await until(lambda: known.exists() and set(living(pids)) <= recorded(known))
    yield agent
    agent.clean()


def living(pids: Path) -> list[int]:
    return [int(path.name) for path in pids.iterdir() if is_running(int(path.name))]


def recorded(known: Path) -> set[int]:
    return {pid for pid, _ in json.loads(known.read_text())["processes"]}


def warden_of(agent: AgentProcess) -> int:
    return int(json.loads((agent.data_dir / "warden.json").read_text())["pid"])


async def test_a_keeper_whose_agent_is_gone_for_good_ends_its_ranks_and_says_that_it_stopped(
    agent: AgentProcess, pids: Path
) -> None:
    keeper, warden = agent.pid_of("a"), warden_of(agent)
    await agent.end(signal.SIGKILL)
    await until(lambda: not is_running(keeper) and not living(pids))
    left = json.loads((agent.data_dir / "gangs" / "a@1" / "exit.json").read_text())
    assert left == {"outcome": "stopped"}
    await until(lambda: not is_running(warden))


async def test_what_a_keeper_leaves_is_ended_when_agent_and_keeper_are_killed_together(
    agent: AgentProcess, pids: Path
) -> None:
    keeper = agent.pid_of("a")
    agent.send(signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    await until(lambda: not living(pids))


async def test_a_keeper_that_hangs_is_ended_with_its_ranks(agent: AgentProcess, pids: Path) -> None:
    keeper = agent.pid_of("a")
    os.kill(keeper, signal.SIGSTOP)
    await agent.end(signal.SIGKILL)
    await until(lambda: not is_running(keeper) and not living(pids))


async def test_without_a_warden_a_keeper_ends_its_ranks_all_the_same(
    agent: AgentProcess, pids: Path
) -> None:
    agent.send(signal.SIGSTOP)  # it would start another warden
    os.kill(warden_of(agent), signal.SIGKILL)
    await until(lambda: not living(pids))


async def test_an_agent_that_was_stopped_finds_its_gang_ended_and_starts_it_again(
    agent: AgentProcess, server: FakeServer, pids: Path
) -> None:
    keeper = agent.pid_of("a")
    agent.send(signal.SIGSTOP)
    await until(lambda: not is_running(keeper) and not living(pids))
    agent.send(signal.SIGCONT)
    await until(lambda: len(living(pids)) == PROCESSES)
    assert agent.pid_of("a") != keeper


@pytest.mark.parametrize("lease_s", [300.0])
async def test_an_agent_that_restarts_within_its_lease_keeps_its_gang_and_replaces_the_warden(
    agent: AgentProcess, server: FakeServer, pids: Path
) -> None:
    keeper, warden, before = agent.pid_of("a"), warden_of(agent), set(living(pids))
    for _ in range(3):
        await agent.end(signal.SIGKILL)
        server.observed = None
        agent.start()
        await server.sees(1, ("a", 1, "n0", "RUNNING"))
    await until(lambda: not is_running(warden))
    assert is_running(keeper)
    assert set(living(pids)) == before


@pytest.mark.parametrize("lease_s", [300.0])
async def test_a_warden_that_ends_and_a_lease_that_is_lost_from_the_disk_disturb_no_gang(
    agent: AgentProcess, pids: Path
) -> None:
    keeper, path = agent.pid_of("a"), agent.data_dir / "lease.json"
    warden = warden_of(agent)
    os.kill(warden, signal.SIGKILL)
    await until(lambda: warden_of(agent) != warden)
    for damage in (Path.unlink, lambda path: path.write_text("{")):
        damage(path)
        await until(lambda: path.exists() and path.read_text().startswith('{"heard_s"'))
    assert is_running(keeper)
    assert len(living(pids)) == PROCESSES


async def test_a_replayed_job_whose_agent_is_gone_for_good_writes_its_checkpoint_and_ends(
    tmp_path: Path, server: FakeServer
) -> None:
    server.want(1, a_gang(iterations_total=LONG))
    flags = "--clock-factor=1000", "--lease-s=600"  # no option makes the server's lease longer
    agent = AgentProcess(tmp_path / "agent", [server.port], *flags)
    agent.start()
    await server.sees(1, ("a", 1, "n0", "RUNNING"))
    process = agent.pid_of("a")
    await agent.end(signal.SIGKILL)
    await until(lambda: not is_running(process))
    left = json.loads((agent.data_dir / "gangs" / "a@1" / "exit.json").read_text())
    assert left["outcome"] == "stopped"
    saved = agent.data_dir / "checkpoints" / "c" / "job-a" / "checkpoint.json"
    assert json.loads(saved.read_text())["iterations"] > 0
