"""Nodes that die, fail their check or start nothing, and gangs of all GPUs of a cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.benchmarks.schedulers.server_streams import run_on_server
from tessera.benchmarks.schedulers.streams import GpuPool, StreamDraft
from tessera.db.clusters.failed_starts import DRAINED_BY, MAX_FAILED_STARTS
from tessera.formulation.job.runtimes import JAX
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import clusters_pb2, jobs_pb2, launch_pb2
from tests.support.agents import is_running
from tests.support.database import a_database
from tests.support.pythons import install, make_python
from tests.support.system import Agent, Lab, User, nodes_of, until
from tests.support.training_lab import HOUR_S, TRAINING_SETTINGS, TrainingLab

LEASE_S, MARGIN_S = 12.0, 2.0
"""A busy machine may take long to handle a heartbeat, so the lease is not shorter."""


REST_S = 5.0
"""The longest time from the end of lease and margin until the jobs have other GPUs."""


PROBATION_S = 3.0
"""A probation that is long enough to be seen, even if the machine is busy."""

SETTINGS = TRAINING_SETTINGS | {
    "TESSERA_LEASE_S": str(LEASE_S),
    "TESSERA_MARGIN_S": str(MARGIN_S),
    "TESSERA_PROBATION_S": str(PROBATION_S),
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
        until(lambda: nodes_of(lab.job("a")) == {good}, "a has GPUs of the other node")
        moved = lab.wait_for_state("a", jobs_pb2.RUNNING)
        assert (moved.generation, moved.retries, nodes_of(moved)) == (2, 0, {good})
        until(lambda: node().drained, "no job is left on the node")
        (tmp_path / f"{bad}.bad").unlink()
        until(lambda: node().HasField("probation_end_time"), "the node is on probation")
        until(lambda: node().state == clusters_pb2.Node.READY, "the node has returned")
        assert not node().faults
        lab.submit("b", 2)
        assert nodes_of(lab.wait_for_state("b", jobs_pb2.RUNNING)) == {bad}


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
        assert nodes_of(lab.wait_for_state("a", jobs_pb2.RUNNING)) == {"n0"}
        assert (tmp_path / "runs").read_text() == "x"


def spoil(agent: Agent) -> None:
    """Make the agent unable to start anything. Even root cannot make a directory below a file."""
    gangs = agent.folder / "gangs"
    shutil.rmtree(gangs)
    gangs.touch()


def test_no_job_fails_for_good_because_of_one_bad_node_and_its_restart_ends_the_drain(
    stack: Stack, user: User
) -> None:
    with Lab(stack, user, "one-bad-node") as lab:
        agents = {name: lab.agent((name, n)) for name, n in (("bad", 14), ("n1", 13), ("n2", 13))}
        spoil(agents["bad"])
        for number in range(40):
            lab.submit(f"a{number}", 1)
        until(lambda: lab.nodes()["bad"].drained_by == DRAINED_BY, "the bad node is drained")
        assert "restart its agent or undrain it" in lab.nodes()["bad"].drain_reason
        unlucky = [job for job in lab.jobs() if job.training.exit_reason]
        assert len(unlucky) >= MAX_FAILED_STARTS
        assert {job.training.exit_reason for job in unlucky} == {launch_pb2.EXIT_NODE_UNFIT}
        (agents["bad"].folder / "gangs").unlink()
        agents["bad"].kill()
        agents["bad"].start()
        assert lab.nodes()["bad"].drain_reason == ""
        until(lambda: len(lab.jobs(jobs_pb2.RUNNING)) == 40, "all jobs run")
        assert {job.retries for job in lab.jobs()} == {0}


def test_a_job_runs_where_its_framework_is_and_one_that_is_installed_later_is_noticed(
    stack: Stack, user: User, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax, time\nwhile True:\n    time.sleep(1)\n")
    script.chmod(0o644)
    with TrainingLab(stack, user, "frameworks") as lab:
        for name in ("n0", "n1"):
            lab.program_agent(name, 1, f"--python={make_python(tmp_path / name)}")
        jax = {"runtime": JAX, "until_exit": True}
        for name in ("a", "b"):
            lab.train(name, [str(script)], launch=jax)

        def reason() -> jobs_pb2.Reason:
            return lab.job("a").reason

        until(lambda: reason().code == "RUNTIME_MISSING", "no node can start the jobs")
        assert reason().message.startswith("no node offers the runtime jax: no module jax in ")
        assert reason().message.endswith(" (n0, n1)")
        install(tmp_path / "n1", "jax", "0.10.2")
        running = until(lambda: lab.jobs(jobs_pb2.RUNNING), "a job has the GPU of n1")
        assert [nodes_of(job) for job in running] == [{"n1"}]
        offers = {o.runtime: o.version or o.problem for o in lab.nodes()["n1"].runtimes}
        assert offers["jax"] == "jax 0.10.2"
        assert offers["alpa"].startswith("no module alpa in ")
        shutil.rmtree(tmp_path / "n1" / "site" / "jax")
        until(
            lambda: any(o.problem for o in lab.nodes()["n1"].runtimes if o.runtime == "jax"),
            "n1 offers jax no more",
        )
        (job,) = lab.jobs(jobs_pb2.RUNNING)  # it goes on
        assert (job.generation, job.retries) == (1, 0)


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
        until(lambda: lab.job("a").last_error, "the bad node could not start it")
        lab.agent(("good", 1))
        running = until(
            lambda: job if (job := lab.job("a")).state == jobs_pb2.RUNNING else None, "it runs"
        )
        assert nodes_of(running) == {"good"}
        assert first.process.poll() is None


SMALL_JOBS: Final = 16
LASTING_S: Final = 180.0
"""Seconds of training of each job, which its agent replays in six."""


def test_a_gang_of_all_gpus_and_the_small_jobs_on_them_start_once_and_end(server_url: str) -> None:
    draft = StreamDraft(
        GpuPool(gpu_type="h100", nodes=2),
        GpuPool(nodes=4, node_gpus=4),
        GpuPool(gpu_type="v100", nodes=2),
    )
    request: dict[str, Any] = {"requested_gpu_type": "h100", "allowed_gpu_types": ("h100",)}
    for _ in range(SMALL_JOBS):
        draft.add(0.0, 1, LASTING_S, **request)
    draft.add(60.0, 16, LASTING_S, role="gang", **request)
    with a_database(server_url) as database:
        run = run_on_server({"flap": draft.finish()}, RoundOptions(), database.url)["flap"]
    assert run.state == ["succeeded"] * (SMALL_JOBS + 1)
    assert run.restarts == 0
    assert run.unpromised_jobs == 0
    (gang,) = [i for i, name in enumerate(run.names) if name.startswith("gang")]
    assert run.start_s[gang] >= max(run.end_s[:gang] + run.end_s[gang + 1 :])
