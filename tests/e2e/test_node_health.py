"""A node whose check fails: it is drained, its job moves, and it returns after probation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.v1 import clusters_pb2, jobs_pb2
from tests.support.system import Agent, Lab, User, until

HOUR_S = 3600.0

PROBATION_S = 3.0
"""A probation that is long enough to be seen, even if the machine is busy."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Yield two replicas whose period never ends within a test."""
    settings = {"TESSERA_PROBATION_S": str(PROBATION_S)}
    with run_stack(replicas=2, settings=settings, period_s=HOUR_S) as started:
        yield started


@pytest.fixture(scope="module")
def user(stack: Stack) -> Iterator[User]:
    with User(stack) as caller:
        yield caller


def nodes_of(job: jobs_pb2.Job) -> list[str]:
    return [share.node.rpartition("/")[2] for share in job.allocation.shares]


def a_checked_agent(lab: Lab, folder: Path, name: str, *flags: str) -> Agent:
    """Start an agent whose node is faulty while the file ``NAME.bad`` exists."""
    check = folder / f"{name}.py"
    check.write_text(
        f"import os, sys\nsys.exit('disk 2 fails' if os.path.exists('{folder}/{name}.bad') else 0)\n"
    )
    health = (f"--health-command={sys.executable} {check}", "--health-period=0.2")
    return lab.agent((name, 2), flags=(*health, *flags))


def test_a_node_whose_check_fails_is_drained_and_returns_after_probation(
    stack: Stack, user: User, tmp_path: Path
) -> None:
    with Lab(stack, user, "health") as lab:
        for name in ("n0", "n1"):
            a_checked_agent(lab, tmp_path, name)
        lab.submit("a", 2)
        (bad,) = nodes_of(lab.wait_for_state("a", jobs_pb2.RUNNING))
        (good,) = {"n0", "n1"} - {bad}

        def node() -> clusters_pb2.Node:
            return lab.nodes()[bad]

        (tmp_path / f"{bad}.bad").touch()
        until(lambda: node().state == clusters_pb2.Node.DRAINING, "the node is drained")
        drained = node()
        assert (drained.drained_by, drained.drain_reason) == ("health", "disk 2 fails")
        assert list(drained.faults) == ["disk 2 fails"]
        until(lambda: nodes_of(lab.job("a")) == [good], "a has GPUs of the other node")
        moved = lab.wait_for_state("a", jobs_pb2.RUNNING)
        assert (moved.generation, moved.retries, nodes_of(moved)) == (2, 0, [good])
        until(lambda: node().drained, "no job is left on the node")
        (tmp_path / f"{bad}.bad").unlink()
        until(lambda: node().HasField("probation_end_time"), "the node is on probation")
        until(lambda: node().state == clusters_pb2.Node.READY, "the node has returned")
        assert not node().faults
        lab.submit("b", 2)
        assert nodes_of(lab.wait_for_state("b", jobs_pb2.RUNNING)) == [bad]


def test_a_job_that_waits_gets_a_validated_node_without_a_call(
    stack: Stack, user: User, tmp_path: Path
) -> None:
    with Lab(stack, user, "validated") as lab:
        tested = tmp_path / "tested.py"
        tested.write_text("import sys\nopen(sys.argv[1], 'a').write('x')\n")
        validate = f"--validate-command={sys.executable} {tested} {tmp_path}/runs"
        a_checked_agent(lab, tmp_path, "n0", validate)
        (tmp_path / "n0.bad").touch()
        until(lambda: lab.nodes()["n0"].state == clusters_pb2.Node.DRAINING, "n0 is drained")
        lab.submit("a", 2)
        until(lambda: lab.job("a").HasField("reason"), "a round has decided on a")
        assert lab.job("a").state == jobs_pb2.QUEUED
        (tmp_path / "n0.bad").unlink()
        assert nodes_of(lab.wait_for_state("a", jobs_pb2.RUNNING)) == ["n0"]
        assert (tmp_path / "runs").read_text() == "x"
