"""Gangs on an agent: the next actions, members that start and end together, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.job.runtimes import COMMAND, REPLAY
from tessera.service.agent.gangs import (
    GANG_FORMAT,
    LIVE_PHASES,
    devices_of,
    gang_from_json,
    gang_to_json,
    key_of,
)
from tessera.service.agent.isolation import UnsuitableNode, UserRule
from tessera.service.agent.local_gangs import (
    LocalGang,
    LocalMember,
    reconcile_gangs,
)
from tessera.service.agent.process import identity_of
from tessera.service.agent.runtimes.programs import ProgramRuntime
from tessera.service.agent.runtimes.protocol import (
    Member,
    Runtime,
    RuntimeChooser,
)
from tessera.service.agent.runtimes.replay import ReplayRuntime
from tessera.service.agent.state import StateDir
from tessera.service.agent.strays import (
    MARK_FILE,
    MARK_VARIABLE,
    PROCESSES_FILE,
    end_strays,
    find_strays,
    is_alive,
    kill_keeper,
    kill_marked,
)
from tessera.service.agent.supervisor import Supervisor
from tessera.v1 import agents_pb2 as pb
from tessera.v1.launch_pb2 import EXIT_ERROR, EXIT_NOT_STARTED
from tests.support.agent_fakes import EndlessProcess
from tests.support.agents import a_gang, is_running, until
from tests.support.launches import WHOLE_LAUNCH
from tests.support.laws import examples
from tests.support.patience import PATIENCE_S
from tests.support.programs import ENDLESS, TWO_NODES, ProgramBench, train
from tests.support.waiting import until as wait_for

GANGS = st.builds(
    lambda job, generation, node, gpus, is_led_here: a_gang(
        job,
        generation,
        shares=((node, tuple(gpus)),),
        leader=node if is_led_here else "far",
        members=(node,) if is_led_here else ("far", node),
        gpus=len(gpus),
    ),
    st.sampled_from("abc"),
    st.integers(1, 2),
    st.sampled_from(["n0", "n1"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True),
    st.booleans(),
)


def a_local_gang(
    gang: pb.DesiredGang, phase: pb.ObservedGang.Phase.ValueType, reported: bool
) -> LocalGang:
    """Return a gang whose leader has a process here unless it has ended."""
    has_process = gang.leader != "far" and phase in LIVE_PHASES
    member = LocalMember(
        node=gang.shares[0].node, phase=phase, handle=EndlessProcess() if has_process else None
    )
    stopping = phase == pb.ObservedGang.STOPPING
    return LocalGang(gang=gang, members=[member], is_stopping=stopping, reported=reported)


@examples(1000)
@given(
    st.none() | st.lists(GANGS, max_size=4),
    st.lists(
        st.builds(
            a_local_gang, GANGS, st.sampled_from(pb.ObservedGang.Phase.values()[1:]), st.booleans()
        ),
        max_size=3,
        unique_by=lambda local: key_of(local.gang),
    ),
)
def test_gangs_start_on_gpus_that_are_free_and_whatever_is_not_desired_stops(
    desired: list[pb.DesiredGang] | None, here: list[LocalGang]
) -> None:
    actions = reconcile_gangs(desired, here)
    newest = dict[str, pb.DesiredGang]()
    for gang in desired or ():
        newest[gang.job] = max(newest.get(gang.job, gang), gang, key=lambda g: g.generation)
    keys = {key_of(gang) for gang in newest.values()}
    undesired = [local for local in here if key_of(local.gang) not in keys]
    stopped = [local for local in undesired if local.is_live and not local.is_stopping]
    assert actions.stop == tuple(key_of(local.gang) for local in stopped)
    ended = [key_of(local.gang) for local in undesired if local.reported and not local.is_live]
    assert actions.forget == (tuple(ended) if desired is not None else ())
    # Each newest generation is here, or starts, or waits for what lives, or for what starts before it.
    blocking = [
        local.gang
        for local in here
        if local.is_live and (local not in stopped or local.has_processes)
    ]
    for gang in newest.values():
        if key_of(gang) in {key_of(local.gang) for local in here}:
            assert gang not in actions.start
            assert key_of(gang) not in actions.waiting
            continue
        is_blocked = any(
            gang.job == other.job or devices_of(gang) & devices_of(other) for other in blocking
        )
        assert (gang in actions.start) is not is_blocked
        assert (key_of(gang) in actions.waiting) is is_blocked
        if not is_blocked:
            blocking.append(gang)
    assert {*(key_of(gang) for gang in actions.start), *actions.waiting} <= keys


def test_a_gang_reads_back_unchanged_but_for_what_each_message_repeats() -> None:
    gang = a_gang(command=("fail-at", "3"), pipeline_degree=2, launch=WHOLE_LAUNCH)
    start = pb.DesiredGang(tuning_plans=["{}"], network=pb.GangNetwork(level=2, levels=8, dscp=10))
    start.MergeFrom(gang)
    for message in (gang, start):
        assert gang_from_json(json.loads(json.dumps(gang_to_json(message)))) == gang


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": GANG_FORMAT + 1}, "this release reads 1; let gangs end before"),
        ({"format": None}, "its format is None"),
        ({"gang": {"job": "a", "colour": "red"}}, "colour"),
        ({"gang": {"shares": 3}}, "shares"),
    ],
)
def test_a_gang_that_another_release_wrote_is_refused_and_not_half_read(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        gang_from_json(gang_to_json(a_gang()) | change)


def test_a_launch_that_cannot_be_written_is_the_problem_of_its_gang_alone() -> None:
    gang = a_gang()
    gang.launch.stop_grace.seconds = 10**15
    with pytest.raises(UnsuitableNode, match="upgrade tessera"):
        gang_to_json(gang)


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

    def apply(self, *gangs: pb.DesiredGang) -> None:
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

    def reports(self) -> dict[str, pb.ObservedGang]:
        """Return what is reported of each node."""
        self.supervisor.inspect()
        return {report.node: report for report in self.supervisor.reports()}

    def phases(self) -> dict[str, int]:
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


async def test_both_members_run_and_a_restarted_agent_adopts_them(agent: TwoNodeAgent) -> None:
    program = train("import time; time.sleep(0.01)")
    gang = agent.bench.gang(program, iterations_total=ENDLESS, **TWO_NODES)
    agent.apply(gang)
    await until(lambda: set(agent.phases().values()) == {pb.ObservedGang.RUNNING})
    before = await until(lambda: max(0.0, agent.reports()["n0"].iterations_done))
    assert agent.reports()["n1"].runtime == ""  # only the leader reports progress
    await agent.restart()
    agent.apply(gang)
    await until(lambda: agent.reports()["n0"].iterations_done > before)
    agent.apply()
    await until(lambda: not agent.reports())
    listed = json.loads((agent.bench.store / "checkpoints.json").read_text())["checkpoints"]
    assert [row["generation"] for row in listed] == [1]
    assert not agent.state.directory(key_of(gang)).exists()


async def test_a_member_that_fails_is_reported_and_the_other_runs_until_it_is_stopped(
    agent: TwoNodeAgent,
) -> None:
    gang = agent.bench.gang(FAILS_ON_1, **TWO_NODES)
    agent.apply(gang)
    await until(lambda: agent.phases()["n1"] == pb.ObservedGang.FAILED)
    failed = agent.reports()["n1"]
    assert (failed.exit_reason, "ValueError: bad node" in failed.error) == (EXIT_ERROR, True)
    await until(lambda: agent.phases()["n0"] == pb.ObservedGang.RUNNING)
    agent.supervisor.note_sent(agent.supervisor.reports())
    agent.apply(gang)  # the server has not decided yet
    assert agent.phases() == {"n0": pb.ObservedGang.RUNNING, "n1": pb.ObservedGang.FAILED}
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
    runtime.launch(member)  # then the agent dies, before it has launched the other member
    written = agent.bench.store / "files" / "child"
    child = await until(lambda: written.exists() and int(written.read_text() or 0))
    identity = identity_of(child)
    await agent.restart()
    assert agent.phases() == {"n0": pb.ObservedGang.STOPPING}
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
    assert progress.report.iterations_done == 10
    state.release()
    await bench.clean()


async def test_a_gang_that_cannot_start_fails_alone_whatever_a_program_wrote(
    agent: TwoNodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of an endpoint belongs to the program's user, who may run another job here."""

    def read_token(_runtime: ProgramRuntime, _member: Member) -> None:
        b"\xff".decode("ascii")

    monkeypatch.setattr(ProgramRuntime, "launch", read_token)
    agent.apply(agent.bench.gang(WAITS, **TWO_NODES))
    for report in agent.reports().values():
        assert (report.phase, report.exit_reason) == (pb.ObservedGang.FAILED, EXIT_NOT_STARTED)
        assert "can't decode byte" in report.error
    agent.supervisor.note_sent(agent.supervisor.reports())
    agent.apply()
    assert agent.reports() == {}


SLEEPS = (sys.executable, "-c", "print(flush=True); import time; time.sleep(1e6)")


PARENT = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans below become children, as below a keeper
code = "import os, time; print(os.getpid(), flush=True); time.sleep(1e6)"
child = ["/usr/bin/env", "-i", sys.executable, "-c", code]
middle = f"import subprocess; subprocess.Popen({child!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", middle])
os.kill(os.getpid(), 19)
"""
"""A keeper that hangs, and below it an orphan with nothing that tells where it belongs."""


class Strays:
    """Processes that run until they are killed."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, mark: str | None) -> subprocess.Popen[bytes]:
        """Return a process that has begun its program, with ``mark`` in its environment if any."""
        environment = {**os.environ} | ({MARK_VARIABLE: mark} if mark else {})
        process = subprocess.Popen(SLEEPS, env=environment, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def clean(self) -> None:
        """End all."""
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def strays() -> Iterator[Strays]:
    started = Strays()
    yield started
    started.clean()


def mark_member(directory: Path, mark: str) -> None:
    """Write a member's mark down as an agent does."""
    (directory / MARK_FILE).write_text(json.dumps({"mark": mark}))


def ids(directory: Path) -> set[int]:
    return {identity.pid for identity in find_strays(directory)}


def record(directory: Path, *pairs: tuple[int, int]) -> None:
    """Write processes down as a keeper does."""
    (directory / PROCESSES_FILE).write_text(json.dumps({"processes": pairs}))


def test_strays_are_found_by_their_whole_mark(strays: Strays, tmp_path: Path) -> None:
    marked, other = strays.start("abc"), strays.start("abcd")
    for mark, found in (("abc", {marked.pid}), ("abcd", {other.pid}), ("ab", set())):
        mark_member(tmp_path, mark)
        assert ids(tmp_path) == found


def test_a_stray_that_lost_its_mark_is_found_by_what_the_keeper_recorded_until_it_ends(
    strays: Strays, tmp_path: Path
) -> None:
    bare = strays.start(None)
    identity = identity_of(bare.pid)
    assert identity is not None
    record(tmp_path, (bare.pid, identity.start_ticks + 1))  # an earlier process with this id
    assert ids(tmp_path) == set()
    record(tmp_path, (bare.pid, identity.start_ticks))
    assert ids(tmp_path) == {bare.pid}
    bare.kill()
    os.waitid(os.P_PID, bare.pid, os.WEXITED | os.WNOWAIT)  # now it is a zombie
    assert ids(tmp_path) == set()


def test_a_record_that_is_damaged_is_logged_and_the_mark_still_counts(
    strays: Strays, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marked = strays.start("abc")
    mark_member(tmp_path, "abc")
    for text in ("{", "[]", '{"processes": [1]}', '{"processes": [["x", 2]]}', '{"processes": 5}'):
        caplog.clear()
        (tmp_path / PROCESSES_FILE).write_text(text)
        assert ids(tmp_path) == {marked.pid}
        assert "cannot read" in caplog.text


def test_without_a_mark_nothing_is_killed(strays: Strays, tmp_path: Path) -> None:
    bare, me = strays.start(None), identity_of(os.getpid())
    assert kill_marked(tmp_path) == []
    for text in ("{", "[]", "{}", '{"mark": 3}', '{"mark": ""}'):
        (tmp_path / MARK_FILE).write_text(text)
        assert kill_marked(tmp_path) == []
    assert me is not None
    kill_keeper(replace(me, start_ticks=me.start_ticks - 1))  # a dead keeper with this id
    assert bare.poll() is None


def test_an_unmarked_orphan_ends_with_its_keeper_that_hangs() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        orphan, keeper = identity_of(int(parent.stdout.readline())), identity_of(parent.pid)
        assert orphan is not None
        assert keeper is not None
        os.waitid(os.P_PID, parent.pid, os.WSTOPPED)
        assert is_alive(orphan)
        kill_keeper(keeper)
        wait_for(lambda: not is_alive(orphan), "the end of the orphan")
        parent.stdout.close()
    assert parent.returncode == -signal.SIGKILL


async def test_ending_strays_leaves_others_alone(strays: Strays, tmp_path: Path) -> None:
    marked, other = [strays.start("abc") for _ in range(3)], strays.start("abcd")
    mark_member(tmp_path, "abc")
    await end_strays(tmp_path)
    assert [process.wait() for process in marked] == [-9, -9, -9]
    assert other.poll() is None
