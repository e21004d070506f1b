"""A node whose agent is killed: its jobs run elsewhere soon, though nobody asks for a round."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.v1 import clusters_pb2, jobs_pb2
from tests.support.agents import is_running
from tests.support.system import Lab, User, until
from tests.support.training_lab import TrainingLab

LEASE_S, MARGIN_S, HEARTBEAT_S = 12.0, 2.0, 0.5
"""A busy machine may take long to handle a heartbeat, so the lease is not shorter."""

REST_S = 5.0
"""The longest time from the end of lease and margin until the jobs have other GPUs."""

HOUR_S = 3600.0

SETTINGS = {
    "TESSERA_LEASE_S": str(LEASE_S),
    "TESSERA_MARGIN_S": str(MARGIN_S),
    "TESSERA_HEARTBEAT_S": str(HEARTBEAT_S),
}

LEAVES_CHILDREN = """
import os, subprocess, sys, time
note = "import os, sys, time; open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close();"
subprocess.Popen(["env", "-i", sys.executable, "-c", note + "time.sleep(10**6)", sys.argv[1]],
    start_new_session=True)
exec(note)
while True:
    time.sleep(1)
"""
"""A program with a child in a session of its own, which nothing marks as the job's."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Yield two replicas whose period never ends within a test."""
    with run_stack(replicas=2, settings=SETTINGS, period_s=HOUR_S) as started:
        yield started


@pytest.fixture(scope="module")
def user(stack: Stack) -> Iterator[User]:
    with User(stack) as caller:
        yield caller


def _noted(folder: Path, known: Path) -> list[int]:
    """Return the processes in ``folder`` once the keeper has written both down."""
    pids = [int(path.name) for path in folder.iterdir()]
    recorded = json.loads(known.read_text())["processes"] if known.exists() else []
    return pids if len(pids) == 2 and set(pids) <= {pid for pid, _ in recorded} else []


def nodes_of(job: jobs_pb2.Job) -> set[str]:
    return {share.node.rpartition("/")[2] for share in job.allocation.shares}


def test_jobs_of_a_killed_agent_run_elsewhere_soon_after_lease_and_margin(
    stack: Stack, user: User
) -> None:
    with Lab(stack, user, "killed-agent") as lab:
        agents = {name: lab.agent((name, 2)) for name in ("n0", "n1")}
        lab.submit("wide", 4)  # on both nodes
        lab.wait_for_state("wide", jobs_pb2.RUNNING)
        agents["n2"] = lab.agent(("n2", 2))
        agents["n1"].kill()
        killed_s = time.monotonic()

        def placed_again() -> jobs_pb2.Job | None:
            job = lab.job("wide")
            return job if nodes_of(job) == {"n0", "n2"} else None

        job = until(placed_again, "wide has GPUs of the nodes that are left")
        assert time.monotonic() - killed_s <= LEASE_S + MARGIN_S + REST_S
        assert lab.nodes()["n1"].state == clusters_pb2.Node.UNREACHABLE
        assert job.generation == 2
        running = lab.wait_for_state("wide", jobs_pb2.RUNNING)
        assert (nodes_of(running), running.retries) == ({"n0", "n2"}, 0)
        for name in ("n0", "n2"):
            agents[name].wait_for_gangs({("wide", 2)})
        assert all(r.outcome == "committed" for r in lab.rounds())


def test_nothing_of_a_job_is_left_when_it_starts_elsewhere_though_its_keeper_was_killed_too(
    user: User, tmp_path: Path, stack: Stack
) -> None:
    with TrainingLab(stack, user, "killed-keeper") as lab:
        agents = [lab.program_agent("n0", 1)]
        lab.train("a", (sys.executable, "-c", LEAVES_CHILDREN, str(tmp_path)), iterations=10**9)
        lab.wait_for_state("a", jobs_pb2.RUNNING)
        known = agents[0].folder / "gangs" / "a@1" / "processes.json"
        pids = until(lambda: _noted(tmp_path, known), "the keeper knows the program and its child")
        agents.append(lab.program_agent("n1", 1))
        agents[0].kill()
        os.kill(agents[0].pid_of("a"), signal.SIGKILL)
        until(lambda: nodes_of(lab.job("a")) == {"n1"}, "it has the GPU of n1")
        assert not any(is_running(pid) for pid in pids)


def test_a_job_that_waits_gets_the_gpus_that_a_lost_nodes_job_held_elsewhere(
    stack: Stack, user: User
) -> None:
    with Lab(stack, user, "killed-agent-2") as lab:
        agents = [lab.agent((name, 2)) for name in ("n0", "n1")]
        lab.submit("wide", 4)
        lab.wait_for_state("wide", jobs_pb2.RUNNING)
        lab.submit("small", 2, weight=0.01)
        until(lambda: lab.job("small").HasField("reason"), "a round has decided on small")
        assert lab.job("small").state == jobs_pb2.QUEUED
        agents[1].kill()
        killed_s = time.monotonic()
        until(lambda: nodes_of(lab.job("small")) == {"n0"}, "small has the GPUs of n0")
        assert time.monotonic() - killed_s <= LEASE_S + MARGIN_S + REST_S
        lab.wait_for_state("small", jobs_pb2.RUNNING)
        assert lab.job("wide").state == jobs_pb2.QUEUED
