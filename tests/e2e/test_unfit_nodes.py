"""A node that can start nothing swallows no jobs: they run elsewhere, and it is drained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.db.failed_starts import DRAINED_BY
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.v1 import clusters_pb2, jobs_pb2, launch_pb2
from tests.support.small_disk import fill_disk
from tests.support.system import Agent, Lab, User, until
from tests.support.training_lab import HOUR_S, TRAINING_SETTINGS

GPUS = 2
JOBS = 12

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with run_stack(settings=TRAINING_SETTINGS, period_s=HOUR_S) as started:
        yield started


@pytest.fixture(scope="module")
def user(stack: Stack) -> Iterator[User]:
    with User(stack) as caller:
        yield caller


def spoil(agent: Agent) -> None:
    """Make the agent unable to start anything. Even root cannot make a directory below a file."""
    gangs = agent.folder / "gangs"
    shutil.rmtree(gangs)
    gangs.touch()


def mend(agent: Agent) -> None:
    (agent.folder / "gangs").unlink()


def nodes_of(job: jobs_pb2.Job) -> set[str]:
    return {share.node.rpartition("/")[2] for share in job.allocation.shares}


def test_no_job_fails_for_good_because_of_one_bad_node_and_its_restart_ends_the_drain(
    stack: Stack, user: User
) -> None:
    with Lab(stack, user, "one-bad-node") as lab:
        agents = {name: lab.agent((name, GPUS)) for name in ("bad", "n1", "n2", "n3")}
        spoil(agents["bad"])
        for number in range(JOBS):
            lab.submit(f"a{number}", 1)

        def is_drained() -> bool:
            node = lab.nodes()["bad"]
            return node.drained_by == DRAINED_BY

        until(is_drained, "the bad node is drained")
        assert "restart its agent or undrain it" in lab.nodes()["bad"].drain_reason
        jobs = lab.jobs()
        assert {job.state for job in jobs}.isdisjoint({jobs_pb2.FAILED, jobs_pb2.FAILING})
        assert max(job.retries for job in jobs) == 1
        unlucky = next(job for job in jobs if job.retries)
        assert unlucky.training.exit_reason == launch_pb2.EXIT_NODE_UNFIT
        mend(agents["bad"])
        agents["bad"].kill()
        agents["bad"].start()
        assert lab.nodes()["bad"].drain_reason == ""


def test_a_job_that_a_drain_moves_to_a_bad_node_goes_on_to_a_good_one(
    stack: Stack, user: User
) -> None:
    with Lab(stack, user, "moved") as lab:
        first = lab.agent(("n0", 1))
        lab.submit("a", 1)
        lab.wait_for_state("a", jobs_pb2.RUNNING)
        bad = lab.agent(("bad", 1))
        spoil(bad)
        request = clusters_pb2.DrainNodesRequest(
            parent=lab.parent, names=[f"{lab.parent}/nodes/n0"], reason="repair"
        )
        user.insist(lambda r: r.clusters.DrainNodes(request))
        until(lambda: lab.job("a").retries == 1, "the bad node could not start it")
        lab.agent(("good", 1))
        running = until(
            lambda: job if (job := lab.job("a")).state == jobs_pb2.RUNNING else None, "it runs"
        )
        assert nodes_of(running) == {"good"}
        assert first.process.poll() is None


def test_a_node_whose_disk_is_full_is_drained(stack: Stack, user: User, small_disk: Path) -> None:
    with Lab(stack, user, "full-disk") as lab:
        lab.agent(("full", 4), flags=(f"--data-dir={small_disk}/agent",))
        fill_disk(small_disk / "rest")
        for number in range(4):
            lab.submit(f"a{number}", 1)
        until(lambda: lab.nodes()["full"].drained_by == DRAINED_BY, "the node is drained")
        assert "No space left on device" in lab.nodes()["full"].drain_reason
