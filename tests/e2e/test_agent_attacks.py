"""Agent processes that face a twin, a lost directory, a full disk and programs that attack them."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.reads import get_job, list_clusters, list_nodes
from tessera.db.store.store import Store
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.runtimes import COMMAND
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.settings.config import Config
from tessera.service.server.wiring import run_server
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import agents_pb2 as pb
from tests.support.agent_server import LONG, RUNNING, FakeServer, MakeAgent
from tests.support.agents import a_gang, is_running, until
from tests.support.patience import PATIENCE_S
from tests.support.programs import own_user
from tests.support.small_disk import fill_disk

OVER = ("SUCCEEDED", "FAILED")


PYTHON = "/usr/bin/python3"
"""An interpreter that every user may run."""


NEXT: dict[str, Any] = {"shares": (("n1", (0,)),), "leader": "n1", "iterations_total": LONG}


def error_of(server: FakeServer, job: str) -> str:
    assert server.observed is not None
    (error,) = [gang.error for gang in server.observed.gangs if gang.job == job]
    return error


async def wait_for_heartbeats(server: FakeServer) -> None:
    """Wait until the agent has sent more heartbeats."""
    beats = server.heartbeats
    await until(lambda: server.heartbeats > beats + 2)


HALF_OF_A_PAIR = """
import os, sys, time
out = os.path.dirname(os.environ["TESSERA_PROGRESS_FILE"])
for name, text in zip(("progress.json", "failure.json"), sys.argv[1:]):
    with open(f"{out}/{name}", "w") as file:
        file.write(text)
while not os.path.exists("go"): time.sleep(0.01)
raise SystemExit(1)
"""
"""A program whose progress and whose reason for its failure hold what is no character."""


async def test_texts_of_a_program_that_no_message_can_hold_do_not_end_its_agent(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    progress = r'{"iterations": 1, "checkpoint": {"path": "\ud800", "iterations": 10000000000000}}'
    failure = r'{"reason": "error", "message": "no \ud800 way"}'
    command = (PYTHON, "-c", HALF_OF_A_PAIR, progress, failure)
    server.want(1, a_gang(gpus=1, shares=(("n0", (0,)),), runtime=COMMAND, command=command))
    agent = make_agent(f"--run-as={own_user()}")
    await until(lambda: server.observed and any(g.remark for g in server.observed.gangs))
    assert server.observed is not None
    assert "the checkpoint ? has 10000000000000 iterations" in server.observed.gangs[0].remark
    (files,) = agent.data_dir.glob("checkpoints/c/*/files")
    (files / "go").touch()
    await server.sees(1, ("a", 1, "n0", "FAILED"))
    assert error_of(server, "a") == "no ? way"
    assert len(server.hellos) == 1


async def test_an_agent_whose_data_directory_is_removed_continues(
    server: FakeServer, make_agent: MakeAgent, tmp_path: Path
) -> None:
    server.want(1, a_gang(iterations_total=LONG))
    agent = make_agent("--checkpoint-dir", str(tmp_path / "checkpoints"))
    await server.sees(1, RUNNING)
    pid = agent.pid_of("a")
    shutil.rmtree(agent.data_dir)
    await wait_for_heartbeats(server)
    server.want(2, a_gang("b", **NEXT))
    await server.sees(2, ("b", 1, "n1", "RUNNING"))
    assert not is_running(pid)
    agent.pid_of("b")
    assert len(server.hellos) == 1


async def test_a_full_disk_fails_jobs_with_an_error_that_names_it_and_stops_no_agent(
    server: FakeServer, make_agent: MakeAgent, small_disk: Path
) -> None:
    agent = make_agent("--clock-factor", "100", folder=small_disk / "agent")
    await until(lambda: server.hellos)
    await server.sees(0)
    fill_disk(small_disk / "rest")
    server.want(1, a_gang(iterations_total=LONG))
    await server.sees(1, ("a", 1, "n0", "FAILED"))
    assert "No space left" in error_of(server, "a")
    await wait_for_heartbeats(server)
    (small_disk / "rest").unlink()
    server.want(2, a_gang("b", **NEXT))
    await server.sees(2, ("b", 1, "n1", "RUNNING"))
    agent.pid_of("b")
    await wait_for_heartbeats(server)
    assert (agent.data_dir / "lease.json").exists()
    assert len(server.hellos) == 1


async def test_a_job_name_with_a_path_stays_inside_the_agents_directories(
    server: FakeServer, make_agent: MakeAgent, tmp_path: Path
) -> None:
    name = "../../evil"
    server.want(1, a_gang(name, iterations_total=LONG))
    agent = make_agent()
    await server.sees(1, (name, 1, "n0", "RUNNING"))
    assert {path.name for path in tmp_path.iterdir()} == {"agent-0", "agent-0.log"}
    (gang,) = (agent.data_dir / "gangs").iterdir()
    (store,) = (agent.data_dir / "checkpoints" / "c").iterdir()
    assert store.name.startswith("job-")
    server.want(2)
    await server.sees(2)
    assert not gang.exists()


def store_lab_cluster(store: Store) -> None:
    """Store a cluster of one GPU type, and a long job on one GPU."""
    workload = Workload(model="m", params="", global_batch=8)
    cell = EstimateRecord(
        workload=workload,
        cell=Cell(gpu_type="a100", gpus=1, pipeline_degree=1, nodes=1),
        iter_time_s=1.0,
        source=EstimateSource.MEASURED,
    )
    spec = JobSpec(name="a", workload=workload, iterations=10**9, requested_gpus=1, restart_s=0.0)
    store.change(upsert_cluster, "c", [GpuType(name="a100", memory_bytes=2**35)], None)
    store.change(upsert_estimates, "c", [cell])
    store.change(submit_jobs, "c", [spec])


def decide_round(store: Store) -> None:
    """Decide and commit a round."""
    RoundLoop(store, SystemClock()).schedule(
        "c",
        RoundOptions(),
        remaining_s=lambda: 600.0,
        dry_run=False,
        request=None,
        cancelled=lambda: False,
    )


async def test_the_newer_of_two_agents_with_one_name_wins_and_the_older_is_notified_and_stops(
    store: Store, database: Database, make_agent: MakeAgent
) -> None:
    """The second agent has its own directory, so it could not stop processes that the first left."""
    store_lab_cluster(store)
    config = Config(
        listen="127.0.0.1:0",
        database_url=database.url,
        period_s=0.0,
        estimate_cells=False,
        heartbeat_s=1.0,
        inspect_s=1.0,
        grace_s=2.0,
        store_threads=4,
    )

    async def job_is(state: JobState) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await asyncio.to_thread(store.read, get_job, "c", "a")).state is not state:
                await asyncio.sleep(0.05)

    async with run_server(config) as port:
        nodes = ("n0:a100:1",)
        first = make_agent(port=port, nodes=nodes)
        await until(lambda: store.read(list_clusters, "", 1)[0].nodes)
        await asyncio.to_thread(decide_round, store)
        await job_is(JobState.RUNNING)
        generation = store.read(get_job, "c", "a").generation
        pid = first.pid_of("a", generation)
        second = make_agent(port=port, nodes=nodes)
        assert await asyncio.wait_for(first.ended(), PATIENCE_S) == 3
        assert not is_running(pid)
        log = first.log.read_text()
        assert log.count(" connected ") == 1  # it does not reconnect
        assert "give it another name" in log.splitlines()[-1]
        await until(lambda: list((second.data_dir / "gangs").glob("a@*/process.json")))
        await job_is(JobState.RUNNING)
        (gang,) = (second.data_dir / "gangs").glob("a@*")
        new_pid = json.loads((gang / "process.json").read_text())["pid"]
        assert is_running(new_pid)
        (node,) = store.read(list_nodes, "c", "", 10)
        assert node.silent_s < 45
        assert store.read(get_job, "c", "a").retries == 0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs an agent that runs as root")


@pytest.fixture
def passable() -> Iterator[Path]:
    """Yield a folder of root that other users can pass through. Name it before ``make_agent``."""
    with tempfile.TemporaryDirectory(prefix="tessera-attack-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def a_program(job: str, gpu: int, *command: str, **launch: Any) -> pb.DesiredGang:
    """Return a gang of one GPU whose program runs as the user of ``--run-as``."""
    return a_gang(
        job,
        shares=(("n0", (gpu,)),),
        gpus=1,
        runtime=COMMAND,
        command=command,
        launch=LaunchSpec(**launch),
    )


SEIZE = """
import os, sys, time
victim, gangs, *names = sys.argv[1:]
print("ready", flush=True)
while True:
    for name in names[:4]:
        path = f"{gangs}/{name}@1/out/trainer-authority.pem"
        try:
            os.mkfifo(path)
        except FileExistsError:
            names.remove(name)
        except OSError:
            continue
        else:
            pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            while True:
                try:
                    os.write(pipe, 4096 * b"x")
                except BlockingIOError:
                    break
            time.sleep(0.5)  # until the agent waits to write
            os.symlink(victim, "link")
            os.rename("link", path)
            os.set_blocking(pipe, True)
            while True:
                os.read(pipe, 65536)
"""
"""A program that puts a pipe, and then a link, where the agent might write for the next job.

The agent waits until somebody reads the pipe. Meanwhile the pipe's name becomes a link to a file of root.
"""


@needs_root
async def test_a_running_job_that_puts_links_into_the_next_jobs_folders_gets_no_file_of_root(
    server: FakeServer, passable: Path, make_agent: MakeAgent
) -> None:
    victim = passable / "victim"
    victim.write_text("of root")
    before = victim.stat()
    names = [f"next-{number}" for number in range(40)]
    agent = make_agent("--run-as=nobody", folder=passable / "agent", nodes=("n0:a100:64",))
    gangs = str(agent.data_dir / "gangs")
    attack = a_program("attack", 0, PYTHON, "-c", SEIZE, str(victim), gangs, *names)
    server.want(1, attack)
    await server.sees(1, ("attack", 1, "n0", "RUNNING"))
    logs = agent.data_dir / "logs" / "attack" / "1"
    await until(lambda: [f for f in logs.glob("*.log") if f.read_text() == "ready\n"])
    nexts = [a_program(name, 1 + k, "/bin/true") for k, name in enumerate(names)]
    server.want(2, attack, *nexts)
    await until(lambda: len(server.seen(2) or ()) == 1 + len(names))
    await until(lambda: sum(row[3] in OVER for row in server.seen(2) or ()) == len(names))
    assert ("attack", 1, "n0", "RUNNING") in (server.seen(2) or ())
    after = victim.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (0, 0, before.st_mode)
    assert victim.read_text() == "of root"
    assert pwd.getpwnam("nobody").pw_uid in {
        path.stat().st_uid for path in agent.data_dir.glob("gangs/next-*/out")
    }


@needs_root
@pytest.mark.parametrize("step", ["program", "staging"])
async def test_a_directory_that_the_jobs_user_cannot_enter_is_not_entered_for_it(
    server: FakeServer, passable: Path, make_agent: MakeAgent, step: str
) -> None:
    folder = passable / "home" / "project"
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text("of somebody")
    folder.parent.chmod(0o700)
    agent = make_agent("--run-as=nobody", folder=passable / "agent")
    read = ("/bin/cat", "data.txt")
    command, staging = (read, ()) if step == "program" else (("/bin/true",), read)
    server.want(
        1,
        a_program("a", 0, *command, workdir=str(folder), staging_command=staging),
    )
    await until(lambda: [row for row in server.seen(1) or () if row[3] in OVER])
    assert server.seen(1) == [("a", 1, "n0", "FAILED")]
    assert f"cannot enter {folder} as nobody: Permission denied" in error_of(server, "a")
    logs = [path.read_text() for path in (agent.data_dir / "logs").rglob("*.log")]
    assert not any("of somebody" in text for text in logs)
